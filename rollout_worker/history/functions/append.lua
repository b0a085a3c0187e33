#!lua
-- Append one rollout to its problem's log, once, and drop what left the window.
-- KEYS: log, lengths, rewards (one slot).
-- ARGV: rollout id, generation, record, length entry, oldest generation to keep.
-- Returns 1 if appended, 0 if it was there already, -1 if it is older than the window.
local log, lengths = KEYS[1], KEYS[2]
local oldest = tonumber(ARGV[5])
if tonumber(ARGV[2]) < oldest then
  return -1
end
if redis.call('HSETNX', lengths, ARGV[1], ARGV[4]) == 0 then
  return 0
end
redis.call('XADD', log, '*', 'i', ARGV[1], 'g', ARGV[2], 'd', ARGV[3])
-- Generations arrive nearly in order, so what is too old stands at the head. An entry with no generation was not
-- written here: readers report it, and it is passed over until all before the window has gone.
local after = '-'
while true do
  local head = redis.call('XRANGE', log, after, '+', 'COUNT', 1)[1]
  local entry = {}
  for i = 1, #head[2], 2 do
    entry[head[2][i]] = head[2][i + 1]
  end
  local generation = tonumber(entry.g)
  if generation and generation >= oldest then
    return 1
  end
  if generation then
    redis.call('XDEL', log, head[1])
    if entry.i then
      redis.call('HDEL', lengths, entry.i)
      redis.call('HDEL', KEYS[3], entry.i)
    end
  else
    after = '(' .. head[1]
  end
end

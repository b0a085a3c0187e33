#!lua
-- Append one rollout to its problem's log, once, and drop what left the window.
-- KEYS: log, lengths (one slot).
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
-- Generations arrive nearly in order, so what is too old stands at the head.
while true do
  local head = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
  local entry = {}
  for i = 1, #head[2], 2 do
    entry[head[2][i]] = head[2][i + 1]
  end
  -- An entry without a generation was not written here: leave it for a reader to report.
  if not entry.g or tonumber(entry.g) >= oldest then
    return 1
  end
  redis.call('XDEL', log, head[1])
  redis.call('HDEL', lengths, entry.i)
end

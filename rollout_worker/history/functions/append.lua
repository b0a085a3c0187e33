#!lua
-- Append one rollout to its problem, once, and drop what has left the problem's window.
-- KEYS: log, lengths, blocks (one slot).
-- ARGV: length entry (16 bytes, the rollout's key first; empty: only drop), generation, record,
--   window: so many of the problem's generations are kept, of which so many however old they are, and the others only
--   from this generation on.
-- Returns what became of it (1 appended, 0 there already, -1 older than the window) and the bytes that the keys take.
local log, lengths, blocks = KEYS[1], KEYS[2], KEYS[3]
local entry, generation = ARGV[1], ARGV[2]
local window, always, since = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

-- A generation, as lengths have it for a field; nil for fields that are none of ours.
local function generation_of(field)
  return string.match(field, '^%d+$') and tonumber(field)
end

-- By its lengths a problem's generations are known. Where they are lost, those of its rollouts stand in.
if entry ~= '' and redis.call('HLEN', lengths) == 0 then
  for _, old in ipairs(redis.call('XRANGE', log, '-', '+')) do
    for i = 1, #old[2], 2 do
      if old[2][i] == 'g' and generation_of(old[2][i + 1]) then
        redis.call('HSETNX', lengths, old[2][i + 1], '')
      end
    end
  end
  for _, block in ipairs(redis.call('HKEYS', blocks)) do
    local newest = string.match(block, '^%d+')
    if newest then
      redis.call('HSETNX', lengths, newest, '')
    end
  end
end

-- The oldest generation that is kept; 0 if there is none at all.
local function oldest_kept()
  local generations, sampled = {}, {}
  local function add(name)
    local number = generation_of(name)
    if number and not sampled[number] then
      sampled[number] = true
      generations[#generations + 1] = number
    end
  end
  for _, name in ipairs(redis.call('HKEYS', lengths)) do
    add(name)
  end
  if entry ~= '' then
    add(generation)
  end
  table.sort(generations, function(one, other) return one > other end)
  local oldest = 0
  for place, number in ipairs(generations) do
    if place > window or (place > always and number < since) then
      break
    end
    oldest = number
  end
  return oldest
end
local oldest = oldest_kept()

-- Where a rollout's entry begins in those of its generation; nil if it is not there.
local function place(known, key)
  local at = string.find(known, key, 1, true)
  while at and (at - 1) % 16 ~= 0 do
    at = string.find(known, key, at + 1, true)
  end
  return at
end

local became = -1
if entry ~= '' and tonumber(generation) >= oldest then
  local known = redis.call('HGET', lengths, generation) or ''
  if place(known, string.sub(entry, 1, 8)) then
    became = 0
  else
    redis.call('XADD', log, '*', 'g', generation, 'd', ARGV[3])
    redis.call('HSET', lengths, generation, known .. entry)
    became = 1
  end
end

for _, old in ipairs(redis.call('HKEYS', lengths)) do
  if (generation_of(old) or oldest) < oldest then
    redis.call('HDEL', lengths, old)
  end
end
for _, block in ipairs(redis.call('HKEYS', blocks)) do
  if (tonumber(string.match(block, '^%d+')) or oldest) < oldest then
    redis.call('HDEL', blocks, block)
  end
end
-- Generations arrive nearly in order, so what is too old stands at the head. An entry with no generation was not
-- written here: readers report it, and it is passed over until all before the window has gone.
local after = '-'
while true do
  local head = redis.call('XRANGE', log, after, '+', 'COUNT', 1)[1]
  if not head then
    break
  end
  local fields = {}
  for i = 1, #head[2], 2 do
    fields[head[2][i]] = head[2][i + 1]
  end
  local age = tonumber(fields.g)
  if age and age >= oldest then
    break
  end
  if age then
    redis.call('XDEL', log, head[1])
  else
    after = '(' .. head[1]
  end
end

local bytes = 0
for _, key in ipairs(KEYS) do
  bytes = bytes + (redis.call('MEMORY', 'USAGE', key) or 0)
end
return {became, bytes}

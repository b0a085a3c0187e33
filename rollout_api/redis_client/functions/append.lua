#!lua
-- Append one rollout to its problem, once, and delete rollouts that have left the problem's window.
-- KEYS: log, lengths, blocks (one hash slot).
-- ARGV: length entry (16 bytes, beginning with the rollout's key; empty: only delete), generation, record,
--   window (number of the problem's newest generations that are kept).
-- Returns the result (1 appended, 0 duplicate, -1 older than the window) and the size of the keys in bytes.
local log, lengths, blocks = KEYS[1], KEYS[2], KEYS[3]
local entry, generation = ARGV[1], ARGV[2]
local window = tonumber(ARGV[4])

-- The generation that a field of the lengths stands for; nil for fields that another program wrote.
local function generation_of(field)
  return string.match(field, '^%d+$') and tonumber(field)
end

-- The fields of the lengths are the generations that sampled the problem. If the lengths are lost, restore
-- these fields from the rollouts.
if entry ~= '' and redis.call('HLEN', lengths) == 0 then
  for _, log_entry in ipairs(redis.call('XRANGE', log, '-', '+')) do
    local fields = log_entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'g' and generation_of(fields[i + 1]) then
        redis.call('HSETNX', lengths, fields[i + 1], '')
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

-- The oldest generation that is kept; 0 if the problem has no generations. window.py implements the same rule.
local function find_oldest_kept()
  local generations, seen = {}, {}
  local function add(name)
    local number = generation_of(name)
    if number and not seen[number] then
      seen[number] = true
      generations[#generations + 1] = number
    end
  end
  for _, name in ipairs(redis.call('HKEYS', lengths)) do
    add(name)
  end
  if entry ~= '' then
    add(generation)
  end
  table.sort(generations, function(left, right) return left > right end)
  return generations[math.min(window, #generations)] or 0
end
local oldest_kept = find_oldest_kept()

-- The position of a rollout's entry among those of its generation; nil if it is not there.
local function find_entry(entries, key)
  local at = string.find(entries, key, 1, true)
  while at and (at - 1) % 16 ~= 0 do
    at = string.find(entries, key, at + 1, true)
  end
  return at
end

local result = -1
if entry ~= '' and tonumber(generation) >= oldest_kept then
  -- A rollout that was lost in a crash of the job's server may be sampled again by other weights, so all generations
  -- are searched.
  result = 1
  for _, entries in ipairs(redis.call('HVALS', lengths)) do
    if find_entry(entries, string.sub(entry, 1, 8)) then
      result = 0
    end
  end
  if result == 1 then
    redis.call('XADD', log, '*', 'g', generation, 'd', ARGV[3])
    redis.call('HSET', lengths, generation, (redis.call('HGET', lengths, generation) or '') .. entry)
  end
end

for _, field in ipairs(redis.call('HKEYS', lengths)) do
  if (generation_of(field) or oldest_kept) < oldest_kept then
    redis.call('HDEL', lengths, field)
  end
end
for _, block in ipairs(redis.call('HKEYS', blocks)) do
  if (tonumber(string.match(block, '^%d+')) or oldest_kept) < oldest_kept then
    redis.call('HDEL', blocks, block)
  end
end
-- Generations arrive nearly in order, so entries that are too old are at the head of the log. An entry without a
-- generation was written by another program: readers report it, and it is skipped here.
local start = '-'
while true do
  local head = redis.call('XRANGE', log, start, '+', 'COUNT', 1)[1]
  if not head then
    break
  end
  local fields = {}
  for i = 1, #head[2], 2 do
    fields[head[2][i]] = head[2][i + 1]
  end
  local entry_generation = tonumber(fields.g)
  if entry_generation and entry_generation >= oldest_kept then
    break
  end
  if entry_generation then
    redis.call('XDEL', log, head[1])
  else
    start = '(' .. head[1]
  end
end

local bytes = 0
for _, key in ipairs(KEYS) do
  bytes = bytes + (redis.call('MEMORY', 'USAGE', key) or 0)
end
return {result, bytes}

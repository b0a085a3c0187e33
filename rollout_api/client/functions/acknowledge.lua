#!lua flags=allow-oom
-- Acknowledge results, and delete those that every consumer group has acknowledged. This also runs on a full server,
-- because it frees memory.
-- KEYS: result stream.
-- ARGV: consumer group, ids of the entries to acknowledge.
-- Returns the number of entries that are left in the stream; 0 if the stream does not exist.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end

-- The id of an entry as numbers that can be compared.
local function parse(id)
  local ms, sequence = string.match(id, '(%d+)-(%d+)')
  return {tonumber(ms), tonumber(sequence)}
end
local function before(a, b)
  return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
end

redis.call('XACK', KEYS[1], unpack(ARGV))
-- The first entry that a group has not acknowledged or not received yet, over all groups.
local slowest
local others = {}
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local state = {}
  for i = 1, #group, 2 do
    state[group[i]] = group[i + 1]
  end
  local reached = parse(state['last-delivered-id'])
  local pending = redis.call('XPENDING', KEYS[1], state['name'])
  local first, last
  if pending[1] > 0 then
    first, last = parse(pending[2]), parse(pending[3])
  end
  local open = first or {reached[1], reached[2] + 1}
  if not slowest or before(open, slowest) then
    slowest = open
  end
  if state['name'] ~= ARGV[1] then
    table.insert(others, {name = state['name'], reached = reached, first = first, last = last})
  end
end
if not slowest then
  return redis.call('XLEN', KEYS[1])
end
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-%.0f', slowest[1], slowest[2]))
if redis.call('XLEN', KEYS[1]) == 0 then
  return 0
end

-- Whether another group has acknowledged an entry. Entries behind the slowest one are deleted one by one, so that an
-- entry that stays pending for long does not keep all that follow it.
local function has_acknowledged(group, text, id)
  if before(group.reached, id) then
    return false
  end
  if not group.first or before(id, group.first) or before(group.last, id) then
    return true
  end
  return #redis.call('XPENDING', KEYS[1], group.name, text, text, 1) == 0
end
local deletable = {}
for i = 2, #ARGV do
  local id = parse(ARGV[i])
  local is_deletable = not before(id, slowest)
  for _, group in ipairs(others) do
    is_deletable = is_deletable and has_acknowledged(group, ARGV[i], id)
  end
  if is_deletable then
    table.insert(deletable, ARGV[i])
  end
end
if #deletable > 0 then
  redis.call('XDEL', KEYS[1], unpack(deletable))
end
return redis.call('XLEN', KEYS[1])

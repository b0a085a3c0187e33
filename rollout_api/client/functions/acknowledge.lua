#!lua flags=allow-oom
-- Acknowledge results and delete what every group has acknowledged.
-- KEYS: results. ARGV: group, ids of entries.
-- Returns the number of entries left; none if the job, and the stream with it, is gone.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local function parse(id)
  local ms, sequence = string.match(id, '(%d+)-(%d+)')
  return {tonumber(ms), tonumber(sequence)}
end
local function before(a, b)
  return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
end

redis.call('XACK', KEYS[1], unpack(ARGV))
local slowest
local others = {}
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local at = {}
  for i = 1, #group, 2 do
    at[group[i]] = group[i + 1]
  end
  local reached = parse(at['last-delivered-id'])
  local pending = redis.call('XPENDING', KEYS[1], at['name'])
  local first, last
  if pending[1] > 0 then
    first, last = parse(pending[2]), parse(pending[3])
  end
  local open = first or {reached[1], reached[2] + 1}
  if not slowest or before(open, slowest) then
    slowest = open
  end
  if at['name'] ~= ARGV[1] then
    table.insert(others, {name = at['name'], reached = reached, first = first, last = last})
  end
end
if not slowest then
  return redis.call('XLEN', KEYS[1])
end
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-%.0f', slowest[1], slowest[2]))
if redis.call('XLEN', KEYS[1]) == 0 then
  return 0
end

-- one entry that stays pending for long must not keep all that are behind it
local function is_done_with(group, text, id)
  if before(group.reached, id) then
    return false
  end
  if not group.first or before(id, group.first) or before(group.last, id) then
    return true
  end
  return #redis.call('XPENDING', KEYS[1], group.name, text, text, 1) == 0
end
local done = {}
for i = 2, #ARGV do
  local id = parse(ARGV[i])
  local deleted = not before(id, slowest)
  for _, group in ipairs(others) do
    deleted = deleted and is_done_with(group, ARGV[i], id)
  end
  if deleted then
    table.insert(done, ARGV[i])
  end
end
if #done > 0 then
  redis.call('XDEL', KEYS[1], unpack(done))
end
return redis.call('XLEN', KEYS[1])

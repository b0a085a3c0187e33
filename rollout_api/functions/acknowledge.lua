#!lua flags=allow-oom
-- Acknowledge results and delete what every group has acknowledged.
-- KEYS: results. ARGV: group, ids of entries.
-- Returns the number of entries left; none if the job, and the stream with it, is gone.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('XACK', KEYS[1], unpack(ARGV))
local slowest
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local at = {}
  for i = 1, #group, 2 do
    at[group[i]] = group[i + 1]
  end
  local reached = at['last-delivered-id']
  local pending = redis.call('XPENDING', KEYS[1], at['name'])
  local first, inclusive = reached, false
  if pending[1] > 0 then
    first, inclusive = pending[2], true
  end
  local ms, sequence = string.match(first, '(%d+)-(%d+)')
  ms, sequence = tonumber(ms), tonumber(sequence) + (inclusive and 0 or 1)
  if not slowest or ms < slowest[1] or (ms == slowest[1] and sequence < slowest[2]) then
    slowest = {ms, sequence}
  end
end
if slowest then
  redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-%.0f', slowest[1], slowest[2]))
end
return redis.call('XLEN', KEYS[1])

#!lua
-- Append orders to an engine's inbox, if the calling coordinator is the newest one and the engine is alive.
-- KEYS: fencing token, lease of the engine, inbox of the engine, requests (one hash slot).
-- ARGV: number of the coordinator, largest number of bytes of a request that is part of an order; then, for each order,
--   the entry id of the request that becomes part of it (empty: none), the number of strings that follow, and its
--   alternating field names and values.
-- Returns the ids of the new entries; 'stale' if there is a newer coordinator, 'gone' if the engine's lease has expired.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'stale'
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  return 'gone'
end
local ids, at = {}, 3
while at <= #ARGV do
  local entry, count = ARGV[at], tonumber(ARGV[at + 1])
  local order = {unpack(ARGV, at + 2, at + 1 + count)}
  local request = entry ~= '' and redis.call('XRANGE', KEYS[4], entry, entry)[1]
  if request then
    for field = 1, #request[2], 2 do
      if request[2][field] == 'd' and #request[2][field + 1] <= tonumber(ARGV[2]) then
        order[#order + 1], order[#order + 2] = 'd', request[2][field + 1]
      end
    end
  end
  ids[#ids + 1] = redis.call('XADD', KEYS[3], '*', unpack(order))
  at = at + count + 2
end
return ids

#!lua
-- Append orders to an engine's inbox, if the calling coordinator is the newest one and the engine is alive.
-- KEYS: fencing token, lease of the engine, inbox of the engine (one hash slot).
-- ARGV: number of the coordinator; then, for each order, the number of strings that follow, and its alternating field
--   names and values.
-- Returns the ids of the new entries; 'stale' if there is a newer coordinator, 'gone' if the engine's lease has expired.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'stale'
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  return 'gone'
end
local ids, at = {}, 2
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  ids[#ids + 1] = redis.call('XADD', KEYS[3], '*', unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end
return ids

#!lua
-- Execute commands for a coordinator, unless another one has taken over since.
-- KEYS: fencing token, and the keys that the commands use (one hash slot).
-- ARGV: number of the coordinator; then each command, as a msgpack list of strings.
-- Returns 'stale' if another coordinator has taken over. If Redis has lost the fencing token, none has since then.
local newest = redis.call('GET', KEYS[1])
if newest and newest ~= ARGV[1] then
  return 'stale'
end
for i = 2, #ARGV do
  redis.call(unpack(cmsgpack.unpack(ARGV[i])))
end
return 'done'

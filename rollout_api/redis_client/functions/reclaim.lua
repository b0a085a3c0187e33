#!lua flags=allow-oom
-- Remove an engine whose lease has expired, with its inbox.
-- KEYS: fencing token, lease, inbox, engines (one hash slot).
-- ARGV: number of the coordinator, engine.
-- Returns the entries of the inbox; 'stale' if there is a newer coordinator, 'alive' if the lease was renewed.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 'stale'
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 'alive'
end
local entries = redis.call('XRANGE', KEYS[3], '-', '+')
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[4], ARGV[2])
return entries

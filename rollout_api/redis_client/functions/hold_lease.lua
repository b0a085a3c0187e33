#!lua flags=allow-oom
-- Acquire, renew or release the lease of a history. This also runs on a full server, where maintenance is needed most.
-- KEYS: maintainer lease.
-- ARGV: token of the caller, milliseconds until the lease expires; 0 releases it.
-- Returns 1 if the caller holds the lease now, else 0.
local holder, milliseconds = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
if holder and holder ~= ARGV[1] then
  return 0
end
if milliseconds > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', milliseconds)
  return 1
end
redis.call('DEL', KEYS[1])
return 0

#!lua flags=allow-oom
-- Renew or create an engine's lease, and store its report. Memory does not grow, so this is allowed on a full server.
-- KEYS: lease, engines, observed (one hash slot).
-- ARGV: engine, report, duration of the lease in milliseconds, 1 to create a lease.
-- Returns 1, or 2 if the engine's running rollouts are observed; 0 if the lease had expired, so that they are reassigned.
if ARGV[4] ~= '1' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[1], '1', 'PX', ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return redis.call('EXISTS', KEYS[3]) + 1

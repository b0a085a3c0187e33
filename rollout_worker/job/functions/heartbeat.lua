#!lua flags=allow-oom
-- Renew an engine's lease and leave its report. It takes no more memory than it had, so a full server lets it through.
-- KEYS: lease, engines (one slot).
-- ARGV: engine, report, milliseconds of the lease, 1 to begin a lease.
-- Returns 1; 0 if the lease had ended: what the engine had to do is others' now.
if ARGV[4] ~= '1' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[1], '1', 'PX', ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1

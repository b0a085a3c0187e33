#!lua
-- Return a rollout that an engine cannot make now, once.
-- KEYS: inbox of the engine, events (one slot).
-- ARGV: inbox entry, request id, sample, engine, reason, most events kept.
-- Returns 1; 0 if the engine did not have it (any more).
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'r', ARGV[2], 's', ARGV[3], 'e', ARGV[4], 'x', ARGV[5])
return 1

#!lua
-- Return an assignment that an engine cannot execute, once.
-- KEYS: inbox of the engine, events (one hash slot).
-- ARGV: id of the order, request id, sample, engine, reason, maximum number of events.
-- Returns 1; 0 if the engine no longer has the assignment.
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'r', ARGV[2], 's', ARGV[3], 'e', ARGV[4], 'x', ARGV[5])
return 1

#!lua
-- Return an assignment that an engine cannot execute, once.
-- KEYS: inbox of the engine, events (one hash slot).
-- ARGV: id of the order, request id, sample, engine, reason, maximum number of events, '1' if the
--   rollout has failed or ''.
-- Returns 1; 0 if the engine no longer has the assignment.
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
local fields = {'r', ARGV[2], 's', ARGV[3], 'e', ARGV[4], 'x', ARGV[5]}
if ARGV[7] == '1' then
  fields[#fields + 1], fields[#fields + 2] = 'f', '1'
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', unpack(fields))
return 1

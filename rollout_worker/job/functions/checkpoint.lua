#!lua
-- Keep a rollout's response so far, unless the rollout has ended.
-- KEYS: ledger of the request, partials, attempts (one slot).
-- ARGV: rollout id, sample, partial.
-- Returns 1 if kept, 0 if the rollout has ended.
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 or redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1

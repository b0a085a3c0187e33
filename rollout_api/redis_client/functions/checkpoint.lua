#!lua
-- Store the partial of a running rollout, and reset the number of engines lost with it.
-- KEYS: ledger of the request, partials, attempts (one hash slot).
-- ARGV: rollout id, sample, partial.
-- Returns 1 if the partial is stored, 0 if the rollout has ended.
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 or redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1

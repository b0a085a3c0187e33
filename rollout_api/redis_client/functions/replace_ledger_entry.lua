#!lua
-- Replace the ledger entry of a rollout. A ledger that has expired is not created again, since it would never expire.
-- KEYS: ledger (one hash slot).
-- ARGV: sample, entry.
-- Returns 1 if the entry was replaced, 0 if there is none.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1

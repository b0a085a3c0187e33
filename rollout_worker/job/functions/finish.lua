#!lua
-- Record that a rollout is done, once, and hand it to the relay.
-- KEYS: ledger, outbox (one slot).
-- ARGV: rollout id, ledger entry, the rollout for its history (empty: it does not enter one).
-- Returns 1 if this call did it, 0 if it was done before.
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return 0
end
if ARGV[3] ~= '' then
  redis.call('XADD', KEYS[2], '*', 'd', ARGV[3])
end
return 1

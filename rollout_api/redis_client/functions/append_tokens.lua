#!lua
-- Append tokens to the stream of a running rollout, and reset the number of engines lost with it.
-- Only the engine that has the rollout's order may do so. An order is removed before another engine gets the rollout, so
-- that tokens that were streamed once remain the beginning of the rollout.
-- KEYS: ledger of the request, inbox of the engine, tokens of the rollout, attempts, updates of tokens (one hash slot).
-- ARGV: rollout id, sample, id of the order, number of tokens before these, number including these, tokens, request id,
--   maximum number of updates.
-- Returns the number of tokens in the stream; they are appended only if it was the number before these. -1 if the
-- rollout has ended or the engine no longer has its order.
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 or redis.call('EXISTS', KEYS[1]) == 0 then
  return -1
end
if #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then
  return -1
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
local length = last and tonumber(string.match(last[1], '^%d+')) or 0
if length ~= tonumber(ARGV[4]) then
  return length
end
redis.call('XADD', KEYS[3], ARGV[5] .. '-0', 'd', ARGV[6])
redis.call('HDEL', KEYS[4], ARGV[1])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[8], '*', 'r', ARGV[7])
return tonumber(ARGV[5])

#!lua
-- Store the weights that engines should serve, unless another coordinator has taken over or newer ones are stored.
-- KEYS: fencing token, weights (one hash slot).
-- ARGV: number of the coordinator, version, kind of the weights, the encoded update, kind of the weights that these
--   replace (empty: none).
-- Returns 'stale' if another coordinator has taken over.
local newest = redis.call('GET', KEYS[1])
if newest and newest ~= ARGV[1] then
  return 'stale'
end
local stored = redis.call('HGET', KEYS[2], 'version')
if stored and tonumber(stored) > tonumber(ARGV[2]) then
  return 'older'
end
redis.call('HSET', KEYS[2], 'version', ARGV[2], ARGV[3], ARGV[4])
if ARGV[5] ~= '' then
  redis.call('HDEL', KEYS[2], ARGV[5])
end
return 'done'

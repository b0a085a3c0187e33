#!lua
-- The generation of a run's weight version: the next one when it is first published, the same ever after.
-- KEYS: meta.
-- ARGV: run and version, a generation that it must be newer than (a server that came back empty counts on from there).
local field = 'generation:' .. ARGV[1]
local known = redis.call('HGET', KEYS[1], field)
if known then
  return tonumber(known)
end
local newest = tonumber(redis.call('HGET', KEYS[1], 'generation')) or 0
local generation = string.format('%.0f', math.max(newest, tonumber(ARGV[2])) + 1)
redis.call('HSET', KEYS[1], 'generation', generation, field, generation)
return tonumber(generation)

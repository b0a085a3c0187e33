#!lua
-- The generation of a run's weight version: the next one when it is first published, the same ever after.
-- KEYS: meta. ARGV: run and version.
local field = 'generation:' .. ARGV[1]
local known = redis.call('HGET', KEYS[1], field)
if known then
  return tonumber(known)
end
local generation = redis.call('HINCRBY', KEYS[1], 'generation', 1)
redis.call('HSET', KEYS[1], field, generation)
return generation

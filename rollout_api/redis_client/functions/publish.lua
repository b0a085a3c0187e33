#!lua
-- Assign a generation to a run's weight version: the next one when it is first published, and the same one afterwards.
-- KEYS: meta.
-- ARGV: run and version, a generation that the new one must exceed (a server that lost its data continues from there).
-- Returns the generation.
local field = 'generation:' .. ARGV[1]
local known = redis.call('HGET', KEYS[1], field)
if known then
  return tonumber(known)
end
local newest = tonumber(redis.call('HGET', KEYS[1], 'generation')) or 0
local generation = string.format('%.0f', math.max(newest, tonumber(ARGV[2])) + 1)
redis.call('HSET', KEYS[1], 'generation', generation, field, generation)
return tonumber(generation)

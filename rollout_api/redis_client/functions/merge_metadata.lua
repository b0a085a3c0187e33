#!lua
-- Add missing fields to a history's metadata, from an archive or on a server that has lost its data. The newest
-- generation never decreases.
-- KEYS: meta.
-- ARGV: a generation that the newest one must not be below, then fields and their values, alternating.
-- Returns the newest generation.
for i = 2, #ARGV, 2 do
  redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
end
local newest = tonumber(redis.call('HGET', KEYS[1], 'generation') or 0)
if tonumber(ARGV[1]) > newest then
  redis.call('HSET', KEYS[1], 'generation', ARGV[1])
  newest = tonumber(ARGV[1])
end
return newest

#!lua flags=allow-oom
-- Decay the acceptance counts by age, once for each new generation.
-- KEYS: acceptance by age, meta (one hash slot).
-- ARGV: newest generation, half-life of a count in generations.
-- Returns whether the counts were changed (1 or 0).
local newest = tonumber(ARGV[1])
local passed = newest - (tonumber(redis.call('HGET', KEYS[2], 'decayed_at') or newest - 1) or newest - 1)
if passed <= 0 then
  return 0
end
redis.call('HSET', KEYS[2], 'decayed_at', ARGV[1])
local counts = redis.call('HGETALL', KEYS[1])
for i = 1, #counts, 2 do
  local count = tonumber(counts[i + 1])
  if count then
    redis.call('HSET', KEYS[1], counts[i], string.format('%.6f', count * 0.5 ^ (passed / tonumber(ARGV[2]))))
  end
end
return 1

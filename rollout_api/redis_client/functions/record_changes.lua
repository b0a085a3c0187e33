#!lua
-- Record that problems of one shard were used, and how they changed.
-- KEYS: last used, last changed, sizes, recent lengths (one hash slot).
-- ARGV: number of recent lengths to keep; then for each problem its id, its new size in bytes (empty: it was only used)
--   and the length entries of its new rollouts, 8 bytes each.
-- Change numbers follow the server's clock, but increase even if the clock is set back.
local last_used, last_changed, sizes, recent_lengths = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
local newest = redis.call('ZREVRANGE', last_changed, 0, 0, 'WITHSCORES')
local number = math.max(time[1] * 1000000 + time[2], (tonumber(newest[2]) or 0) + 1)
for i = 2, #ARGV, 3 do
  redis.call('ZADD', last_used, now, ARGV[i])
  if ARGV[i + 1] ~= '' then
    redis.call('ZADD', last_changed, string.format('%.0f', number), ARGV[i])
    redis.call('ZADD', sizes, ARGV[i + 1], ARGV[i])
    number = number + 1
  end
  for at = 1, #ARGV[i + 2], 8 do
    redis.call('LPUSH', recent_lengths, string.sub(ARGV[i + 2], at, at + 7))
  end
end
redis.call('LTRIM', recent_lengths, 0, ARGV[1] - 1)
return #ARGV

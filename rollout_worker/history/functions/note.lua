#!lua
-- Note that problems of one shard were used, and what changed in them.
-- KEYS: used, changed, sizes, recent (one slot).
-- ARGV: rollouts kept in recent; then for each problem its id, the bytes that it takes now (empty: it was only used)
--   and the length entries of its new rollouts, 8 bytes each.
-- Numbers of changes grow with the server's clock, and still do where that was set back.
local used, changed, sizes, recent = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
local newest = redis.call('ZREVRANGE', changed, 0, 0, 'WITHSCORES')
local number = math.max(time[1] * 1000000 + time[2], (tonumber(newest[2]) or 0) + 1)
for i = 2, #ARGV, 3 do
  redis.call('ZADD', used, now, ARGV[i])
  if ARGV[i + 1] ~= '' then
    redis.call('ZADD', changed, string.format('%.0f', number), ARGV[i])
    redis.call('ZADD', sizes, ARGV[i + 1], ARGV[i])
    number = number + 1
  end
  for at = 1, #ARGV[i + 2], 8 do
    redis.call('LPUSH', recent, string.sub(ARGV[i + 2], at, at + 7))
  end
end
redis.call('LTRIM', recent, 0, ARGV[1] - 1)
return #ARGV

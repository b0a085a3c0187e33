#!lua flags=allow-oom
-- Put a block in the place of entries of the log and of blocks, if all of them are still there; also on a full
-- server, which gets room by that.
-- KEYS: log, lengths, blocks (one slot).
-- ARGV: name of the block (empty: there is none, all had left the window), block, how many blocks it replaces, their
--   names, entries that it replaces.
-- Returns whether it was done, and the bytes that the keys take.
local log, blocks = KEYS[1], KEYS[3]
local replaced = tonumber(ARGV[3])
for i = 4, #ARGV do
  if i < 4 + replaced then
    if redis.call('HEXISTS', blocks, ARGV[i]) == 0 then
      return {0, 0}
    end
  elseif #redis.call('XRANGE', log, ARGV[i], ARGV[i]) == 0 then
    return {0, 0}
  end
end
for i = 4, 3 + replaced do
  redis.call('HDEL', blocks, ARGV[i])
end
for i = 4 + replaced, #ARGV do
  redis.call('XDEL', log, ARGV[i])
end
if ARGV[1] ~= '' then
  redis.call('HSET', blocks, ARGV[1], ARGV[2])
end
local bytes = 0
for _, key in ipairs(KEYS) do
  bytes = bytes + (redis.call('MEMORY', 'USAGE', key) or 0)
end
return {1, bytes}

#!lua flags=allow-oom
-- Replace log entries and blocks of a problem by one block, if all of them are still there. This also runs on a full
-- server, because it frees memory.
-- KEYS: log, lengths, blocks (one hash slot).
-- ARGV: name of the new block (empty: none is needed, because everything has left the window), its content, number of
--   blocks to replace, their names, ids of the log entries to replace.
-- Returns whether anything was replaced (1 or 0) and the size of the keys in bytes.
local log, blocks = KEYS[1], KEYS[3]
local num_blocks = tonumber(ARGV[3])
for i = 4, #ARGV do
  if i < 4 + num_blocks then
    if redis.call('HEXISTS', blocks, ARGV[i]) == 0 then
      return {0, 0}
    end
  elseif #redis.call('XRANGE', log, ARGV[i], ARGV[i]) == 0 then
    return {0, 0}
  end
end
for i = 4, 3 + num_blocks do
  redis.call('HDEL', blocks, ARGV[i])
end
for i = 4 + num_blocks, #ARGV do
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

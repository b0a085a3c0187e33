#!lua flags=allow-oom
-- Remove a problem from its shard, unless it was used in the meantime. This also runs on a full server, because it
-- frees memory.
-- KEYS: last used, last changed, sizes (one hash slot).
-- ARGV: problem id, time of its last use as the caller knows it.
-- Returns whether it was removed (1 or 0).
if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or -1) ~= tonumber(ARGV[2]) then
  return 0
end
for _, key in ipairs(KEYS) do
  redis.call('ZREM', key, ARGV[1])
end
return 1

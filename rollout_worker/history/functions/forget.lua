#!lua flags=allow-oom
-- Forget a problem of a shard, unless it was used meanwhile; also on a full server, which gets room by that.
-- KEYS: used, changed, sizes (one slot).
-- ARGV: problem, when it had been used last.
-- Returns whether it is forgotten.
if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or -1) ~= tonumber(ARGV[2]) then
  return 0
end
for _, key in ipairs(KEYS) do
  redis.call('ZREM', key, ARGV[1])
end
return 1

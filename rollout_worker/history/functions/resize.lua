#!lua flags=allow-oom
-- Correct what a shard says of a problem's bytes, unless it was forgotten; also on a full server, which gets room by
-- what comes before.
-- KEYS: sizes.
-- ARGV: problem, bytes.
return redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])

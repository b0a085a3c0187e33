#!lua flags=allow-oom
-- Correct the recorded size of a problem, unless it was deleted. This also runs on a full server, because it follows
-- operations that free memory.
-- KEYS: sizes.
-- ARGV: problem id, size in bytes.
return redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])

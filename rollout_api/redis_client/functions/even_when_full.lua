#!lua flags=allow-oom
-- Carry out a command although the server is out of memory: a small one, for what makes room again.
-- KEYS: the command's key. ARGV: the command, its key included.
return redis.call(unpack(ARGV))

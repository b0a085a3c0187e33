#!lua flags=allow-oom
-- Execute a small command even if the server is out of memory, because it leads to memory being freed.
-- KEYS: key of the command.
-- ARGV: the command with its key and arguments.
-- Returns the reply to the command.
return redis.call(unpack(ARGV))

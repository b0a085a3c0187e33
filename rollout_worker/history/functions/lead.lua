#!lua flags=allow-oom
-- Take, renew or give up the lease of a history; also on a full server, where its holder is needed most.
-- KEYS: keeper.
-- ARGV: token of who asks, milliseconds for which it is held from now on; 0 gives it up.
-- Returns 1 if the lease is the asker's now, else 0.
local holder, span = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
if holder and holder ~= ARGV[1] then
  return 0
end
if span > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', span)
  return 1
end
redis.call('DEL', KEYS[1])
return 0

#!lua
-- Admit a request once, so that a request that was sent twice is only one request.
-- KEYS: ledger of the request, requests (one hash slot).
-- ARGV: id of the request's entry, number of samples.
-- Returns 2 if the request is admitted now, and 1 if it was admitted earlier from this same entry. Otherwise the entry
-- is deleted, and the result is 0 if the request is open under another entry or its client has released its results,
-- -1 if it is fully answered, -2 if it is open with another number of samples, and -3 if the entry does not exist. Redis
-- may have lost it in a restart after the coordinator had read it. A ledger for it would make the request that the
-- client then sends again look like a repetition.
if #redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1]) == 0 then
  return -3
end
local known = redis.call('HMGET', KEYS[1], 'entry', 'n', 'released')
local entry, n, released = known[1], known[2], known[3]
if not entry and not released then
  redis.call('HSET', KEYS[1], 'entry', ARGV[1], 'n', ARGV[2], 'cancelled', '0')
  return 2
end
local done = not entry or redis.call('HLEN', KEYS[1]) - (released and 4 or 3) >= tonumber(n)
if entry == ARGV[1] and not done then
  return 1
end
redis.call('XDEL', KEYS[2], ARGV[1])
if released then
  return 0
end
if done then
  return -1
end
return n == ARGV[2] and 0 or -2

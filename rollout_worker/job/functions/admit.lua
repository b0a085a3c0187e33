#!lua
-- Take a request up, once: a request that was sent twice is one request.
-- KEYS: ledger of the request, requests (one slot).
-- ARGV: the entry's id, number of samples.
-- Returns 1 if it is taken up (now, or by this same entry before), 0 if it is open under another entry, which is kept
-- while this one is deleted, -1 if all its rollouts are done, -2 if it is open with another number of samples; in both
-- cases this entry is deleted.
local known = redis.call('HMGET', KEYS[1], 'entry', 'n')
if not known[1] then
  redis.call('HSET', KEYS[1], 'entry', ARGV[1], 'n', ARGV[2], 'cancelled', '0')
  return 1
end
local done = redis.call('HLEN', KEYS[1]) - 3 >= tonumber(known[2])
if known[1] == ARGV[1] and not done then
  return 1
end
redis.call('XDEL', KEYS[2], ARGV[1])
if done then
  return -1
end
return known[2] == ARGV[2] and 0 or -2

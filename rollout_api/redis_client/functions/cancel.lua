#!lua
-- Record that requests were cancelled. Unknown requests are ignored.
-- KEYS: ledger of each request (one hash slot).
-- Returns 1.
for _, ledger in ipairs(KEYS) do
  if redis.call('EXISTS', ledger) == 1 then
    redis.call('HSET', ledger, 'cancelled', '1')
  end
end
return 1

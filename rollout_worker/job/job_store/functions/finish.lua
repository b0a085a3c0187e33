#!lua
-- Record once that a rollout has ended: in the ledger, the client's results, the outbox, the totals and the timeline.
-- The last rollout of a request also ends the request.
-- KEYS: ledger of the request, requests, results of the client or kept results of the request, outbox, partials,
--   attempts, events, inbox of the engine, trajectory, totals, updates of kept results, tokens of the rollout,
--   timeline (one hash slot).
-- ARGV: rollout id, sample, ledger entry, result, the rollout for the history (empty: it is not stored there),
--   id of the order (empty: there is none), engine, request id, seconds that the ledger is kept after the end of the
--   request, seconds that the trajectory's engine is remembered (0: there is no trajectory), maximum number of events,
--   tokens, decoding steps, draft tokens, accepted draft tokens, last tokens of the prompt for the history (empty:
--   none), measurement for the canary test (empty: none), seconds for which the result is kept under the request (0: it
--   is sent to the client's stream), 1 if the rollout is streamed and 0 otherwise, entry of the timeline, maximum
--   number of its entries, trace of the request (empty: it follows from the request id).
-- Returns 1 if the rollout is recorded, 0 if it was recorded before or is streamed by another engine now, -1 if its
-- request is unknown.
local ledger, rollout, sample, engine = KEYS[1], ARGV[1], ARGV[2], ARGV[7]
-- Return the fields of an entry, and of the others those that are not empty.
local function with_fields(fields, ...)
  for _, field in ipairs({...}) do
    if field[2] ~= '' then
      table.insert(fields, field[1])
      table.insert(fields, field[2])
    end
  end
  return unpack(fields)
end
local has_order = ARGV[6] == '' or redis.call('XDEL', KEYS[8], ARGV[6]) == 1
local request = redis.call('HMGET', ledger, 'entry', 'n')
if not request[1] then
  return -1
end
if ARGV[19] == '1' and not has_order then
  return 0
end
if redis.call('HSETNX', ledger, sample, ARGV[3]) == 0 then
  return 0
end
if ARGV[18] == '0' then
  redis.call('XADD', KEYS[3], '*', 'd', ARGV[4])
else
  redis.call('HSET', KEYS[3], sample, ARGV[4])
  redis.call('EXPIRE', KEYS[3], ARGV[18])
  redis.call('XADD', KEYS[11], 'MAXLEN', '~', ARGV[11], '*', 'r', ARGV[8])
end
if ARGV[5] ~= '' then
  redis.call('XADD', KEYS[4], '*', with_fields({'d', ARGV[5]}, {'c', ARGV[16]}, {'t', ARGV[22]}))
end
redis.call('HINCRBY', KEYS[10], 'rollouts', 1)
redis.call('HINCRBY', KEYS[10], 'tokens', ARGV[12])
redis.call('HINCRBY', KEYS[10], 'decoding_steps', ARGV[13])
redis.call('HINCRBY', KEYS[10], 'draft_tokens', ARGV[14])
redis.call('HINCRBY', KEYS[10], 'accepted_tokens', ARGV[15])
redis.call('XADD', KEYS[13], 'MAXLEN', '~', ARGV[21], '*',
  with_fields({'d', ARGV[20], 'a', request[1]}, {'t', ARGV[22]}))
redis.call('HDEL', KEYS[5], rollout)
redis.call('HDEL', KEYS[6], rollout)
if ARGV[19] == '1' then
  redis.call('UNLINK', KEYS[12])
end
if ARGV[10] ~= '0' then
  redis.call('SET', KEYS[9], engine, 'EX', ARGV[10])
end
if redis.call('HLEN', ledger) - 3 >= tonumber(request[2]) then
  redis.call('XDEL', KEYS[2], request[1])
  redis.call('EXPIRE', ledger, ARGV[9])
end
redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[11], '*', 'r', ARGV[8], 's', sample, 'e', engine,
  'l', ARGV[12], 'c', ARGV[17])
return 1

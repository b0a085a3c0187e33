#!lua
-- Record once that a rollout has ended: in the ledger, the results of its request, the outbox, the totals and the
-- timeline. The last rollout of a request also ends the request.
-- KEYS: as named below (one hash slot).
-- ARGV: a msgpack map with the following fields.
--   client, request_id, rollout_id, sample, engine: what identifies the rollout
--   order: id of the engine's order; empty if there is none
--   ledger_entry, result, timeline_entry: the encoded rollout, for each of its readers
--   history_entry: the rollout for the history; empty if it is not stored there
--   context: last tokens of the prompt for the history; may be empty
--   trace: trace of the request; empty if it follows from the request id
--   measurement: for the canary test; may be empty
--   tokens, decoding_steps, draft_tokens, accepted_tokens: what the totals count
--   keep_s: seconds to keep the result; 0 to keep it until the client releases it
--   streamed: whether the rollout is streamed
--   ledger_s, trajectory_s: seconds to remember an answered request, and the engine of a trajectory;
--     trajectory_s is 0 if there is no trajectory
--   max_events, max_timeline: largest number of entries of the streams of events and of the timeline
-- Returns 1 if the rollout is recorded, 0 if it was recorded before or is streamed by another engine now, -1 if its
-- request is unknown.
local ledger, requests, results, updates, unreleased, written, outbox, partials, attempts, events, inbox, trajectory,
  totals, tokens, timeline = unpack(KEYS)
local rollout = cmsgpack.unpack(ARGV[1])
-- Return the fields of an entry, and of the other pairs those with a value that is not empty.
local function with_fields(fields, ...)
  for _, field in ipairs({...}) do
    if field[2] ~= '' then
      fields[#fields + 1], fields[#fields + 2] = field[1], field[2]
    end
  end
  return unpack(fields)
end
local has_order = rollout.order == '' or redis.call('XDEL', inbox, rollout.order) == 1
local request = redis.call('HMGET', ledger, 'entry', 'n', 'released')
local entry, n, released = request[1], tonumber(request[2]), request[3]
if not entry then
  return -1
end
if rollout.streamed and not has_order then
  return 0
end
if redis.call('HSETNX', ledger, rollout.sample, rollout.ledger_entry) == 0 then
  return 0
end
if not released then
  redis.call('HSET', results, rollout.sample, rollout.result)
  if rollout.keep_s > 0 then
    redis.call('EXPIRE', results, rollout.keep_s)
  else
    redis.call('SADD', unreleased, rollout.request_id)
  end
  local size = #rollout.result
  redis.call('XADD', updates, 'MAXLEN', '~', rollout.max_events, '*', 'r', rollout.request_id, 's', rollout.sample,
    'b', size, 'w', redis.call('HINCRBY', written, rollout.client, size))
end
if rollout.history_entry ~= '' then
  redis.call('XADD', outbox, '*',
    with_fields({'d', rollout.history_entry}, {'c', rollout.context}, {'t', rollout.trace}))
end
for _, name in ipairs({'tokens', 'decoding_steps', 'draft_tokens', 'accepted_tokens'}) do
  redis.call('HINCRBY', totals, name, rollout[name])
end
redis.call('HINCRBY', totals, 'rollouts', 1)
redis.call('XADD', timeline, 'MAXLEN', '~', rollout.max_timeline, '*',
  with_fields({'d', rollout.timeline_entry, 'a', entry}, {'t', rollout.trace}))
redis.call('HDEL', partials, rollout.rollout_id)
redis.call('HDEL', attempts, rollout.rollout_id)
if rollout.streamed then
  redis.call('UNLINK', tokens)
end
if rollout.trajectory_s > 0 then
  redis.call('SET', trajectory, rollout.engine, 'EX', rollout.trajectory_s)
end
if redis.call('HLEN', ledger) - (released and 4 or 3) >= n then
  redis.call('XDEL', requests, entry)
  redis.call('EXPIRE', ledger, rollout.ledger_s)
end
redis.call('XADD', events, 'MAXLEN', '~', rollout.max_events, '*', 'r', rollout.request_id, 's', rollout.sample,
  'e', rollout.engine, 'l', rollout.tokens, 'c', rollout.measurement)
return 1

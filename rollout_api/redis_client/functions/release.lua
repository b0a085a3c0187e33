#!lua flags=allow-oom
-- Delete the results of requests that a trainer does not need any more, and drop the later ones. This also runs on a
-- full server, because it frees memory.
-- KEYS: job, unreleased requests of the client; then, for each request, its ledger and its results (one hash slot).
-- ARGV: seconds to remember that the results were released if the job has not admitted the request; ids
--   of the requests.
-- Returns 1; 0 if the job does not exist any more.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
for i = 3, #KEYS, 2 do
  local ledger, results = KEYS[i], KEYS[i + 1]
  local is_known = redis.call('EXISTS', ledger) == 1
  redis.call('UNLINK', results)
  redis.call('HSET', ledger, 'released', '1', 'cancelled', '1')
  if not is_known then
    redis.call('EXPIRE', ledger, ARGV[1])
  end
  redis.call('SREM', KEYS[2], ARGV[(i + 1) / 2])
end
return 1

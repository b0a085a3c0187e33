#!lua flags=no-writes
-- Mean length of one problem's rollouts, in tokens.
-- KEYS: lengths, whose values are "generation length finish_reason".
-- Returns it as a string; "0" if there are none.
local sum, count = 0, 0
for _, entry in ipairs(redis.call('HVALS', KEYS[1])) do
  sum, count = sum + tonumber(string.match(entry, '^%S+ (%d+)')), count + 1
end
return tostring(count > 0 and sum / count or 0)

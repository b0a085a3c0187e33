#!lua
-- Set rewards of a problem's rollouts; those that are not there are passed over.
-- KEYS: lengths.
-- ARGV: key of a rollout (8 bytes), its reward (float32), and so on.
-- Returns how many were set.
local entries = redis.call('HGETALL', KEYS[1])
local set = 0
for i = 1, #entries, 2 do
  local known, changed = entries[i + 1], false
  for j = 1, #ARGV, 2 do
    local at = string.find(known, ARGV[j], 1, true)
    while at and (at - 1) % 16 ~= 0 do
      at = string.find(known, ARGV[j], at + 1, true)
    end
    if at then
      known = string.sub(known, 1, at + 11) .. ARGV[j + 1] .. string.sub(known, at + 16)
      changed, set = true, set + 1
    end
  end
  if changed then
    redis.call('HSET', KEYS[1], entries[i], known)
  end
end
return set

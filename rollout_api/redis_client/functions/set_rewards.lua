#!lua
-- Set rewards of a problem's rollouts; rollouts that are not there are ignored.
-- KEYS: lengths.
-- ARGV: key of a rollout (8 bytes), its reward (float32), and so on, alternating.
-- Returns the number of rewards that were set.
local generations = redis.call('HGETALL', KEYS[1])
local count = 0
for i = 1, #generations, 2 do
  local entries, changed = generations[i + 1], false
  for j = 1, #ARGV, 2 do
    local at = string.find(entries, ARGV[j], 1, true)
    while at and (at - 1) % 16 ~= 0 do
      at = string.find(entries, ARGV[j], at + 1, true)
    end
    if at then
      entries = string.sub(entries, 1, at + 11) .. ARGV[j + 1] .. string.sub(entries, at + 16)
      changed, count = true, count + 1
    end
  end
  if changed then
    redis.call('HSET', KEYS[1], generations[i], entries)
  end
end
return count

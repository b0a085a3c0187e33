#!lua
-- Store an image, if the job has room for it. If it has not, images that were not needed for some time make room.
-- KEYS: the image, stored images, their bytes (one hash slot).
-- ARGV: SHA-256 of the image, the image, prefix of the keys of images, seconds to keep the image, seconds after which an
--   image that nobody has needed makes room, maximum bytes of all images, bytes that an image takes in addition to its
--   own, how many of the stored images are looked at.
-- Returns 1; 0 if there is no room.
-- A member of the stored images is the hash and the size of an image. Its score is a time at which it was needed; that
-- it was needed later shows in the expiry of its key alone.
local hash, image, prefix = ARGV[1], ARGV[2], ARGV[3]
local retention, idle, limit = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = tonumber(redis.call('TIME')[1])
local size = #image + tonumber(ARGV[7])
local member = hash .. ':' .. size
if not redis.call('ZSCORE', KEYS[2], member) then
  local total = tonumber(redis.call('GET', KEYS[3]) or 0)
  local oldest = {}
  if total + size > limit then
    oldest = redis.call('ZRANGE', KEYS[2], '-inf', now - idle, 'BYSCORE', 'LIMIT', 0, tonumber(ARGV[8]))
  end
  for _, other in ipairs(oldest) do
    local other_hash, other_size = string.match(other, '^(%x+):(%d+)$')
    local key = prefix .. other_hash
    local needed = now - retention + redis.call('TTL', key)  -- long ago if the key has expired
    if needed > now - idle then
      redis.call('ZADD', KEYS[2], needed, other)
    else
      redis.call('UNLINK', key)
      redis.call('ZREM', KEYS[2], other)
      total = redis.call('DECRBY', KEYS[3], other_size)
      if total + size <= limit then
        break
      end
    end
  end
  if total + size > limit then
    return 0
  end
  redis.call('INCRBY', KEYS[3], size)
end
redis.call('ZADD', KEYS[2], now, member)
redis.call('SET', KEYS[1], image, 'EX', retention)
return 1

// Rollouts of all problems, for those that have few of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "background.hpp"
#include "memory.hpp"
#include "occurrence.hpp"
#include "published.hpp"
#include "segments.hpp"

namespace das {

// The last rollouts that were added, at most so many tokens of them; the oldest leave first. Segments are kept in the
// order of time, and neighbours are merged in the background; none grows beyond a quarter of the pool, which is what
// leaves at once. Longer rollouts do not enter. Of a problem whose whole history is added at once, no more than a
// sixteenth of the pool does: many problems are of more use than much of one, and what would leave again at once need
// not be sorted first.
class ForeignPool {
 public:
  // `most_tokens` 0: there is no pool.
  ForeignPool(const std::shared_ptr<ByteCounter>& total, std::size_t depth, std::size_t most_tokens,
              Background& background);

  // Documents are known by their numbers; those that are there are ignored.
  void add(std::span<const Document> documents);
  // Those of an origin that are of earlier generations (none: of any), or have these numbers.
  void forget(std::uint32_t origin, std::optional<std::int64_t> before, std::span<const std::uint64_t> numbers);
  void clear();

  // None if it is empty.
  std::shared_ptr<const Segments> segments() const { return segments_.load(); }
  bool exists() const { return most_tokens_ > 0; }
  std::size_t tokens() const;

 private:
  // As many as one call may bring, its last ones; one of them at least.
  std::span<const Document> last_of(std::span<const Document> documents) const;
  SegmentList list() const;
  void publish(SegmentList list);  // writer_ is held, as for the next two
  void remove_oldest(SegmentList& list);
  // From where on the list's segments, together, are one that should be.
  std::size_t mergeable(const SegmentList& list) const;
  void merge();

  const std::shared_ptr<ByteCounter> counter_;
  const std::size_t depth_;
  const std::size_t most_tokens_;
  Background& background_;
  std::mutex writer_;  // for what follows
  std::pmr::unordered_set<std::uint64_t> members_;
  bool merging_ = false;                  // the background will, or does
  std::vector<std::uint64_t> forgotten_;  // while it does
  Published<Segments> segments_;
};

}  // namespace das

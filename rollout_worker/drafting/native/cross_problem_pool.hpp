// The cross-problem pool: recent rollouts of all problems, for requests whose own problem has little history.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "memory.hpp"
#include "problem.hpp"
#include "threads.hpp"

namespace das {

// The pool's hashes of a problem, and of one of its rollouts. They remain the same when a problem is evicted and added
// again.
std::uint32_t problem_hash(std::string_view problem);
std::uint64_t pool_document_id(std::string_view problem, std::string_view rollout);

// Holds the rollouts that were added last, up to a number of tokens, and removes the oldest ones first. Segments are
// kept in chronological order, and neighbors are merged in the background. No segment grows beyond a quarter of the
// pool, because a segment is removed as a whole. Rollouts longer than that are not added.
//
// One call of add() contributes at most a sixteenth of the pool, since rollouts of many problems are more useful than
// many rollouts of one problem, and rollouts that would be removed at once need not be sorted first.
class CrossProblemPool {
 public:
  // The pool is disabled if `max_tokens` is 0.
  CrossProblemPool(const std::shared_ptr<ByteCounter>& total, std::size_t depth, std::size_t max_tokens,
                   BackgroundThread& background);

  // Adds documents; those whose id is in the pool are ignored.
  void add(std::span<const Document> documents);
  // Removes documents of a problem: those of generations before `before` (nullopt: of any generation), and those with
  // one of `ids`.
  void remove(std::uint32_t problem_hash, std::optional<std::int64_t> before, std::span<const std::uint64_t> ids);
  void clear();

  // Returns null if the pool is empty.
  std::shared_ptr<const Segments> segments() const { return segments_.load(); }
  bool is_enabled() const { return max_tokens_ > 0; }
  std::size_t tokens() const;

 private:
  // Returns the last documents that one call may add, at least one.
  std::span<const Document> last_of(std::span<const Document> documents) const;
  SegmentList list() const;
  void publish(SegmentList list);  // writer_ is held, also for the next two
  void remove_oldest(SegmentList& list);
  // Returns where the last segments of the list begin that should be merged into one; the list's size if there are
  // none.
  std::size_t first_to_merge(const SegmentList& list) const;
  void merge();

  const std::shared_ptr<ByteCounter> counter_;
  const std::size_t depth_;
  const std::size_t max_tokens_;
  BackgroundThread& background_;
  std::mutex writer_;  // guards the next three, and replacing segments_
  std::pmr::unordered_set<std::uint64_t> document_ids_;
  bool merging_ = false;                          // whether merge() is queued or running
  std::vector<std::uint64_t> removed_meanwhile_;  // document ids removed since merge() started
  AtomicSharedPtr<Segments> segments_;
};

}  // namespace das

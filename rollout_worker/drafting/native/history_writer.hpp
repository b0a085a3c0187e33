// Changes to the histories of problems, and eviction, which keeps the index within its byte limit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cross_problem_pool.hpp"
#include "memory.hpp"
#include "problem.hpp"
#include "threads.hpp"

namespace das {

// Evicts the histories of the least recently used problems, and finally the cross-problem pool, in the background. They
// may use what open requests leave of the limit, but at least half of it. Otherwise, requests that exceed the limit by
// themselves would cause every history to be evicted, although that would not bring the index below the limit.
class Evictor {
 public:
  // There is no limit if `max_bytes` is 0.
  Evictor(const IndexBytes& bytes, std::size_t max_bytes, ProblemRegistry& problems, CrossProblemPool& pool,
          BackgroundThread& background)
      : bytes_(bytes), max_bytes_(max_bytes), problems_(problems), pool_(pool), background_(background) {}

  bool is_over_limit() const {
    if (max_bytes_ == 0) return false;
    const std::size_t all = bytes_.all->bytes();
    const std::size_t in_use = std::min(bytes_.in_use->bytes(), all);
    return all - in_use > max_bytes_ - std::min(in_use, max_bytes_ / 2);
  }

  // Has the background thread evict while is_over_limit().
  void schedule();

  // Returns the problems whose history was evicted since the last call, in this order.
  std::vector<std::string> take_evicted();

 private:
  void evict();

  const IndexBytes bytes_;
  const std::size_t max_bytes_;
  ProblemRegistry& problems_;
  CrossProblemPool& pool_;
  BackgroundThread& background_;
  std::atomic<bool> is_scheduled_{false};
  std::mutex mutex_;  // guards the next
  std::vector<std::string> evicted_;
};

struct Rollout {
  std::string_view id;
  std::int64_t generation;
  std::span<const Token> context;  // the text before the response, in later turns of a trajectory
  std::span<const Token> tokens;
  float reward;
};

// Adds and removes rollouts, in the problems' histories and in the cross-problem pool. Writers of the same problem wait
// for each other. They build new segments aside and then replace the list, so that drafting never waits for them;
// segments are merged in the background.
class HistoryWriter {
 public:
  HistoryWriter(std::size_t depth, ProblemRegistry& problems, CrossProblemPool& pool, BackgroundThread& background)
      : depth_(depth), problems_(problems), pool_(pool), background_(background) {}

  // Returns how many rollouts were new.
  std::size_t add(std::string_view problem, std::span<const Rollout> rollouts);
  // Returns how many of the rollouts exist.
  std::size_t set_rewards(std::string_view problem, std::span<const std::pair<std::string_view, float>> rewards);
  bool drop_rollout(std::string_view problem, std::string_view rollout_id);
  std::size_t drop_before(std::string_view problem, std::int64_t generation);
  bool drop_problem(std::string_view problem);

 private:
  // The next three require the problem's writer lock.
  // Replaces a problem's segments, and schedules merging if it is needed.
  void replace_history(std::string_view id, Problem& problem, std::shared_ptr<const Segments> segments) noexcept;
  void merge_history(Problem& problem) const;
  void drop(std::string_view id, Problem& problem, std::span<const RolloutMap::iterator> rollouts);

  const std::size_t depth_;
  ProblemRegistry& problems_;
  CrossProblemPool& pool_;
  BackgroundThread& background_;
  std::atomic<std::uint64_t> next_document_id_{0};
};

}  // namespace das

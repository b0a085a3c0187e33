// Eviction: keeps the histories and the pool within the byte limit of the index.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "background_thread.hpp"
#include "cross_problem_pool.hpp"
#include "memory.hpp"
#include "problem_registry.hpp"

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

}  // namespace das

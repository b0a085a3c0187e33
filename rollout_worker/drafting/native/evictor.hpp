// Eviction: keeps the index below its byte limit.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "background_thread.hpp"
#include "cross_problem_pool.hpp"
#include "memory.hpp"
#include "problem_registry.hpp"

namespace das {

// Evicts the histories of the least recently used problems, and finally the cross-problem pool, in the background.
class Evictor {
 public:
  // There is no limit if `max_bytes` is 0.
  Evictor(const std::shared_ptr<ByteCounter>& bytes, std::size_t max_bytes, ProblemRegistry& problems,
          CrossProblemPool& pool, BackgroundThread& background)
      : bytes_(bytes), max_bytes_(max_bytes), problems_(problems), pool_(pool), background_(background) {}

  bool is_over_limit() const { return max_bytes_ > 0 && bytes_->bytes() > max_bytes_; }

  // Has the background thread evict until the index is within the limit.
  void schedule();

  // Returns the problems whose history was evicted since the last call, in this order.
  std::vector<std::string> take_evicted();

 private:
  void evict();

  const std::shared_ptr<ByteCounter> bytes_;
  const std::size_t max_bytes_;
  ProblemRegistry& problems_;
  CrossProblemPool& pool_;
  BackgroundThread& background_;
  std::atomic<bool> is_scheduled_{false};
  std::mutex mutex_;  // guards the next
  std::vector<std::string> evicted_;
};

}  // namespace das

#include "evictor.hpp"

#include <memory>
#include <thread>
#include <utility>

namespace das {

void Evictor::schedule() {
  if (is_scheduled_.exchange(true)) return;
  const bool is_queued = background_.submit([this] {
    is_scheduled_.store(false);
    evict();
  });
  if (!is_queued) is_scheduled_.store(false);
}

void Evictor::evict() {
  while (is_over_limit()) {
    const ProblemPin problem = problems_.least_recently_used();
    if (!problem) return pool_.clear();
    const std::lock_guard writing(problem->writer);
    if (!is_over_limit()) return;
    const std::weak_ptr<const Segments> evicted = problem->history.load();
    problem->clear();
    // The bytes are released only when drafts that still read the segments have ended, which takes microseconds.
    while (!evicted.expired()) std::this_thread::yield();
    const std::lock_guard lock(mutex_);
    evicted_.emplace_back(problem.id());
  }
}

std::vector<std::string> Evictor::take_evicted() {
  const std::lock_guard lock(mutex_);
  return std::exchange(evicted_, {});
}

}  // namespace das

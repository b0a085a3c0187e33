// The registry of all problems, ordered by their last use.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "problem.hpp"

namespace das {

class ProblemRegistry;

// Keeps a problem in the registry. A problem without rollouts is removed together with its last pin.
class ProblemPin {
 public:
  ProblemPin() = default;
  ProblemPin(ProblemRegistry& registry, ProblemMap::iterator entry) : registry_(&registry), entry_(entry) {}
  ProblemPin(ProblemPin&& other) noexcept : registry_(std::exchange(other.registry_, nullptr)), entry_(other.entry_) {}
  ProblemPin& operator=(ProblemPin&&) = delete;
  ~ProblemPin();
  explicit operator bool() const { return registry_ != nullptr; }
  std::string_view id() const { return entry_->first; }
  Problem& operator*() const { return *entry_->second; }
  Problem* operator->() const { return entry_->second.get(); }

 private:
  ProblemRegistry* registry_ = nullptr;
  ProblemMap::iterator entry_;
};

class ProblemRegistry {
 public:
  explicit ProblemRegistry(const IndexBytes& bytes) : bytes_(bytes), problems_(bytes.all.get()) {}

  // Returns an empty pin if there is no such problem.
  ProblemPin find(std::string_view problem);
  // Creates the problem if it does not exist, and marks it as the most recently used one.
  ProblemPin use(std::string_view problem);
  // Returns the least recently used problem with rollouts, preferring those without pins; an empty pin if there is
  // none.
  ProblemPin least_recently_used();

  // Returns the ids of all problems that have rollouts, sorted.
  std::vector<std::string> ids();

  // The newest generation of all rollouts that were ever added; ages are counted from it.
  std::int64_t newest_generation() const { return newest_generation_.load(std::memory_order_relaxed); }
  void raise_newest_generation(std::int64_t generation);

 private:
  friend class ProblemPin;

  const IndexBytes bytes_;
  std::mutex mutex_;  // guards the next two; it is held for look-ups only
  ProblemMap problems_;
  std::list<ProblemMap::iterator> by_use_;  // least recently used first
  std::atomic<std::int64_t> newest_generation_{std::numeric_limits<std::int64_t>::min()};
};

}  // namespace das

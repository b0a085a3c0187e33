#include "problem_registry.hpp"

namespace das {

ProblemPin::~ProblemPin() {
  if (registry_ == nullptr) return;
  const std::lock_guard lock(registry_->mutex_);
  Problem& problem = *entry_->second;
  if (--problem.pins > 0 || !problem.is_empty.load()) return;
  registry_->by_use_.erase(problem.lru_position);
  registry_->problems_.erase(entry_);
}

ProblemPin ProblemRegistry::find(std::string_view problem) {
  const std::lock_guard lock(mutex_);
  const auto entry = problems_.find(problem);
  if (entry == problems_.end()) return {};
  ++entry->second->pins;
  return {*this, entry};
}

ProblemPin ProblemRegistry::use(std::string_view problem) {
  const std::lock_guard lock(mutex_);
  auto entry = problems_.find(problem);
  if (entry == problems_.end()) {
    entry = problems_.emplace(problem, std::make_unique<Problem>(bytes_)).first;
    try {
      entry->second->lru_position = by_use_.insert(by_use_.end(), entry);
    } catch (...) {
      problems_.erase(entry);
      throw;
    }
  } else {
    by_use_.splice(by_use_.end(), by_use_, entry->second->lru_position);
  }
  ++entry->second->pins;
  return {*this, entry};
}

ProblemPin ProblemRegistry::least_recently_used() {
  const std::lock_guard lock(mutex_);
  for (const bool allow_pinned : {false, true}) {
    for (const ProblemMap::iterator entry : by_use_) {
      Problem& problem = *entry->second;
      if (problem.is_empty.load() || (problem.pins > 0 && !allow_pinned)) continue;
      ++problem.pins;
      return {*this, entry};
    }
  }
  return {};
}

std::vector<std::string> ProblemRegistry::ids() {
  std::vector<std::string> ids;
  const std::lock_guard lock(mutex_);
  for (const auto& [id, problem] : problems_) {
    if (!problem->is_empty.load()) ids.emplace_back(id);
  }
  return ids;
}

void ProblemRegistry::raise_newest_generation(std::int64_t generation) {
  for (std::int64_t known = newest_generation_.load();
       known < generation && !newest_generation_.compare_exchange_weak(known, generation);) {
  }
}

}  // namespace das

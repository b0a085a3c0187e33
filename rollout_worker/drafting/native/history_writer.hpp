// Changes to the histories of problems.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "background_thread.hpp"
#include "cross_problem_pool.hpp"
#include "problem_registry.hpp"
#include "segments.hpp"

namespace das {

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

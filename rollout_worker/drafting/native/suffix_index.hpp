// The suffix index over all problems, and the open requests that draft from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "batch_stepper.hpp"
#include "cross_problem_pool.hpp"
#include "history_writer.hpp"
#include "memory.hpp"
#include "problem.hpp"
#include "request.hpp"
#include "request_drafter.hpp"
#include "threads.hpp"

namespace das {

struct IndexLimits {
  std::size_t max_bytes;    // of the whole index; 0: no limit
  std::size_t pool_tokens;  // of the cross-problem pool; 0: no pool
};

// Combines the parts of the index. Every method may be called from any thread; drafting never waits for changes to the
// history.
class SuffixIndex {
 public:
  using Handle = RequestTable::Handle;

  // `threads` threads draft for batches; the caller's thread is one of them. With `draft_ahead`, as many threads work
  // between steps, and there should be a processor for each of them besides the caller's.
  SuffixIndex(std::size_t depth, std::size_t threads, IndexLimits limits, bool draft_ahead);

  // Waits for eviction if the index exceeds its limit afterwards.
  std::size_t add(std::string_view problem, std::span<const Rollout> rollouts);
  std::size_t set_rewards(std::string_view problem, std::span<const std::pair<std::string_view, float>> rewards) {
    return writer_.set_rewards(problem, rewards);
  }
  bool drop_rollout(std::string_view problem, std::string_view rollout_id) {
    return writer_.drop_rollout(problem, rollout_id);
  }
  std::size_t drop_before(std::string_view problem, std::int64_t generation) {
    return writer_.drop_before(problem, generation);
  }
  bool drop_problem(std::string_view problem) { return writer_.drop_problem(problem); }
  std::vector<std::string> take_evicted() { return evictor_.take_evicted(); }
  // Waits until nothing is left to index, merge, evict or prepare.
  void wait_idle() {
    stepper_.wait_idle();
    background_.wait_idle();
  }

  std::vector<std::string> problems() { return problems_.ids(); }
  std::vector<std::string> rollouts(std::string_view problem);  // in the order of their addition
  std::size_t tokens(std::string_view problem);
  std::size_t pool_tokens() const { return pool_.tokens(); }
  std::size_t bytes() const { return bytes_.all->bytes(); }
  std::size_t bytes(std::string_view problem);

  // With `draft_ahead`, a long prompt is indexed in the background.
  Handle open(std::string_view problem, const RequestOptions& options);
  void extend(std::span<const Handle> handles, std::span<const std::span<const Token>> tokens);
  ClosedRequest close(Handle handle);
  std::shared_ptr<const RequestList> find_requests(std::span<const Handle> handles) {
    return stepper_.find_requests(handles);
  }
  std::shared_ptr<Request> request(Handle handle) const { return requests_.find(handle); }
  std::int64_t num_tokens(Handle handle);  // of prompt and response
  std::vector<TokenSources::Code> count_step(Handle handle, std::size_t verified, std::size_t accepted) {
    return drafter_.count_step(*requests_.find(handle), verified, accepted);
  }
  StepTotals step(const Step& step);
  void keep_only(const EngineArrays& arrays, const BatchPlan& plan, std::span<const std::int64_t> rows,
                 std::span<const std::int64_t> places, std::optional<std::size_t> kept) {
    stepper_.keep_only(arrays, plan, rows, places, kept);
  }
  LookUpCounts look_ups() const { return stepper_.counts(); }
  std::vector<Draft> draft(std::span<const Handle> handles, std::span<const std::size_t> budgets,
                           std::span<const double> min_survivals);
  std::vector<OccurrenceText> occurrences(Handle handle, std::size_t length);
  bool has_ended(Handle handle) { return drafter_.has_ended(*requests_.find(handle)); }
  TextPosition text_position(Handle handle) { return drafter_.text_position(*requests_.find(handle)); }

  // The state of the mixture; see Mixture.
  std::vector<ParameterState> state() const { return drafter_.mixture().state(); }
  bool load_state(std::span<const ParameterState> states) { return drafter_.mixture().load_state(states); }

  SourceCounts counts(Source source) const { return drafter_.counts(source); }
  const VerificationCounts& verification_counts() const { return drafter_.verification_counts(); }

 private:
  const std::size_t depth_;
  const bool draft_ahead_;
  const IndexBytes bytes_;
  CrossProblemPool pool_;
  ProblemRegistry problems_;
  HistoryWriter writer_;
  Evictor evictor_;
  RequestDrafter drafter_;
  RequestTable requests_;  // declared after problems_, because requests hold pins
  WorkerPool workers_;
  BatchStepper stepper_;
  BackgroundThread background_;  // declared last and destroyed first, because its tasks use the other members
};

}  // namespace das

#include "suffix_index.hpp"

#include <mutex>

namespace das {

SuffixIndex::SuffixIndex(std::size_t depth, std::size_t threads, IndexLimits limits, bool draft_ahead)
    : depth_(depth),
      draft_ahead_(draft_ahead),
      pool_(bytes_.all, depth, limits.pool_tokens, background_),
      problems_(bytes_),
      writer_(depth, problems_, pool_, background_),
      evictor_(bytes_, limits.max_bytes, problems_, pool_, background_),
      drafter_(depth, problems_, pool_),
      workers_(threads),
      stepper_(drafter_, requests_, workers_, draft_ahead) {}

std::size_t SuffixIndex::add(std::string_view problem, std::span<const Rollout> rollouts) {
  const std::size_t added = writer_.add(problem, rollouts);
  if (added > 0 && evictor_.is_over_limit()) {
    evictor_.schedule();
    wait_idle();
  }
  return added;
}

std::vector<std::string> SuffixIndex::rollouts(std::string_view problem_id) {
  const ProblemPin problem = problems_.find(problem_id);
  if (!problem) return {};
  const std::lock_guard lock(problem->writer);
  return problem->rollout_ids();
}

std::size_t SuffixIndex::tokens(std::string_view problem_id) {
  const ProblemPin problem = problems_.find(problem_id);
  return problem ? problem->history.load()->tokens() : 0;
}

std::size_t SuffixIndex::bytes(std::string_view problem_id) {
  const ProblemPin problem = problems_.find(problem_id);
  return problem ? problem->charge.counter()->bytes() : 0;
}

SuffixIndex::Handle SuffixIndex::open(std::string_view problem, const RequestOptions& options) {
  BackgroundThread* const background = draft_ahead_ ? &background_ : nullptr;
  return requests_.insert(std::make_shared<Request>(bytes_, problems_.use(problem), depth_, options, background));
}

ClosedRequest SuffixIndex::close(Handle handle) { return drafter_.close(*requests_.remove(handle)); }

void SuffixIndex::extend(std::span<const Handle> handles, std::span<const std::span<const Token>> tokens) {
  const auto requests = requests_.find(handles);
  for (std::size_t i = 0; i < requests.size(); ++i) drafter_.extend(*requests[i], tokens[i]);
  if (evictor_.is_over_limit()) evictor_.schedule();
}

StepTotals SuffixIndex::step(const Step& step) {
  const StepTotals totals = stepper_.step(step);
  if (evictor_.is_over_limit()) evictor_.schedule();
  return totals;
}

std::int64_t SuffixIndex::num_tokens(Handle handle) {
  const std::shared_ptr<Request> request = requests_.find(handle);
  const std::lock_guard lock(request->mutex);
  return request->num_tokens() + request->num_left_out();
}

std::vector<Draft> SuffixIndex::draft(std::span<const Handle> handles, std::span<const std::size_t> budgets,
                                      std::span<const double> min_survivals) {
  const auto requests = requests_.find(handles);
  std::vector<Draft> drafts(requests.size());
  workers_.run(requests.size(),
               [&](std::size_t i) { drafts[i] = drafter_.draft(*requests[i], budgets[i], min_survivals[i]); });
  return drafts;
}

std::vector<OccurrenceText> SuffixIndex::occurrences(Handle handle, std::size_t length) {
  return drafter_.occurrences(*requests_.find(handle), length);
}

}  // namespace das

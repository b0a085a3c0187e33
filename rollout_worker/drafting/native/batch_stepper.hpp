// One step of a batch: what was sampled goes in, the drafts for the next step come out.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "batch.hpp"
#include "draft_ahead.hpp"
#include "request_drafter.hpp"
#include "request_table.hpp"
#include "worker_pool.hpp"

namespace das {

// Numbers of drafts that were found among the prepared ones, that were computed during a step, and for which the step
// had no time.
struct LookUpCounts {
  std::uint64_t found = 0;
  std::uint64_t computed = 0;
  std::uint64_t omitted = 0;
};

// Only one thread at a time makes a step; others wait. Without drafting ahead, the result does not depend on timing.
class BatchStepper {
 public:
  BatchStepper(RequestDrafter& drafter, const RequestTable& requests, WorkerPool& workers, bool draft_ahead)
      : drafter_(drafter), table_(requests), workers_(workers) {
    if (draft_ahead) ahead_.emplace(drafter);
  }

  // Returns the requests of a plan, in which RequestTable::kNone stands for no request. Throws UnknownRequest for
  // another handle that is not open.
  std::shared_ptr<const RequestList> find_requests(std::span<const RequestTable::Handle> handles);

  // Requests without new tokens, and those that were closed, get no drafts. The shapes of the arguments must agree.
  // Throws std::invalid_argument if the engine's arrays are invalid; requests before the invalid one have been stepped.
  StepTotals step(const Step& step);

  LookUpCounts counts();
  // Waits until all likely drafts are prepared.
  void wait_idle();

 private:
  // The next two have the processor fetch what the look-up for a request reads. They do nothing without one.
  static void prefetch_request(const Request* request);
  static void prefetch_drafts(Request* request);
  // The next four require the lock of the request, which is number i of the step.
  // Notes the sampled tokens. Returns false if there are none.
  bool report(Request& request, const Step& step, std::size_t i);
  // Makes the prepared draft for what was sampled the last draft. Returns false if there is none.
  static bool look_up(Request& request);
  // Drafts for a request and writes the result.
  void draft(Request& request, const Step& step, std::size_t i, bool is_found);
  void write(Request& request, const Step& step, std::size_t i, std::size_t limit);
  static void write_nothing(const Step& step, std::size_t i);
  // Returns the sums over all drafts, after they were shortened if the plan wants that.
  StepTotals total(const Step& step);
  // Shortens all drafts to the tokens that are worth most, so many that they gain most together.
  void shorten(const Step& step, StepTotals& totals);
  // Returns the longest draft that the request may have now.
  static std::size_t max_length(const Request& request);
  void step_ahead(const Step& step);
  // Computes the drafts of missed_, as far as there is time, and leaves the others to the background thread.
  void compute_missing(const Step& step, std::chrono::steady_clock::time_point deadline);

  RequestDrafter& drafter_;
  const RequestTable& table_;
  WorkerPool& workers_;
  std::mutex mutex_;  // guards the next five
  struct Missed {
    std::size_t number;  // of the request in the step
    bool is_prepared;    // whether drafts were prepared for it, but for other outcomes
    double token_gain;
  };
  std::vector<Missed> missed_;     // requests without a draft yet
  std::vector<std::size_t> busy_;  // those whose lock the background thread held
  std::vector<double> survivals_;  // of the draft tokens of each request, in as many places as the longest draft has
  LookUpCounts counts_;
  SharedWork missing_;  // computing the drafts of missed_
  std::optional<DraftAhead> ahead_;
};

}  // namespace das

// One step of a batch: what was sampled goes in, the drafts for the next step come out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "draft_ahead.hpp"
#include "request.hpp"
#include "request_drafter.hpp"
#include "threads.hpp"

namespace das {

// Arrays with one row for each place in the engine's batch. They are written by the engine, except for the drafts.
struct EngineArrays {
  std::span<const std::int32_t> token_ids;  // prompts and responses, `max_tokens` for each place
  std::size_t max_tokens;
  std::span<std::int64_t> drafts;  // `max_draft` for each place
  std::size_t max_draft;
  std::span<std::int32_t> lengths;  // of the drafts
};

// The policy's decisions about the next drafts. A request is known by its row in the plan.
struct BatchPlan {
  struct Row {
    std::size_t budget;
    double min_survival;
    double token_gain;  // seconds that an accepted token is worth
  };
  std::shared_ptr<const RequestList> requests;  // null in rows that are not in use
  std::vector<Row> rows;
  std::shared_ptr<const ValueOrder> order = std::make_shared<const ValueOrder>();  // set by sort()
  // Seconds that it takes to verify a number of draft tokens, which is the index; the last one also stands for more.
  std::vector<double> costs{0.0};
  bool shortens = false;  // whether drafts are shortened so that all of them together gain most
  // If there are any, all requests of a step verify the same number of tokens: the smallest of these, in ascending
  // order, that is not below the length of any draft. No draft is longer than the last one.
  std::vector<std::size_t> uniform_lengths;
  std::chrono::nanoseconds time_limit{};  // after which a step begins no draft
  // If the drafts of a step gain no more seconds than this together, BatchStepper::keep_only() must follow.
  double min_gain = -std::numeric_limits<double>::infinity();

  void sort();  // call it after a change of `rows`
};

// The arguments of one step. The last two arrays are written.
struct Step {
  const EngineArrays& arrays;
  const BatchPlan& plan;
  std::span<const std::int32_t> num_tokens;  // of prompt and response, for each place
  // The others have an element for each request of the step.
  std::span<const std::int64_t> rows;  // in the plan; -1 for a request that is not followed
  std::span<const std::int64_t> places;
  std::span<const std::int64_t> verified;  // number of tokens of the last draft that were verified
  std::span<std::int64_t> generated;       // number of tokens that are new since the last step
  std::span<double> expected;              // number of draft tokens expected to be accepted

  std::size_t size() const { return rows.size(); }
  // Returns null for a request that is not followed.
  Request* request(std::size_t i) const {
    return i < rows.size() && rows[i] >= 0 ? (*plan.requests)[static_cast<std::size_t>(rows[i])].get() : nullptr;
  }
  const BatchPlan::Row& limits(std::size_t i) const { return plan.rows[static_cast<std::size_t>(rows[i])]; }
  std::size_t place(std::size_t i) const { return static_cast<std::size_t>(places[i]); }
};

// Sums over the drafts of a step.
struct StepTotals {
  std::size_t drafts = 0;  // those that are not empty
  std::size_t tokens = 0;
  double gain = 0.0;  // seconds that they are expected to save, minus the cost of verifying them
};

// Numbers of drafts that were found among the prepared ones, that were computed during a step, and that the step had
// no time for or whose requests it has left out.
struct LookUpCounts {
  std::uint64_t found = 0;
  std::uint64_t computed = 0;
  std::uint64_t omitted = 0;
};

// Only one thread at a time makes a step; others that want to make one wait. Without drafting ahead, the result does
// not depend on timing.
class BatchStepper {
 public:
  BatchStepper(RequestDrafter& drafter, const RequestTable& requests, WorkerPool& workers, bool draft_ahead)
      : drafter_(drafter), table_(requests), workers_(workers) {
    if (draft_ahead) ahead_.emplace(drafter, workers.size());
  }

  // Returns the requests of a plan. RequestTable::kNone in the plan stands for no request. Throws UnknownRequest for
  // another handle that is not open.
  std::shared_ptr<const RequestList> find_requests(std::span<const RequestTable::Handle> handles);

  // Requests without new tokens, and those that were closed, get no drafts. The shapes of the arguments must agree.
  // Throws std::invalid_argument if the engine's arrays are invalid; requests before the invalid one have been stepped.
  StepTotals step(const Step& step);
  // Drops the drafts of the last step, except for that of request number `kept`, so that they are not verified. The
  // arguments must be those of the step.
  void keep_only(const EngineArrays& arrays, const BatchPlan& plan, std::span<const std::int64_t> rows,
                 std::span<const std::int64_t> places, std::optional<std::size_t> kept);

  LookUpCounts counts() const;
  // Waits until all likely drafts are prepared.
  void wait_idle();

 private:
  // The next two have the processor fetch what the look-up for a request reads. They do nothing without one.
  static void prefetch_request(const Request* request);
  static void prefetch_drafts(Request* request);
  // The next three require the lock of the request, which is number i of the step.
  // Notes the sampled tokens. Returns false if there are none. An urgent call never waits.
  bool report(Request& request, const Step& step, std::size_t i, bool is_urgent);
  // Makes the prepared draft for what was sampled the last draft. Returns false if there is none.
  static bool look_up(Request& request);
  void write(Request& request, const Step& step, std::size_t i);
  static void write_nothing(const Step& step, std::size_t i);
  // Leaves a request out whose lock another thread holds.
  static void leave_out(Request& request, const Step& step, std::size_t i);
  // Returns the sums over all drafts, after they were shortened if the plan wants that.
  StepTotals total(const Step& step);
  // Shortens all drafts to the tokens that are worth most, so many that they gain most together.
  void shorten(const Step& step, StepTotals& totals);
  // Counts the tokens that all requests verify as the cost, and shortens the drafts to the length that gains most.
  void make_uniform(const Step& step, StepTotals& totals);
  // Shortens a draft, and adds it to the sums, without its cost.
  void shorten_to(const Step& step, std::size_t i, std::size_t length, StepTotals& totals);
  void step_alone(const Step& step);
  // Never waits longer than some microseconds for another thread, as the system may have suspended that thread.
  void step_ahead(const Step& step);
  // Computes the drafts of missed_, as far as there is time, and leaves the others to the background threads.
  void compute_missing(const Step& step, TimePoint deadline);

  RequestDrafter& drafter_;
  const RequestTable& table_;
  WorkerPool& workers_;
  std::mutex mutex_;  // guards the next three
  struct Missed {
    std::size_t number;  // of the request in the step
    bool is_prepared;    // whether drafts were prepared for it, but for other outcomes
    double token_gain;
  };
  std::vector<Missed> missed_;     // requests without a draft yet
  std::vector<std::size_t> busy_;  // those whose lock another thread held
  std::vector<double> survivals_;  // of the draft tokens of each request, in as many places as the longest draft has
  // See LookUpCounts. Only steps write them.
  std::atomic<std::uint64_t> found_{0};
  std::atomic<std::uint64_t> computed_{0};
  std::atomic<std::uint64_t> omitted_{0};
  std::optional<DraftAhead> ahead_;
};

}  // namespace das

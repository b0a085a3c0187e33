// One step of a batch: what was sampled goes in, the drafts for the next step come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "draft_ahead.hpp"
#include "request_drafter.hpp"
#include "request_table.hpp"
#include "worker_pool.hpp"

namespace das {

// The arguments of one step, all of which describe the same requests. The last three are written.
struct Step {
  std::span<const RequestTable::Handle> handles;
  std::span<const std::int64_t> sampled;  // `max_sampled` tokens of each request, of which the first are valid
  std::size_t max_sampled;
  std::span<const std::int32_t> num_sampled;
  std::span<const std::int32_t> verified;  // number of verified tokens of each last draft; empty: all
  std::span<const std::int32_t> budgets;
  std::span<const float> min_survivals;
  std::span<std::int64_t> tokens;  // `max_draft` of each request, like the next
  std::span<float> survivals;
  std::size_t max_draft;
  std::span<std::int32_t> lengths;
};

// Numbers of drafts that were found among the prepared ones, and that were computed during a step.
struct LookUpCounts {
  std::uint64_t found = 0;
  std::uint64_t computed = 0;
};

// Only one thread at a time makes a step; others wait. Without drafting ahead, the result does not depend on timing.
class BatchStepper {
 public:
  BatchStepper(RequestDrafter& drafter, const RequestTable& requests, WorkerPool& workers, bool draft_ahead)
      : drafter_(drafter), table_(requests), workers_(workers) {
    if (draft_ahead) ahead_.emplace(drafter);
  }

  // Throws UnknownRequest for a handle that is not open, and std::invalid_argument for one that occurs twice; nothing
  // is changed then. The values of the arguments must be valid.
  void step(const Step& step);

  LookUpCounts counts();
  // Waits until all likely drafts are prepared.
  void wait_idle();

 private:
  void find_requests(const Step& step);
  // The next two have the processor fetch what look-ups for some rows read.
  void prefetch_objects(std::size_t first, std::size_t count) const;
  void prefetch_drafts(std::size_t first, std::size_t count) const;
  // The next four require the lock of the request, which is that of row i.
  // Notes the sampled tokens.
  void report(Request& request, const Step& step, std::size_t i);
  // Makes the prepared draft for what was sampled the last draft. Returns false if there is none.
  static bool look_up(Request& request);
  // Drafts for a request and writes the result.
  void draft(Request& request, const Step& step, std::size_t i, bool is_found);
  static void write(Request& request, const Step& step, std::size_t i, std::size_t limit);
  void step_ahead(const Step& step);

  RequestDrafter& drafter_;
  const RequestTable& table_;
  WorkerPool& workers_;
  std::mutex mutex_;  // guards the next seven
  std::uint64_t number_ = 0;
  std::vector<std::shared_ptr<Request>> requests_;
  std::vector<std::size_t> missed_;  // rows without a prepared draft
  std::vector<std::size_t> busy_;    // rows whose lock the background thread held
  LookUpCounts counts_;
  SharedWork missing_;  // computing the drafts of missed_
  std::optional<DraftAhead> ahead_;
};

}  // namespace das

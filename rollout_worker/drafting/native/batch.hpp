// The running batch of an engine: the arrays that it shares with the index, and the plan for its requests.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "request.hpp"

namespace das {

// Arrays with one row for each place in the engine's batch. They are written by the engine, except for the drafts.
struct EngineArrays {
  std::span<const std::int32_t> token_ids;  // prompts and responses, `max_tokens` for each place
  std::size_t max_tokens;
  std::span<std::int64_t> drafts;  // `max_draft` for each place
  std::size_t max_draft;
  std::span<std::int32_t> lengths;  // of the drafts
};

// What the policy has decided for the next drafts. A request is known by its row in the plan.
struct BatchPlan {
  struct Row {
    std::size_t budget;
    double min_survival;
    double token_gain;  // seconds that an accepted token is worth
  };
  std::shared_ptr<const RequestList> requests;  // null in rows that are not in use
  std::vector<Row> rows;
  // Seconds that it takes to verify a number of draft tokens, which is the index; the last one also stands for more.
  std::vector<double> costs{0.0};
  bool shortens = false;                  // whether drafts are shortened so that all of them together gain most
  std::chrono::nanoseconds time_limit{};  // after which a step begins no draft
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

}  // namespace das

#include "draft_ahead.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <utility>

namespace das {

namespace {

// A thread watches this long for the next step before it sleeps. Forward passes rarely take longer.
constexpr std::chrono::milliseconds kWatch{20};

// Outcomes less likely than this are not prepared for.
constexpr double kMinProbability = 1.0 / 1024.0;

// Outcomes that no occurrence of a draft proposes are taken from this many occurrences in the history, and from more if
// there is time, where a continuation after an accepted part of the draft is at least this likely.
constexpr std::size_t kWideSearches[] = {256, 2048};
constexpr double kMinReached = 1.0 / 16.0;

// Returns what the tokens of a request are worth, relative to those that are worth most.
double relative_value(const Request& request, double max_gain) {
  return max_gain > 0.0 ? std::max(0.0, request.token_gain) / max_gain : 1.0;
}

}  // namespace

std::optional<std::size_t> MissingDrafts::take() {
  if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
  const std::size_t number = next_.fetch_add(1, std::memory_order_relaxed);
  return number < rows_.size() ? std::optional(number) : std::nullopt;
}

void MissingDrafts::compute(std::size_t number) {
  Request& request = *(*requests_)[rows_[number]];
  {
    const std::lock_guard lock(request.mutex);
    drafter_.compute_missing(request, true);
  }
  is_computed_[number].store(true, std::memory_order_release);
}

DraftAhead::DraftAhead(RequestDrafter& drafter, std::size_t threads) : drafter_(drafter) {
  for (std::size_t i = 0; i < threads; ++i) helpers_.push_back(std::make_unique<Helper>());
  for (const auto& helper : helpers_) helper->thread = std::thread([this, &helper = *helper] { serve(helper); });
}

DraftAhead::~DraftAhead() {
  is_stopping_.store(true);
  interrupt();
  round_.fetch_add(1);
  round_.notify_all();
  for (const auto& helper : helpers_) helper->thread.join();
}

void DraftAhead::start(std::shared_ptr<const RequestList> requests, std::shared_ptr<const ValueOrder> order) {
  const std::uint32_t id = round_.load(std::memory_order_relaxed) + 1;
  const auto round = std::make_shared<Round>(std::move(requests), std::move(order), id);
  current_ = round;
  for (const auto& helper : helpers_) helper->rounds.put(round);
  round_.store(id, std::memory_order_release);
  round_.notify_all();
}

void DraftAhead::interrupt() {
  if (const std::shared_ptr<Round> round = current_.lock()) round->interrupt();
}

void DraftAhead::share(const std::shared_ptr<MissingDrafts>& missing) {
  for (const auto& helper : helpers_) helper->missing.put(missing);
}

void DraftAhead::withdraw() {
  for (const auto& helper : helpers_) helper->missing.clear();
}

void DraftAhead::wait_idle() {
  const std::uint32_t id = round_.load();
  for (const auto& helper : helpers_) {
    while (helper->last_done.load() != id && round_.load() == id) std::this_thread::yield();
  }
}

void DraftAhead::help(Helper& helper) {
  const std::shared_ptr<MissingDrafts> missing = helper.missing.take();
  if (!missing) return;
  while (const auto number = missing->take()) missing->compute(*number);
}

void DraftAhead::serve(Helper& helper) {
  std::uint32_t last = 0;
  while (true) {
    // Waking a thread takes longer than a step, so that the thread watches for a while.
    spin_until(
        [&] {
          if (!helper.missing.is_empty()) help(helper);
          return round_.load(std::memory_order_acquire) != last;
        },
        kWatch);
    round_.wait(last, std::memory_order_acquire);
    if (is_stopping_.load()) return;
    last = round_.load(std::memory_order_acquire);
    std::shared_ptr<Round> round = helper.rounds.take();
    if (!round) continue;
    try {
      work(*round, helper);
    } catch (const std::exception&) {
      // Out of memory. What was not prepared is computed in the next step.
    }
    const std::uint32_t id = round->id;
    round.reset();  // which may free closed requests
    helper.last_done.store(id);
  }
}

void DraftAhead::work(Round& round, Helper& helper) {
  helper.requests.clear();
  for (auto& tasks : helper.tasks) tasks.clear();
  while (!round.is_over()) {
    const std::size_t next = round.next.fetch_add(1, std::memory_order_relaxed);
    if (next >= round.order->rows.size()) break;
    const auto number = static_cast<std::uint32_t>(next);
    if (round.request(number) == nullptr) continue;
    Request& request = *round.request(number);
    const std::lock_guard lock(request.mutex);
    if (round.is_over()) break;
    // Without new tokens, the request was not in the step, and its prepared drafts remain valid.
    if (request.is_closed || request.pending.empty()) continue;
    drafter_.settle(request, false);
    drafter_.compute_missing(request, false);
    if (request.max_length() == 0 || !request.last.exists) continue;
    drafter_.complete(request);
    request.prepared.clear();
    request.is_prepared = true;
    add_tasks(request, number, relative_value(request, round.order->max_gain), helper);
    helper.requests.push_back(number);
  }
  run_tasks(round, helper);
  for (const std::size_t limit : kWideSearches) run_rare_tasks(round, limit, helper);
}

void DraftAhead::run_rare_tasks(const Round& round, std::size_t limit, Helper& helper) const {
  for (auto& tasks : helper.tasks) tasks.clear();
  for (const std::uint32_t number : helper.requests) {
    Request& request = *round.request(number);
    const auto add = [&](std::size_t accepted) {
      const std::lock_guard lock(request.mutex);
      return !round.is_over() &&
             add_rare_tasks(request, number, relative_value(request, round.order->max_gain), accepted, limit, helper);
    };
    for (std::size_t accepted = 0; add(accepted);) ++accepted;
  }
  run_tasks(round, helper);
}

void DraftAhead::run_tasks(const Round& round, Helper& helper) const {
  // Within a tier, tasks are in the order of their requests, so that the data of a request stays in the caches.
  for (const auto& tasks : helper.tasks) {
    for (const Task& task : tasks) {
      if (round.is_over()) return;
      Request& request = *round.request(task.number);
      const std::lock_guard lock(request.mutex);
      if (round.is_over()) return;
      if (!request.is_closed && request.is_prepared) prepare(request, task.outcome);
    }
  }
}

void DraftAhead::add_tasks(const Request& request, std::uint32_t number, double value, Helper& helper) const {
  const DraftRecord& draft = request.drafts[request.last.set];
  const std::size_t length = request.verified_length();
  double reached = 1.0;
  for (std::size_t i = 0; i < draft.positions.size() && i <= length; ++i) {
    const DraftPosition& position = draft.positions[i];
    double remaining = 1.0;
    for (std::size_t k = 0; k < position.num_candidates; ++k) {
      if (position.mixed[k] == 0.0F) continue;
      const double probability = drafter_.probability(position, k);
      remaining -= probability;
      if (i == length || k != position.chosen) {
        add_task(request, number, {i, position.candidates[k]}, reached * probability, value, helper);
      }
    }
    // The others are rare. Half of the remaining probability is assumed to be theirs, in equal parts.
    const double other = std::max(0.0, remaining) / (2.0 * std::max<double>(1.0, position.num_others));
    for (std::size_t k = 0; k < position.num_others; ++k) {
      add_task(request, number, {i, position.others[k]}, reached * other, value, helper);
    }
    reached = draft.tokens[i].survival;
  }
}

void DraftAhead::add_task(const Request& request, std::uint32_t number, Outcome outcome, double probability,
                          double value, Helper& helper) {
  const auto& stops = request.stop_tokens;
  // Nothing follows a stop token.
  const bool is_end = outcome.next == kBoundary || std::find(stops.begin(), stops.end(), outcome.next) != stops.end();
  if (is_end || probability < kMinProbability) return;
  // Each tier is worth half as much as the one before.
  const double worth = std::max(probability * value, std::ldexp(1.0, -static_cast<int>(kTiers)));
  const auto tier = static_cast<std::size_t>(std::max(0, -std::ilogb(worth) - 1));
  helper.tasks[std::min(tier, kTiers - 1)].push_back({number, outcome});
}

bool DraftAhead::add_rare_tasks(const Request& request, std::uint32_t number, double value, std::size_t accepted,
                                std::size_t limit, Helper& helper) const {
  if (request.is_closed || !request.is_prepared || request.prepared.is_full()) return false;
  const auto tokens = request.tokens(request.last);
  if (accepted > request.verified_length() || accepted > tokens.size()) return false;
  const double reached = accepted == 0 ? 1.0 : tokens[accepted - 1].survival;
  if (reached < kMinReached) return false;
  drafter_.find_successors(request, accepted, limit, helper.successors);
  for (const Token token : helper.successors) {
    if (request.prepared.find({accepted, token}) == PreparedDrafts::kNone) {
      add_task(request, number, {accepted, token}, reached * kMinProbability * 16.0, value, helper);
    }
  }
  return true;
}

void DraftAhead::prepare(Request& request, Outcome outcome) const {
  if (request.prepared.is_full()) return;
  const std::size_t limit =
      std::min(request.budget, request.limits.max_length(request.counts.generated + outcome.accepted + 1));
  if (limit > 0) drafter_.prepare(request, outcome, limit + 1, request.min_survival);
}

}  // namespace das

#include "draft_ahead.hpp"

#include <algorithm>
#include <cmath>
#include <exception>

#include "spin.hpp"

namespace das {

namespace {

// How long the thread watches for the end of a step before it sleeps.
constexpr std::chrono::microseconds kWatch{1000};

// Outcomes less likely than this are not prepared for.
constexpr float kMinProbability = 1.0F / 1024.0F;

// The most positions of prepared drafts that one request stores.
constexpr std::size_t kMaxPositions = 256;

// Each tier is this many times less likely than the one before. Within a tier, tasks are sorted by request, so that the
// data of a request stays in the processor's caches.
constexpr int kTierBits = 2;

std::uint32_t tier_of(float probability) {
  return static_cast<std::uint32_t>(std::max(0, -std::ilogb(probability)) / kTierBits);
}

}  // namespace

DraftAhead::~DraftAhead() {
  is_stopping_.store(true);
  interrupt();
  round_.fetch_add(1);
  round_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void DraftAhead::start(std::span<const std::shared_ptr<Request>> requests) {
  {
    const std::lock_guard lock(mutex_);
    next_requests_.assign(requests.begin(), requests.end());
  }
  is_interrupted_.store(false, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  if (thread_.joinable()) {
    round_.notify_one();
  } else {
    thread_ = std::thread([this] { serve(); });
  }
}

void DraftAhead::wait_idle() {
  const std::uint32_t round = round_.load();
  while (done_.load() != round && round_.load() == round) std::this_thread::yield();
}

std::uint32_t DraftAhead::wait_for_round(std::uint32_t last) const {
  // A step takes less time than waking a thread, so that the thread watches for its end for a while.
  spin_until([&] { return round_.load(std::memory_order_acquire) != last; }, kWatch);
  round_.wait(last, std::memory_order_acquire);
  return is_stopping_.load() ? 0 : round_.load(std::memory_order_acquire);
}

void DraftAhead::serve() {
  std::uint32_t round = 0;
  while ((round = wait_for_round(round)) != 0) {
    {
      const std::lock_guard lock(mutex_);
      requests_.swap(next_requests_);
    }
    try {
      work(round);
    } catch (const std::exception&) {
      // Out of memory. What was not prepared is computed in the next step.
    }
    done_.store(round);
  }
}

void DraftAhead::work(std::uint32_t round) {
  tasks_.clear();
  for (std::size_t i = 0; i < requests_.size() && !is_over(round); ++i) {
    const std::shared_ptr<Request> request = requests_[i].lock();
    if (!request) continue;
    const std::lock_guard lock(request->mutex);
    if (request->is_closed) continue;
    drafter_.settle(*request);
    if (request->last.number == DraftSet::kNone || request->budget == 0) continue;
    request->sets[1 - request->last.set].clear();
    request->is_prepared = true;
    add_tasks(*request, static_cast<std::uint32_t>(i));
  }
  std::sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
    return a.tier != b.tier ? a.tier < b.tier : a.request < b.request;
  });
  for (const Task& task : tasks_) {
    if (is_over(round)) return;
    const std::shared_ptr<Request> request = requests_[task.request].lock();
    if (!request) continue;
    const std::lock_guard lock(request->mutex);
    if (!request->is_closed && request->is_prepared) prepare(*request, task.outcome);
  }
}

void DraftAhead::add_tasks(const Request& request, std::uint32_t number) {
  const DraftSet& set = request.sets[request.last.set];
  const auto positions = set.positions(request.last.number);
  const auto survivals = set.survivals(request.last.number);
  double reached = 1.0;
  for (std::size_t i = 0; i < positions.size() && i <= request.last.length; ++i) {
    const DraftPosition& position = positions[i];
    for (std::size_t k = 0; k < position.num_candidates; ++k) {
      const bool is_accepted = i < request.last.length && k == position.chosen;
      if (is_accepted || position.mixed[k] == 0.0F) continue;
      const Token token = position.candidates[k];
      // Nothing follows a stop token.
      if (std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end()) continue;
      const float probability = static_cast<float>(reached) * drafter_.probability(position, k);
      if (probability >= kMinProbability) tasks_.push_back({tier_of(probability), number, {i, token}});
    }
    reached = survivals[i];
  }
}

void DraftAhead::prepare(Request& request, Outcome outcome) const {
  if (request.sets[1 - request.last.set].num_positions() >= kMaxPositions) return;
  const std::size_t limit =
      std::min(request.budget, request.limits.max_length(request.counts.generated + outcome.accepted + 1));
  if (limit > 0) drafter_.prepare(request, outcome, limit + 1, request.min_survival);
}

}  // namespace das

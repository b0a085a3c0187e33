#include "draft_ahead.hpp"

#include <algorithm>
#include <cmath>
#include <exception>

#include "threads.hpp"

namespace das {

namespace {

// The thread watches this long for the next step before it sleeps. Forward passes rarely take longer.
constexpr std::chrono::milliseconds kWatch{20};

// A step waits this number of pauses for the thread to take a part of the shared work, less than a microsecond.
constexpr int kHandOver = 16;

// Outcomes less likely than this are not prepared for.
constexpr double kMinProbability = 1.0 / 1024.0;

// The most positions of prepared drafts that one request stores.
constexpr std::size_t kMaxPositions = 1024;

// Outcomes that no occurrence of a draft proposes are taken from this many occurrences in the history, and from more if
// there is time, where a continuation after an accepted part of the draft is at least this likely.
constexpr std::size_t kWideSearches[] = {256, 2048};
constexpr double kMinReached = 1.0 / 16.0;

// Each tier is this many times less likely than the one before. Within a tier, tasks are sorted by request, so that the
// data of a request stays in the processor's caches.
constexpr int kTierBits = 2;

std::uint32_t tier_of(double probability) {
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

void DraftAhead::start(std::shared_ptr<const RequestList> requests) {
  {
    const std::lock_guard lock(mutex_);
    next_requests_.swap(requests);
    is_interrupted_.store(false, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
  }
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

void DraftAhead::share(SharedWork& work) {
  shared_.store(&work);
  // Leave the first part to the thread, if it is awake, as its caches are warm.
  for (int i = 0; i < kHandOver && work.next.load(std::memory_order_relaxed) == 0; ++i) pause_briefly();
  work.take_all();
  shared_.store(nullptr);
  // The thread has seen no other work after this, so that it ends with the draft that it is computing.
  if (!spin_until([this] { return !is_helping_.load(); }, std::chrono::microseconds(100))) {
    while (is_helping_.load()) std::this_thread::yield();
  }
}

void DraftAhead::help() {
  is_helping_.store(true);
  // Read again, because share() may have ended before is_helping_ was set.
  if (SharedWork* const work = shared_.load()) work->take_all();
  is_helping_.store(false);
}

std::uint32_t DraftAhead::wait_for_round(std::uint32_t last) {
  // Waking a thread takes longer than a step, so that the thread watches for a while.
  spin_until(
      [&] {
        if (shared_.load(std::memory_order_relaxed) != nullptr) help();
        return round_.load(std::memory_order_acquire) != last;
      },
      kWatch);
  round_.wait(last, std::memory_order_acquire);
  return is_stopping_.load() ? 0 : round_.load(std::memory_order_acquire);
}

void DraftAhead::serve() {
  std::uint32_t round = 0;
  while ((round = wait_for_round(round)) != 0) {
    std::shared_ptr<const RequestList> requests;
    {
      const std::lock_guard lock(mutex_);
      requests.swap(next_requests_);
      round = round_.load();
    }
    if (is_stopping_.load()) return;
    try {
      if (requests) work(*requests, round);
    } catch (const std::exception&) {
      // Out of memory. What was not prepared is computed in the next step.
    }
    requests.reset();  // which may free closed requests
    done_.store(round);
  }
}

void DraftAhead::work(const RequestList& requests, std::uint32_t round) {
  tasks_.clear();
  for (std::size_t i = 0; i < requests.size() && !is_over(round); ++i) {
    const std::shared_ptr<Request>& request = requests[i];
    if (!request) continue;
    const std::lock_guard lock(request->mutex);
    // Without new tokens, the request was not in the step, and its prepared drafts remain valid.
    if (request->is_closed || request->pending.empty()) continue;
    drafter_.settle(*request);
    const std::size_t limit = std::min(request->budget, request->limits.max_length(request->counts.generated));
    if (limit == 0) continue;
    if (request->last.number == DraftSet::kNone) drafter_.compute(*request, limit + 1, request->min_survival, false);
    request->sets[1 - request->last.set].clear();
    request->is_prepared = true;
    add_tasks(*request, static_cast<std::uint32_t>(i));
  }
  run_tasks(requests, round);
  for (const std::size_t limit : kWideSearches) run_rare_tasks(requests, limit, round);
}

void DraftAhead::run_rare_tasks(const RequestList& requests, std::size_t limit, std::uint32_t round) {
  tasks_.clear();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (!requests[i]) continue;
    const auto add = [&](std::size_t accepted) {
      const std::lock_guard lock(requests[i]->mutex);
      return add_rare_tasks(*requests[i], static_cast<std::uint32_t>(i), accepted, limit);
    };
    for (std::size_t accepted = 0; !is_over(round) && add(accepted);) ++accepted;
  }
  run_tasks(requests, round);
}

void DraftAhead::run_tasks(const RequestList& requests, std::uint32_t round) {
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
    return a.tier != b.tier ? a.tier < b.tier : a.request < b.request;
  });
  for (const Task& task : tasks_) {
    if (is_over(round)) return;
    Request& request = *requests[task.request];
    const std::lock_guard lock(request.mutex);
    if (!request.is_closed && request.is_prepared) prepare(request, task.outcome);
  }
}

void DraftAhead::add_tasks(const Request& request, std::uint32_t number) {
  const DraftSet& set = request.sets[request.last.set];
  const auto positions = set.positions(request.last.number);
  const auto tokens = set.tokens(request.last.number);
  double reached = 1.0;
  for (std::size_t i = 0; i < positions.size() && i <= request.last.length; ++i) {
    const DraftPosition& position = positions[i];
    double remaining = 1.0;
    for (std::size_t k = 0; k < position.num_candidates; ++k) {
      if (position.mixed[k] == 0.0F) continue;
      const double probability = drafter_.probability(position, k);
      remaining -= probability;
      if (i == request.last.length || k != position.chosen) {
        add_task(request, number, {i, position.candidates[k]}, reached * probability);
      }
    }
    // The others are rare. Half of the remaining probability is assumed to be theirs, in equal parts.
    const double other = std::max(0.0, remaining) / (2.0 * std::max<double>(1.0, position.num_others));
    for (std::size_t k = 0; k < position.num_others; ++k) {
      add_task(request, number, {i, position.others[k]}, reached * other);
    }
    reached = tokens[i].survival;
  }
}

void DraftAhead::add_task(const Request& request, std::uint32_t number, Outcome outcome, double probability) {
  const auto& stops = request.stop_tokens;
  // Nothing follows a stop token.
  const bool is_end = outcome.next == kBoundary || std::find(stops.begin(), stops.end(), outcome.next) != stops.end();
  if (!is_end && probability >= kMinProbability) tasks_.push_back({tier_of(probability), number, outcome});
}

bool DraftAhead::add_rare_tasks(const Request& request, std::uint32_t number, std::size_t accepted, std::size_t limit) {
  if (request.is_closed || !request.is_prepared) return false;
  const DraftSet& prepared = request.sets[1 - request.last.set];
  const auto tokens = request.sets[request.last.set].tokens(request.last.number);
  if (accepted > request.last.length || accepted > tokens.size()) return false;
  const double reached = accepted == 0 ? 1.0 : tokens[accepted - 1].survival;
  if (reached < kMinReached) return false;
  drafter_.find_successors(request, accepted, limit, successors_);
  for (const Token token : successors_) {
    if (prepared.find({accepted, token}) == DraftSet::kNone)
      add_task(request, number, {accepted, token}, reached * kMinProbability * 16.0);
  }
  return true;
}

void DraftAhead::prepare(Request& request, Outcome outcome) const {
  if (request.sets[1 - request.last.set].num_positions() >= kMaxPositions) return;
  const std::size_t limit =
      std::min(request.budget, request.limits.max_length(request.counts.generated + outcome.accepted + 1));
  if (limit > 0) drafter_.prepare(request, outcome, limit + 1, request.min_survival);
}

}  // namespace das

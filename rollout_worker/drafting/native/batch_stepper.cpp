#include "batch_stepper.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace das {

namespace {

// The data of requests was written by the background thread, so that it is in the cache of another processor. It is
// fetched while this many rows before are handled, and the objects that point to it as many rows earlier.
constexpr std::size_t kPrefetched = 6;

}  // namespace

void BatchStepper::step(const Step& step) {
  const std::lock_guard stepping(mutex_);
  if (ahead_) ahead_->interrupt();
  find_requests(step);
  const std::size_t count = requests_.size();
  if (ahead_) {
    step_ahead(step);
  } else {
    // All requests are extended first, since siblings draft from each other.
    for (std::size_t i = 0; i < count; ++i) {
      const std::lock_guard lock(requests_[i]->mutex);
      report(*requests_[i], step, i);
      drafter_.settle(*requests_[i]);
    }
    workers_.run(count, [&](std::size_t i) {
      const std::lock_guard lock(requests_[i]->mutex);
      draft(*requests_[i], step, i, false);
    });
    counts_.computed += count;
  }
  requests_.clear();
}

// Most drafts are found at once. The others are computed after those, by all threads.
void BatchStepper::step_ahead(const Step& step) {
  missed_.clear();
  const auto try_row = [&](std::size_t i) {
    Request& request = *requests_[i];
    report(request, step, i);
    if (!look_up(request)) {
      request.is_prepared = false;
      return false;
    }
    draft(request, step, i, true);
    return true;
  };
  busy_.clear();
  prefetch_objects(0, 2 * kPrefetched);
  prefetch_drafts(0, kPrefetched);
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    prefetch_objects(i + 2 * kPrefetched, 1);
    prefetch_drafts(i + kPrefetched, 1);
    const std::unique_lock lock(requests_[i]->mutex, std::try_to_lock);
    if (!lock) {
      busy_.push_back(i);
    } else if (!try_row(i)) {
      missed_.push_back(i);
    }
  }
  // The background thread was computing a draft for this request. It needs some microseconds.
  for (const std::size_t i : busy_) {
    const std::lock_guard lock(requests_[i]->mutex);
    if (!try_row(i)) missed_.push_back(i);
  }
  counts_.found += requests_.size() - missed_.size();
  counts_.computed += missed_.size();
  missing_.count = missed_.size();
  missing_.next.store(0);
  missing_.run = [&](std::size_t m) {
    const std::size_t i = missed_[m];
    const std::lock_guard lock(requests_[i]->mutex);
    try {
      draft(*requests_[i], step, i, false);
    } catch (const std::bad_alloc&) {
      write(*requests_[i], step, i, 0);
    }
  };
  if (missed_.empty()) return ahead_->start(requests_);
  workers_.run(workers_.size(), [&](std::size_t thread) {
    if (thread == 0) {
      ahead_->share(missing_);
    } else {
      missing_.take_all();
    }
  });
  ahead_->start(requests_);
}

void BatchStepper::prefetch_objects(std::size_t first, std::size_t count) const {
  constexpr std::size_t kCacheLine = 64;
  constexpr std::size_t kUsedBytes = 512;  // of a request, in look-ups
  for (std::size_t i = first; i < std::min(first + count, requests_.size()); ++i) {
    const auto* const request = reinterpret_cast<const char*>(requests_[i].get());
    for (std::size_t line = 0; line < kUsedBytes; line += kCacheLine) {
      __builtin_prefetch(request + line, 1);
    }
  }
}

void BatchStepper::prefetch_drafts(std::size_t first, std::size_t count) const {
  for (std::size_t i = first; i < std::min(first + count, requests_.size()); ++i) {
    Request& request = *requests_[i];
    const std::unique_lock lock(request.mutex, std::try_to_lock);
    if (!lock || !request.is_prepared) continue;
    request.sets[request.last.set].prefetch_tokens(request.last.number);
    request.sets[1 - request.last.set].prefetch_keys();
  }
}

void BatchStepper::find_requests(const Step& step) {
  table_.find(step.handles, requests_);
  ++number_;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i]->step == number_) {
      requests_.clear();
      throw std::invalid_argument("the handle " + std::to_string(step.handles[i]) + " occurs twice");
    }
    requests_[i]->step = number_;
  }
}

void BatchStepper::report(Request& request, const Step& step, std::size_t i) {
  request.budget = static_cast<std::size_t>(step.budgets[i]);
  request.min_survival = step.min_survivals[i];
  const auto count = static_cast<std::size_t>(step.num_sampled[i]);
  if (count == 0 || request.is_closed) return;
  drafter_.settle(request);
  const auto length = std::int32_t(request.last.length);
  const auto verified = static_cast<std::uint64_t>(step.verified.empty() ? length : std::min(step.verified[i], length));
  request.counts.drafted += verified;
  request.counts.accepted += std::min<std::uint64_t>(verified, count - 1);
  request.counts.generated += count;
  const auto sampled = step.sampled.subspan(i * step.max_sampled, count);
  request.pending.assign(sampled.begin(), sampled.end());
  request.pending_draft = request.last;
  request.is_own_pending = true;
}

bool BatchStepper::look_up(Request& request) {
  if (!request.is_prepared || request.pending.empty()) return false;
  const std::size_t accepted = request.pending.size() - 1;
  const auto tokens = request.sets[request.last.set].tokens(request.last.number);
  if (accepted > tokens.size()) return false;
  for (std::size_t i = 0; i < accepted; ++i) {
    if (tokens[i].token != request.pending[i]) return false;
  }
  const auto other = static_cast<std::uint8_t>(1 - request.last.set);
  const std::uint32_t number = request.sets[other].find({accepted, request.pending.back()});
  if (number == DraftSet::kNone) return false;
  request.last = {.set = other, .number = number};
  request.is_prepared = false;
  return true;
}

void BatchStepper::draft(Request& request, const Step& step, std::size_t i, bool is_found) {
  const std::size_t limit =
      std::min({request.budget, step.max_draft, request.limits.max_length(request.counts.generated)});
  if (limit == 0 || request.is_closed) {
    if (!is_found) request.last = {.set = request.last.set};
    request.is_prepared = false;
  } else if (!is_found) {
    if (step.num_sampled[i] == 0) drafter_.settle(request);
    drafter_.append_pending(request);
    drafter_.compute(request, limit + 1, request.min_survival, ahead_.has_value());
  }
  write(request, step, i, limit);
}

void BatchStepper::write(Request& request, const Step& step, std::size_t i, std::size_t limit) {
  const auto tokens = step.tokens.subspan(i * step.max_draft, step.max_draft);
  const auto survivals = step.survivals.subspan(i * step.max_draft, step.max_draft);
  std::size_t length = 0;
  if (limit > 0 && request.last.number != DraftSet::kNone) {
    const DraftSet& set = request.sets[request.last.set];
    const auto drafted = set.tokens(request.last.number);
    for (; length < std::min(limit, drafted.size()) && drafted[length].survival >= request.min_survival; ++length) {
      tokens[length] = drafted[length].token;
      survivals[length] = static_cast<float>(drafted[length].survival);
    }
    request.last.length = static_cast<std::uint32_t>(length);
  }
  std::fill(tokens.begin() + static_cast<std::ptrdiff_t>(length), tokens.end(), -1);
  std::fill(survivals.begin() + static_cast<std::ptrdiff_t>(length), survivals.end(), 0.0F);
  step.lengths[i] = static_cast<std::int32_t>(length);
}

LookUpCounts BatchStepper::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void BatchStepper::wait_idle() {
  if (ahead_) ahead_->wait_idle();
}

}  // namespace das

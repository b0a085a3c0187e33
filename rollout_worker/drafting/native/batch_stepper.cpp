#include "batch_stepper.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace das {

namespace {

// The data of requests was written by the background thread, so that it is in the cache of another processor. It is
// fetched while this many rows before are handled, and the objects that point to it as many rows earlier.
constexpr std::size_t kPrefetched = 6;

// The fewest drafts that are worth waking another thread.
constexpr std::size_t kDraftsPerThread = 8;

// Classes of values between 2 ** kMinExponent seconds and 1 second, 2 ** kClassBits for each power of two.
constexpr int kMinExponent = -31;
constexpr int kClassBits = 5;
constexpr std::size_t kValueClasses = (std::size_t{1} << kClassBits) * -kMinExponent + 2;

// Returns the class of a value in seconds; higher values have higher classes. It consists of the first bits of the
// value's binary representation: the exponent, and kClassBits of the 52 bits of the mantissa.
std::size_t class_of(double value) {
  if (!(value >= std::ldexp(1.0, kMinExponent))) return 1;
  constexpr int kShift = 52 - kClassBits;
  const auto bits = std::bit_cast<std::uint64_t>(value) >> kShift;
  const auto first = std::bit_cast<std::uint64_t>(std::ldexp(1.0, kMinExponent)) >> kShift;
  return std::min<std::size_t>(bits - first + 1, kValueClasses - 1);
}

double cost(const BatchPlan& plan, std::size_t tokens) { return plan.costs[std::min(tokens, plan.costs.size() - 1)]; }

// Returns the number of processors besides that of the background thread.
std::size_t spare_processors() {
  static const std::size_t processors = std::thread::hardware_concurrency();
  return processors - std::min<std::size_t>(processors, 1);
}

}  // namespace

std::shared_ptr<const RequestList> BatchStepper::find_requests(std::span<const RequestTable::Handle> handles) {
  auto requests = std::make_shared<RequestList>();
  requests->reserve(handles.size());
  for (const RequestTable::Handle handle : handles) {
    requests->push_back(handle == RequestTable::kNone ? nullptr : table_.find(handle));
  }
  return requests;
}

StepTotals BatchStepper::step(const Step& step) {
  const std::lock_guard stepping(mutex_);
  survivals_.resize(std::max(survivals_.size(), step.size() * step.arrays.max_draft));
  if (ahead_) ahead_->interrupt();
  if (ahead_) {
    step_ahead(step);
  } else {
    // All requests are extended first, since siblings draft from each other.
    missed_.clear();
    for (std::size_t i = 0; i < step.size(); ++i) {
      write_nothing(step, i);
      Request* const request = step.request(i);
      if (request == nullptr) continue;
      const std::lock_guard lock(request->mutex);
      if (!report(*request, step, i)) continue;
      drafter_.settle(*request);
      missed_.push_back({i, false, 0.0});
    }
    workers_.run(missed_.size(), [&](std::size_t m) {
      const std::size_t i = missed_[m].number;
      const std::lock_guard lock(step.request(i)->mutex);
      draft(*step.request(i), step, i, false);
    });
    counts_.computed += missed_.size();
  }
  const StepTotals totals = total(step);
  if (ahead_) ahead_->start(step.plan.requests);
  return totals;
}

StepTotals BatchStepper::total(const Step& step) {
  StepTotals totals;
  for (std::size_t i = 0; i < step.size(); ++i) {
    const auto length = static_cast<std::size_t>(step.arrays.lengths[step.place(i)]);
    if (length == 0) continue;
    totals.drafts += 1;
    totals.tokens += length;
    totals.gain += step.expected[i] * step.limits(i).token_gain;
  }
  totals.gain -= cost(step.plan, totals.tokens);
  if (step.plan.shortens && totals.tokens > 0) shorten(step, totals);
  return totals;
}

void BatchStepper::shorten(const Step& step, StepTotals& totals) {
  std::array<std::size_t, kValueClasses> counts{};
  std::array<double, kValueClasses> sums{};
  const std::size_t width = step.arrays.max_draft;
  const auto value = [&](std::size_t i, std::size_t k) {
    return survivals_[i * width + k] * step.limits(i).token_gain;
  };
  for (std::size_t i = 0; i < step.size(); ++i) {
    const auto length = static_cast<std::size_t>(step.arrays.lengths[step.place(i)]);
    for (std::size_t k = 0; k < length; ++k) {
      const std::size_t value_class = class_of(value(i, k));
      counts[value_class] += 1;
      sums[value_class] += value(i, k);
    }
  }
  // The tokens of the highest classes are taken, and so many of the next class that all of them gain most. Tokens of
  // one class count as equally valuable.
  std::size_t best = 0, best_count = 0, tokens = 0;
  double best_gain = std::max(totals.gain, 0.0), saved = 0.0;
  for (std::size_t value_class = kValueClasses; value_class-- > 1;) {
    const double mean = sums[value_class] / static_cast<double>(std::max<std::size_t>(counts[value_class], 1));
    for (std::size_t count = 1; count <= counts[value_class]; ++count) {
      saved += mean;
      const double gain = saved - cost(step.plan, ++tokens);
      if (gain <= best_gain) continue;
      best = value_class;
      best_count = count;
      best_gain = gain;
    }
  }
  if (best == 0) return;
  totals = {};
  for (std::size_t i = 0; i < step.size(); ++i) {
    auto& written = step.arrays.lengths[step.place(i)];
    if (written == 0) continue;
    // Survival decreases along a draft, and so does the value of its tokens.
    std::size_t length = 0;
    step.expected[i] = 0.0;
    for (; length < static_cast<std::size_t>(written); ++length) {
      const std::size_t value_class = class_of(value(i, length));
      if (value_class < best || (value_class == best && best_count == 0)) break;
      if (value_class == best) --best_count;
      step.expected[i] += survivals_[i * width + length];
    }
    if (length < static_cast<std::size_t>(written)) {
      Request& request = *step.request(i);
      const std::lock_guard lock(request.mutex);
      request.last.length = static_cast<std::uint32_t>(length);
      written = static_cast<std::int32_t>(length);
    }
    totals.drafts += length > 0;
    totals.tokens += length;
    totals.gain += step.expected[i] * step.limits(i).token_gain;
  }
  totals.gain -= cost(step.plan, totals.tokens);
}

// Most drafts are found at once. The others are computed after those, by all threads.
void BatchStepper::step_ahead(const Step& step) {
  const auto deadline = std::chrono::steady_clock::now() + step.plan.time_limit;
  missed_.clear();
  std::size_t found = 0;
  const auto try_request = [&](Request& request, std::size_t i) {
    if (!report(request, step, i)) return;
    if (look_up(request)) {
      ++found;
      draft(request, step, i, true);
      return;
    }
    const bool was_prepared = std::exchange(request.is_prepared, false);
    request.last = {.set = request.last.set};
    if (max_length(request) > 0) missed_.push_back({i, was_prepared, step.limits(i).token_gain});
  };
  busy_.clear();
  for (std::size_t i = 0; i < 2 * kPrefetched; ++i) prefetch_request(step.request(i));
  for (std::size_t i = 0; i < kPrefetched; ++i) prefetch_drafts(step.request(i));
  for (std::size_t i = 0; i < step.size(); ++i) {
    prefetch_request(step.request(i + 2 * kPrefetched));
    prefetch_drafts(step.request(i + kPrefetched));
    write_nothing(step, i);
    Request* const request = step.request(i);
    if (request == nullptr) continue;
    const std::unique_lock lock(request->mutex, std::try_to_lock);
    if (lock) {
      try_request(*request, i);
    } else {
      busy_.push_back(i);
    }
  }
  // The background thread was working for this request, mostly on one draft, which takes some microseconds.
  for (const std::size_t i : busy_) {
    Request& request = *step.request(i);
    const std::lock_guard lock(request.mutex);
    try_request(request, i);
  }
  counts_.found += found;
  if (!missed_.empty()) compute_missing(step, deadline);
}

void BatchStepper::compute_missing(const Step& step, std::chrono::steady_clock::time_point deadline) {
  // Requests without a prepared draft come first: the first drafts of new requests are the longest, and a trial would
  // otherwise not be made. Then come those whose tokens are worth most.
  std::stable_sort(missed_.begin(), missed_.end(), [](const Missed& a, const Missed& b) {
    return a.is_prepared != b.is_prepared ? b.is_prepared : a.token_gain > b.token_gain;
  });
  missing_.count = missed_.size();
  missing_.deadline = deadline;
  missing_.next.store(0);
  missing_.run = [&](std::size_t m) {
    const std::size_t i = missed_[m].number;
    const std::lock_guard lock(step.request(i)->mutex);
    try {
      draft(*step.request(i), step, i, false);
    } catch (const std::bad_alloc&) {
      // The request goes without a draft.
    }
  };
  // At least one draft is computed, so that a trial is made however little time there is.
  if (std::chrono::steady_clock::now() >= deadline) {
    missing_.next.store(1);
    missing_.run(0);
  }
  // Few drafts are computed before another thread would be awake, and one without a processor of its own would not
  // help.
  const std::size_t threads = std::min({workers_.size(), spare_processors(), missed_.size() / kDraftsPerThread});
  if (threads < 2) {
    ahead_->share(missing_);
  } else {
    workers_.run(threads, [&](std::size_t thread) {
      if (thread == 0) {
        ahead_->share(missing_);
      } else {
        missing_.take_all();
      }
    });
  }
  counts_.computed += missing_.taken();
  counts_.omitted += missed_.size() - missing_.taken();
}

std::size_t BatchStepper::max_length(const Request& request) {
  return request.is_closed ? 0 : std::min(request.budget, request.limits.max_length(request.counts.generated));
}

void BatchStepper::prefetch_request(const Request* request) {
  constexpr std::size_t kCacheLine = 64;
  constexpr std::size_t kUsedBytes = 512;  // of a request, in look-ups
  if (request == nullptr) return;
  for (std::size_t byte = 0; byte < kUsedBytes; byte += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(request) + byte, 1);
  }
}

void BatchStepper::prefetch_drafts(Request* request) {
  if (request == nullptr) return;
  const std::unique_lock lock(request->mutex, std::try_to_lock);
  if (!lock || !request->is_prepared) return;
  request->sets[request->last.set].prefetch_tokens(request->last.number);
  request->sets[1 - request->last.set].prefetch_keys();
}

bool BatchStepper::report(Request& request, const Step& step, std::size_t i) {
  if (request.is_closed) return false;
  const std::size_t place = step.place(i);
  const std::int64_t known = request.num_tokens();
  const std::int64_t count = step.num_tokens[place] - known;
  if (count <= 0) return false;
  if (static_cast<std::size_t>(known + count) > step.arrays.max_tokens) {
    throw std::invalid_argument("place " + std::to_string(place) + " has " + std::to_string(known + count) +
                                " tokens, but the engine's array holds " + std::to_string(step.arrays.max_tokens));
  }
  const auto sampled = step.arrays.token_ids.subspan(place * step.arrays.max_tokens + static_cast<std::size_t>(known),
                                                     static_cast<std::size_t>(count));
  const auto invalid = std::find_if(sampled.begin(), sampled.end(), [](std::int32_t token) { return token < 0; });
  if (invalid != sampled.end()) {
    throw std::invalid_argument("place " + std::to_string(place) + " has the token id " + std::to_string(*invalid) +
                                "; token ids must not be negative");
  }
  drafter_.settle(request);
  request.budget = std::min(step.limits(i).budget, step.arrays.max_draft);
  request.min_survival = step.limits(i).min_survival;
  const auto verified = static_cast<std::uint64_t>(std::min<std::int64_t>(step.verified[i], request.last.length));
  request.counts.drafted += verified;
  const auto accepted = std::min(verified, static_cast<std::uint64_t>(count - 1));
  request.counts.accepted += accepted;
  request.counts.generated += static_cast<std::uint64_t>(count);
  request.pending.assign(sampled.begin(), sampled.end());
  request.pending_draft = request.last;
  request.pending_verified = static_cast<std::uint32_t>(verified);
  request.pending_accepted = static_cast<std::uint32_t>(accepted);
  request.is_own_pending = true;
  step.generated[i] = count;
  return true;
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
  const std::size_t limit = max_length(request);
  if (limit == 0) {
    if (!is_found) request.last = {.set = request.last.set};
    request.is_prepared = false;
    return;
  }
  if (!is_found) {
    drafter_.append_pending(request);
    drafter_.compute(request, limit + 1, request.min_survival, ahead_.has_value());
  }
  write(request, step, i, limit);
}

void BatchStepper::write(Request& request, const Step& step, std::size_t i, std::size_t limit) {
  if (request.last.number == DraftSet::kNone) return;
  const std::size_t place = step.place(i);
  const auto drafts = step.arrays.drafts.subspan(place * step.arrays.max_draft, step.arrays.max_draft);
  const auto drafted = request.sets[request.last.set].tokens(request.last.number);
  std::size_t length = 0;
  double expected = 0.0;
  for (; length < std::min(limit, drafted.size()) && drafted[length].survival >= request.min_survival; ++length) {
    drafts[length] = drafted[length].token;
    survivals_[i * step.arrays.max_draft + length] = drafted[length].survival;
    expected += drafted[length].survival;
  }
  request.last.length = static_cast<std::uint32_t>(length);
  step.arrays.lengths[place] = static_cast<std::int32_t>(length);
  step.expected[i] = expected;
}

void BatchStepper::write_nothing(const Step& step, std::size_t i) {
  const std::size_t place = step.place(i);
  step.arrays.lengths[place] = 0;
  step.generated[i] = 0;
  step.expected[i] = 0.0;
}

LookUpCounts BatchStepper::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void BatchStepper::wait_idle() {
  if (ahead_) ahead_->wait_idle();
}

}  // namespace das

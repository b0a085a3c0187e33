#include "batch_stepper.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace das {

namespace {

// The data of requests was written by the background thread, so that it is in the cache of another processor. It is
// fetched while this many rows before are handled, and the objects that point to it as many rows earlier.
constexpr std::size_t kPrefetched = 6;

// A step waits this long for another thread, which needs less for one draft unless the system has suspended it.
constexpr std::chrono::microseconds kPatience{50};

// It waits this number of pauses, less than a microsecond, for another thread to take the first of the missing drafts,
// as the caches of that thread are warm.
constexpr int kHandOver = 16;

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

// Locks a request, unless its lock is not free until the deadline.
std::unique_lock<std::mutex> lock_until(Request& request, TimePoint deadline) {
  std::unique_lock lock(request.mutex, std::defer_lock);
  spin_until([&] { return lock.try_lock(); }, deadline);
  return lock;
}

// Forgets the last draft, which the caller has received, so that the next one can be computed.
void forget_last(Request& request) { request.last = {.set = request.last.set}; }

void increase(std::atomic<std::uint64_t>& counter, std::size_t count) {
  counter.fetch_add(count, std::memory_order_relaxed);
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

void BatchPlan::sort() {
  const auto gain = [this](std::uint32_t row) { return rows[row].token_gain > 0.0 ? rows[row].token_gain : 0.0; };
  auto sorted = std::make_shared<ValueOrder>();
  sorted->rows.resize(rows.size());
  std::iota(sorted->rows.begin(), sorted->rows.end(), 0U);
  std::stable_sort(sorted->rows.begin(), sorted->rows.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return gain(a) > gain(b); });
  if (!sorted->rows.empty()) sorted->max_gain = gain(sorted->rows.front());
  order = std::move(sorted);
}

StepTotals BatchStepper::step(const Step& step) {
  const std::lock_guard stepping(mutex_);
  survivals_.resize(std::max(survivals_.size(), step.size() * step.arrays.max_draft));
  if (ahead_) {
    ahead_->interrupt();
    step_ahead(step);
  } else {
    step_alone(step);
  }
  const StepTotals totals = total(step);
  if (ahead_ && (totals.drafts == 0 || totals.gain > step.plan.min_gain)) {
    ahead_->start(step.plan.requests, step.plan.order);
  }
  return totals;
}

void BatchStepper::keep_only(const EngineArrays& arrays, const BatchPlan& plan, std::span<const std::int64_t> rows,
                             std::span<const std::int64_t> places, std::optional<std::size_t> kept) {
  const std::lock_guard stepping(mutex_);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i == kept) continue;
    arrays.lengths[static_cast<std::size_t>(places[i])] = 0;
    Request* const request = rows[i] < 0 ? nullptr : (*plan.requests)[static_cast<std::size_t>(rows[i])].get();
    if (request != nullptr) request->is_dropped.store(true, std::memory_order_relaxed);
  }
  if (ahead_) ahead_->start(plan.requests, plan.order);
}

void BatchStepper::step_alone(const Step& step) {
  // All requests are extended first, since siblings draft from each other.
  missed_.clear();
  for (std::size_t i = 0; i < step.size(); ++i) {
    write_nothing(step, i);
    Request* const request = step.request(i);
    if (request == nullptr) continue;
    const std::lock_guard lock(request->mutex);
    if (!report(*request, step, i, false)) continue;
    drafter_.settle(*request, false);
    forget_last(*request);
    missed_.push_back({i, false, 0.0});
  }
  workers_.run(missed_.size(), [&](std::size_t m) {
    const std::size_t i = missed_[m].number;
    Request& request = *step.request(i);
    const std::lock_guard lock(request.mutex);
    drafter_.compute_missing(request, false);
    write(request, step, i);
  });
  increase(computed_, missed_.size());
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
  if (totals.tokens == 0) return totals;
  if (!step.plan.uniform_lengths.empty()) {
    make_uniform(step, totals);
  } else if (step.plan.shortens) {
    shorten(step, totals);
  }
  return totals;
}

void BatchStepper::make_uniform(const Step& step, StepTotals& totals) {
  const std::size_t width = step.arrays.max_draft;
  std::vector<double> saved(width);  // by the tokens at each position of all drafts
  std::size_t longest = 0;
  for (std::size_t i = 0; i < step.size(); ++i) {
    const auto length = static_cast<std::size_t>(step.arrays.lengths[step.place(i)]);
    longest = std::max(longest, length);
    for (std::size_t k = 0; k < length; ++k) saved[k] += survivals_[i * width + k] * step.limits(i).token_gain;
  }
  longest = std::min(longest, step.plan.uniform_lengths.back());
  std::size_t best = 0, kept = 0, position = 0;
  double best_gain = 0.0, sum = 0.0;
  for (const std::size_t length : step.plan.uniform_lengths) {
    for (; position < std::min(length, longest); ++position) sum += saved[position];
    if (length == 0 || (length < longest && !step.plan.shortens)) continue;
    const double gain = sum - cost(step.plan, step.size() * length);
    if (std::isfinite(gain)) kept = length;
    if (gain > best_gain) {
      best = length;
      best_gain = gain;
    }
    if (length >= longest) break;
  }
  // As in shorten(), nothing is removed if no draft gains anything.
  if (best == 0) best = kept;
  totals = {};
  for (std::size_t i = 0; i < step.size(); ++i) {
    const auto length = static_cast<std::size_t>(step.arrays.lengths[step.place(i)]);
    if (length > 0) shorten_to(step, i, std::min(length, best), totals);
  }
  totals.gain -= cost(step.plan, step.size() * best);
}

void BatchStepper::shorten_to(const Step& step, std::size_t i, std::size_t length, StepTotals& totals) {
  auto& written = step.arrays.lengths[step.place(i)];
  if (length < static_cast<std::size_t>(written)) {
    step.request(i)->length.store(static_cast<std::uint32_t>(length), std::memory_order_relaxed);
    written = static_cast<std::int32_t>(length);
  }
  const auto survivals = std::span(survivals_).subspan(i * step.arrays.max_draft, length);
  step.expected[i] = std::accumulate(survivals.begin(), survivals.end(), 0.0);
  totals.drafts += length > 0;
  totals.tokens += length;
  totals.gain += step.expected[i] * step.limits(i).token_gain;
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
    const auto written = static_cast<std::size_t>(step.arrays.lengths[step.place(i)]);
    if (written == 0) continue;
    // Survival decreases along a draft, and so does the value of its tokens.
    std::size_t length = 0;
    for (; length < written; ++length) {
      const std::size_t value_class = class_of(value(i, length));
      if (value_class < best || (value_class == best && best_count == 0)) break;
      if (value_class == best) --best_count;
    }
    shorten_to(step, i, length, totals);
  }
  totals.gain -= cost(step.plan, totals.tokens);
}

// Most drafts are found at once. The others are computed after those, by all threads.
void BatchStepper::step_ahead(const Step& step) {
  const auto deadline = std::chrono::steady_clock::now() + step.plan.time_limit;
  missed_.clear();
  std::size_t found = 0;
  const auto try_request = [&](Request& request, std::size_t i) {
    if (!report(request, step, i, true)) return;
    if (look_up(request)) {
      ++found;
      write(request, step, i);
      return;
    }
    const bool was_prepared = std::exchange(request.is_prepared, false);
    forget_last(request);
    if (request.max_length() > 0) missed_.push_back({i, was_prepared, request.token_gain});
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
  // A background thread was working for these requests, mostly on one draft, which takes some microseconds.
  const auto last_try = std::chrono::steady_clock::now() + kPatience;
  for (const std::size_t i : busy_) {
    Request& request = *step.request(i);
    if (const auto lock = lock_until(request, last_try)) {
      try_request(request, i);
    } else {
      leave_out(request, step, i);
      increase(omitted_, 1);
    }
  }
  increase(found_, found);
  if (!missed_.empty()) compute_missing(step, deadline);
}

void BatchStepper::leave_out(Request& request, const Step& step, std::size_t i) {
  LeftOutSteps& left_out = request.left_out;
  const std::int32_t num_tokens = step.num_tokens[step.place(i)];
  if (left_out.verified.load(std::memory_order_relaxed) == 0) {
    const auto length = request.length.load(std::memory_order_relaxed);
    const auto verified = static_cast<std::uint32_t>(std::min<std::int64_t>(step.verified[i], length));
    left_out.verified_at.store(num_tokens, std::memory_order_relaxed);
    left_out.verified.store(verified, std::memory_order_relaxed);
  }
  left_out.num_tokens.store(num_tokens, std::memory_order_relaxed);
}

void BatchStepper::compute_missing(const Step& step, TimePoint deadline) {
  // Requests without a prepared draft come first: the first drafts of new requests are the longest, and a trial would
  // otherwise not be made. Then come those whose tokens are worth most.
  std::stable_sort(missed_.begin(), missed_.end(), [](const Missed& a, const Missed& b) {
    return a.is_prepared != b.is_prepared ? b.is_prepared : a.token_gain > b.token_gain;
  });
  std::size_t computed = 0;
  const auto compute = [&](std::size_t m) {
    Request& request = *step.request(missed_[m].number);
    const auto lock = lock_until(request, std::chrono::steady_clock::now() + kPatience);
    if (!lock) return;
    drafter_.compute_missing(request, true);
    write(request, step, missed_[m].number);
    ++computed;
  };
  if (std::chrono::steady_clock::now() >= deadline) {
    compute(0);  // so that a trial is made however little time there is
  } else {
    std::vector<std::uint32_t> rows;
    rows.reserve(missed_.size());
    for (const Missed& missed : missed_) rows.push_back(static_cast<std::uint32_t>(step.rows[missed.number]));
    const auto work = std::make_shared<MissingDrafts>(drafter_, step.plan.requests, std::move(rows), deadline);
    ahead_->share(work);
    for (int i = 0; i < kHandOver && work->taken() == 0; ++i) pause_briefly();
    std::vector<bool> is_own(missed_.size());
    while (const auto m = work->take()) {
      is_own[*m] = true;
      compute(*m);
    }
    ahead_->withdraw();
    // The drafts that other threads have begun. A step leaves out those of threads that are late.
    const auto last_look = std::max(deadline, std::chrono::steady_clock::now() + kPatience);
    for (std::size_t m = 0; m < work->taken(); ++m) {
      if (is_own[m] || !wait_until([&] { return work->is_computed(m); }, last_look)) continue;
      Request& request = *step.request(missed_[m].number);
      const auto lock = lock_until(request, std::chrono::steady_clock::now() + kPatience);
      if (!lock) continue;
      write(request, step, missed_[m].number);
      ++computed;
    }
  }
  increase(computed_, computed);
  increase(omitted_, missed_.size() - computed);
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
  const auto tokens = request->tokens(request->last);
  prefetch(tokens.first(std::min<std::size_t>(tokens.size(), 4)));
  request->prepared.prefetch_keys();
}

bool BatchStepper::report(Request& request, const Step& step, std::size_t i, bool is_urgent) {
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
  drafter_.settle(request, is_urgent);
  request.budget = std::min(step.limits(i).budget, step.arrays.max_draft);
  request.min_survival = step.limits(i).min_survival;
  request.token_gain = step.limits(i).token_gain;
  const auto [verified, accepted] =
      request.take_verification(step.num_tokens[place], static_cast<std::uint64_t>(step.verified[i]));
  request.counts.drafted += verified;
  request.counts.accepted += accepted;
  request.counts.generated += static_cast<std::uint64_t>(count);
  request.pending.assign(sampled.begin(), sampled.end());
  request.pending_draft = request.last;
  request.pending_verified = static_cast<std::uint32_t>(verified);
  request.pending_accepted = static_cast<std::uint32_t>(accepted);
  request.is_own_pending = true;
  request.length.store(0, std::memory_order_relaxed);
  request.is_dropped.store(false, std::memory_order_relaxed);
  step.generated[i] = count;
  return true;
}

bool BatchStepper::look_up(Request& request) {
  if (!request.is_prepared || request.pending.empty()) return false;
  const std::size_t accepted = request.pending.size() - 1;
  const auto tokens = request.tokens(request.last);
  if (accepted > tokens.size()) return false;
  for (std::size_t i = 0; i < accepted; ++i) {
    if (tokens[i].token != request.pending[i]) return false;
  }
  const std::uint32_t number = request.prepared.find({accepted, request.pending.back()});
  if (number == PreparedDrafts::kNone) return false;
  // The tokens are copied later, when there is time.
  request.last = {.set = static_cast<std::uint8_t>(1 - request.last.set), .exists = true, .prepared = number};
  request.is_prepared = false;
  return true;
}

void BatchStepper::write(Request& request, const Step& step, std::size_t i) {
  const std::size_t limit = request.max_length();
  const std::size_t place = step.place(i);
  const auto drafts = step.arrays.drafts.subspan(place * step.arrays.max_draft, step.arrays.max_draft);
  const auto drafted = request.tokens(request.last);
  std::size_t length = 0;
  double expected = 0.0;
  for (; length < std::min(limit, drafted.size()) && drafted[length].survival >= request.min_survival; ++length) {
    drafts[length] = drafted[length].token;
    survivals_[i * step.arrays.max_draft + length] = drafted[length].survival;
    expected += drafted[length].survival;
  }
  request.length.store(static_cast<std::uint32_t>(length), std::memory_order_relaxed);
  step.arrays.lengths[place] = static_cast<std::int32_t>(length);
  step.expected[i] = expected;
}

void BatchStepper::write_nothing(const Step& step, std::size_t i) {
  const std::size_t place = step.place(i);
  step.arrays.lengths[place] = 0;
  step.generated[i] = 0;
  step.expected[i] = 0.0;
}

LookUpCounts BatchStepper::counts() const {
  return {found_.load(std::memory_order_relaxed), computed_.load(std::memory_order_relaxed),
          omitted_.load(std::memory_order_relaxed)};
}

void BatchStepper::wait_idle() {
  if (ahead_) ahead_->wait_idle();
}

}  // namespace das

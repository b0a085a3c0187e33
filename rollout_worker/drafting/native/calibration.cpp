#include "calibration.hpp"

#include <algorithm>

namespace das {

namespace {

// The last edge that is not above the value.
template <typename T, std::size_t N>
std::size_t bucket(const std::array<T, N>& edges, T value) {
  return static_cast<std::size_t>(std::upper_bound(edges.begin() + 1, edges.end(), value) - edges.begin()) - 1;
}

void fade_and_add(std::atomic<double>& count, double fade, double amount) {
  double before = count.load(std::memory_order_relaxed);
  while (!count.compare_exchange_weak(before, before * fade + amount, std::memory_order_relaxed)) {
  }
}

}  // namespace

Calibration::Calibration() {
  // Before anything is observed: the longer the match, the more votes and the more of one mind, the likelier.
  for (std::size_t i = 0; i < kCells; ++i) {
    const std::size_t votes = i % kVotes.size();
    const std::size_t share = i / kVotes.size() % kShares.size();
    const std::size_t length = i / kVotes.size() / kShares.size() % kLengths.size();
    const double middle = share + 1 < kShares.size() ? (kShares[share] + kShares[share + 1]) / 2.0 : 1.0;
    const double mean = middle * (kLengths[length] / (kLengths[length] + 1.0)) * (kVotes[votes] / (kVotes[votes] + 1.0));
    counts_[i].prior_accepted = kPriorObservations * mean;
    counts_[i].prior_rejected = kPriorObservations * (1.0 - mean);
  }
}

Calibration::Cell Calibration::cell(Source source, std::size_t match_length, std::size_t top, std::size_t votes) {
  const double share = static_cast<double>(top) / static_cast<double>(votes);
  std::size_t i = static_cast<std::size_t>(source);
  i = i * kLengths.size() + bucket(kLengths, static_cast<std::uint32_t>(match_length));
  i = i * kShares.size() + bucket(kShares, share);
  i = i * kVotes.size() + bucket(kVotes, static_cast<std::uint32_t>(votes));
  return static_cast<Cell>(i);
}

double Calibration::probability(Cell cell) const {
  const Counts& counts = counts_[cell];
  const double accepted = counts.prior_accepted + counts.accepted.load(std::memory_order_relaxed);
  const double rejected = counts.prior_rejected + counts.rejected.load(std::memory_order_relaxed);
  return accepted / (accepted + rejected);
}

void Calibration::observe(Cell cell, bool accepted) {
  fade_and_add(counts_[cell].accepted, kFade, accepted ? 1.0 : 0.0);
  fade_and_add(counts_[cell].rejected, kFade, accepted ? 0.0 : 1.0);
}

std::vector<CalibrationRow> Calibration::rows() const {
  std::vector<CalibrationRow> rows;
  for (std::size_t i = 0; i < kCells; ++i) {
    const double accepted = counts_[i].accepted.load(std::memory_order_relaxed);
    const double rejected = counts_[i].rejected.load(std::memory_order_relaxed);
    if (accepted + rejected == 0.0) continue;
    const std::size_t length = i / kVotes.size() / kShares.size() % kLengths.size();
    rows.push_back({static_cast<Source>(i / (kVotes.size() * kShares.size() * kLengths.size())), kLengths[length],
                    kShares[i / kVotes.size() % kShares.size()], kVotes[i % kVotes.size()], accepted, rejected,
                    probability(static_cast<Cell>(i))});
  }
  return rows;
}

}  // namespace das

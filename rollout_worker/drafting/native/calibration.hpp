// How often drafted tokens are accepted, learned online.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace das {

enum class Source : std::uint8_t { history = 0, self = 1 };
inline constexpr std::size_t kSources = 2;

// What is counted of the drafts that were returned. A drafted token is verified when the token the model really
// produced there is known and all drafted tokens before it were accepted; accepted when it is that token.
struct SourceCounts {
  std::uint64_t drafts = 0;
  std::uint64_t drafted = 0;
  std::uint64_t verified = 0;
  std::uint64_t accepted = 0;
};

struct CalibrationRow {
  Source source;
  std::uint32_t match_length;  // lowest of its bucket, as the next two
  double share;
  std::uint32_t votes;
  double accepted;  // observations, older ones faded
  double rejected;
  double probability;
};

// The probability that a drafted token is accepted given that those before it were: the posterior mean of a beta
// distribution for each bucket of (source, match length, share of the votes, number of votes). Every observation of a
// bucket fades its earlier ones by kFade. Safe to use from several threads without a lock.
class Calibration {
 public:
  using Cell = std::uint32_t;

  static constexpr std::array<std::uint32_t, 12> kLengths{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  static constexpr std::array<double, 6> kShares{0.0, 0.25, 0.5, 0.7, 0.9, 1.0};
  static constexpr std::array<std::uint32_t, 7> kVotes{1, 2, 3, 5, 9, 17, 33};
  static constexpr double kPriorObservations = 2.0;
  static constexpr double kFade = 1.0 - 1.0 / 2048.0;

  Calibration();

  static Cell cell(Source source, std::size_t match_length, std::size_t top, std::size_t votes);
  double probability(Cell cell) const;
  void observe(Cell cell, bool accepted);

  // The buckets observed so far.
  std::vector<CalibrationRow> rows() const;

 private:
  static constexpr std::size_t kCells = kSources * kLengths.size() * kShares.size() * kVotes.size();

  // Two counts rather than hits and total: read apart, they still make a probability.
  struct Counts {
    std::atomic<double> accepted{0.0};
    std::atomic<double> rejected{0.0};
    double prior_accepted = 0.0;
    double prior_rejected = 0.0;
  };

  std::array<Counts, kCells> counts_;
};

}  // namespace das

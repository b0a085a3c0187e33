// Acceptance of draft tokens by the age of the history that proposed them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace das {

// Counts accepted and rejected draft tokens by age, in generations. If rollouts of several ages propose the same token,
// the token counts as one in total, in equal parts for each of these ages.
class AgeCounts {
 public:
  static constexpr std::size_t kAges = 64;  // the last one covers all larger ages

  struct Counts {
    double verified;
    double accepted;
  };

  // Returns the bit that represents an age, 0 or more, in a set of ages.
  static std::uint64_t bit(std::int64_t age) {
    return std::uint64_t{1} << std::min<std::int64_t>(age, static_cast<std::int64_t>(kAges) - 1);
  }

  // Counts one token for the non-empty set `ages`. Accepted and rejected tokens are kept apart, so that a concurrent
  // reader never sees more accepted than verified tokens.
  void observe(std::uint64_t ages, bool accepted) {
    auto& counts = accepted ? accepted_ : rejected_;
    const auto parts = static_cast<std::uint64_t>(std::popcount(ages));
    // The youngest age takes the remainder of the division, so that the parts always add up to one token.
    for (std::uint64_t rest = kToken % parts; ages != 0; ages &= ages - 1, rest = 0) {
      counts[static_cast<std::size_t>(std::countr_zero(ages))].fetch_add(kToken / parts + rest,
                                                                         std::memory_order_relaxed);
    }
  }

  Counts of(std::size_t age) const {
    const std::uint64_t accepted = accepted_[age].load(std::memory_order_relaxed);
    const std::uint64_t rejected = rejected_[age].load(std::memory_order_relaxed);
    return {static_cast<double>(accepted + rejected) / kToken, static_cast<double>(accepted) / kToken};
  }

 private:
  // The least common multiple of 1 to 16, so that one token divides evenly among up to 16 ages.
  static constexpr std::uint64_t kToken = 720720;

  std::array<std::atomic<std::uint64_t>, kAges> accepted_{};
  std::array<std::atomic<std::uint64_t>, kAges> rejected_{};
};

}  // namespace das

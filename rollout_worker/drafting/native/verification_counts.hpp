// Draft tokens that the engine has verified and accepted, by source and by position of the draft.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "mixture.hpp"
#include "occurrence.hpp"

namespace das {

// Any number of threads may call it.
class VerificationCounts {
 public:
  static constexpr std::size_t kPositions = 16;  // the last one covers all later positions

  struct Counts {
    std::uint64_t verified;
    std::uint64_t accepted;
  };

  // Counts the tokens of a draft that were verified, the first `accepted` of which were accepted.
  void add(std::span<const DraftPosition> verified, std::size_t accepted) {
    for (std::size_t i = 0; i < verified.size(); ++i) {
      add(sources_[static_cast<std::size_t>(verified[i].source())], i < accepted);
      add(positions_[std::min(i, kPositions - 1)], i < accepted);
    }
  }

  Counts of(Source source) const { return read(sources_[static_cast<std::size_t>(source)]); }
  Counts at(std::size_t position) const { return read(positions_[position]); }

 private:
  // Accepted and rejected tokens are kept apart, so that a concurrent reader never sees more accepted than verified
  // tokens.
  struct Counters {
    std::atomic<std::uint64_t> accepted{0};
    std::atomic<std::uint64_t> rejected{0};
  };
  static void add(Counters& counters, bool is_accepted) {
    (is_accepted ? counters.accepted : counters.rejected).fetch_add(1, std::memory_order_relaxed);
  }
  static Counts read(const Counters& counters) {
    const std::uint64_t accepted = counters.accepted.load(std::memory_order_relaxed);
    return {accepted + counters.rejected.load(std::memory_order_relaxed), accepted};
  }

  std::array<Counters, kSources> sources_;
  std::array<Counters, kPositions> positions_;
};

}  // namespace das

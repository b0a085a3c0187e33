// A draft made by letting the occurrences of a match vote on how it goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "calibration.hpp"
#include "context_order.hpp"

namespace das {

struct DraftPosition {
  Token token;
  Calibration::Cell cell;
  double probability;
};

// What one source proposes. One position more than drafted may follow: the first that fell under min_survival. It is
// observed as the others are, so that a bucket that is rated too low does not stay so for want of being drafted.
struct Candidate {
  explicit Candidate(std::pmr::memory_resource* memory) : positions(memory) {}
  void clear();

  std::pmr::vector<DraftPosition> positions;
  std::size_t drafted = 0;
  double expected = 0.0;  // accepted tokens
  std::size_t match_length = 0;
  std::size_t observed = 0;  // positions compared with what was really sampled
  bool alive = false;        // all of them were accepted, and there is more to observe
};

// Drafts at most `budget` tokens. `next[i]` points to the token that follows the i-th occurrence, newest occurrence
// first; the text goes on towards lower addresses until kStart. At each position the token with the most votes wins,
// of equals the one with the newest occurrence, and the occurrences that disagree leave. Changes `next`.
void vote(std::vector<const Token*>& next, Source source, std::size_t match_length, std::size_t budget,
          double min_survival, const Calibration& calibration, Candidate& out);

}  // namespace das

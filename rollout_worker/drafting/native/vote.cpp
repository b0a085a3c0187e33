#include "vote.hpp"

#include <array>

#include "segment.hpp"

namespace das {

void Candidate::clear() {
  positions.clear();
  drafted = 0;
  expected = 0.0;
  match_length = 0;
  observed = 0;
  alive = false;
}

void vote(std::vector<const Token*>& next, Source source, std::size_t match_length, std::size_t budget,
          double min_survival, const Calibration& calibration, Candidate& out) {
  struct Tally {
    Token token;
    std::uint32_t votes;
  };
  std::array<Tally, kMaxOccurrences> tallies;
  out.clear();
  out.match_length = match_length;
  double survival = 1.0;
  for (std::size_t step = 0; step < budget; ++step) {
    std::size_t votes = 0;
    std::size_t distinct = 0;
    for (const Token* place : next) {
      if (*place == kStart) continue;
      next[votes++] = place;
      std::size_t i = 0;
      while (i < distinct && tallies[i].token != *place) ++i;
      if (i == distinct) tallies[distinct++] = {*place, 0};
      ++tallies[i].votes;
    }
    if (votes == 0) break;
    // Tallies stand in the order of their newest occurrences, so the first of equals wins.
    Tally top = tallies[0];
    for (std::size_t i = 1; i < distinct; ++i) {
      if (tallies[i].votes > top.votes) top = tallies[i];
    }
    const Calibration::Cell cell = Calibration::cell(source, match_length + step, top.votes, votes);
    const double probability = calibration.probability(cell);
    survival *= probability;
    out.positions.push_back({top.token, cell, probability});
    if (survival < min_survival) break;
    ++out.drafted;
    out.expected += survival;
    std::size_t agreeing = 0;
    for (std::size_t i = 0; i < votes; ++i) {
      if (*next[i] == top.token) next[agreeing++] = next[i] - 1;
    }
    next.resize(agreeing);
  }
  out.alive = !out.positions.empty();
}

}  // namespace das

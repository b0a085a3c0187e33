// What a running rollout says next, from where its end stood before; learned while running.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <span>
#include <vector>

#include "learned.hpp"
#include "occurrence.hpp"
#include "text.hpp"

namespace das {

// What votes are young or old, good or bad to.
struct Standpoint {
  std::int64_t generation = 0;  // the newest
  float reward = 0.0F;          // the mean of the problem's rollouts

  // How many generations ago that was; 0 for what is newer.
  std::int64_t age(std::int64_t other) const {
    if (other >= generation) return 0;
    const std::uint64_t age = static_cast<std::uint64_t>(generation) - static_cast<std::uint64_t>(other);
    return static_cast<std::int64_t>(std::min<std::uint64_t>(age, std::numeric_limits<std::int64_t>::max()));
  }
};

// One position of a draft, with what is needed to learn from what is really sampled there.
struct DraftPosition {
  static constexpr std::size_t kCandidates = 6;
  static constexpr std::size_t kLevels = 32;
  static constexpr std::size_t kKinds = 12;

  // The occurrences of one source whose match is at least so long.
  struct Level {
    std::uint16_t bucket;
    std::array<std::uint8_t, kCandidates> share;  // of the votes, for each candidate, in units of 1/255
  };

  Source source() const { return voice == kSources ? Source::history : static_cast<Source>(voice); }

  Token token = kStart;
  std::uint8_t voice = 0;  // that speaks for the token most
  std::uint8_t match = 0;  // the longest
  std::uint8_t place = 0;  // in the draft
  std::uint8_t levels = 0;
  std::uint8_t candidates = 0;
  std::uint8_t favourite = 0;   // the candidate that the token is
  bool several_kinds = false;   // among the votes of the history
  std::int64_t generation = 0;  // the newest of the source's votes for the token
  float probability = 0.0F;     // of the token, as calibrated
  Token previous = kStart;      // the token before
  std::uint64_t ages = 0;       // bits of the ages of the history that says the token
  std::array<Token, kCandidates> candidate;
  std::array<float, kCandidates> mixed;  // probability of each candidate as mixed; 0 for an end
  std::array<Level, kLevels> level;
  std::array<std::array<std::uint8_t, kCandidates>, kKinds> votes;  // of the history, by kind; if there are several
};

// The probabilities of next tokens are a chain: the occurrences with the longest match say with probability w what
// comes next, else those with the next shorter match (among them the former) do, and so on, of all sources (Jelinek and
// Mercer 1980). Among the history's, rollouts that the request has gone along with lately speak for themselves. Each w
// is learned by online expectation maximisation in buckets of (source, match length, votes, share of the votes for the
// favourite, place in the draft). Votes weigh by the age of the rollout in weight versions and by its reward against
// the mean, as gradient ascent on their likelihood finds. What comes out is corrected and calibrated by logistic
// regression on its log-odds, the token, the token with the one before it, the longest match and the place; the
// candidate that is likeliest then is drafted.
//
// Any number of threads may draft and learn at once; counts that collide may be lost.
class Mixture {
 public:
  // How many occurrences of each source are looked at.
  static constexpr std::size_t kHistoryOccurrences = 32;
  static constexpr std::size_t kLiveOccurrences = 24;
  static constexpr std::size_t kForeignOccurrences = 16;
  static constexpr std::size_t kAnchors = 4;
  // History, anchors, foreign, own response, prompt and siblings.
  static constexpr std::size_t kMostOccurrences =
      kHistoryOccurrences + kAnchors + kForeignOccurrences + 3 * kLiveOccurrences;

  Mixture();

  // Drafts at most `budget` positions behind `last` into `draft`, nothing behind one of `ends`, and no token that is
  // reached and accepted with a probability under `min_survival`; returns how many are drafted. One more position may
  // follow, the first under min_survival: it is learned from as others are, so that what is rated too low does not stay
  // so. Of the occurrences of the end of the text those are left that speak for all that is drafted.
  std::size_t draft(std::vector<Occurrence>& occurrences, Token last, Standpoint standpoint,
                    std::span<const Token> ends, std::size_t budget, double min_survival,
                    std::pmr::vector<DraftPosition>& draft) const;

  // Learns that `actual` was sampled at a position that was reached.
  void learn(const DraftPosition& position, Token actual);

  // All that was learned, in an order that only changes with kLayout.
  std::vector<Learned> learned() const;
  // Goes on from what another mixture learned. What is sampled now may follow another law, so that of its evidence only
  // some counts. Returns false, and changes nothing, if these are no such numbers.
  bool take(std::span<const Learned> others);

  static constexpr std::uint32_t kLayout = 1;

 private:
  static constexpr std::array<std::uint8_t, 15> kLengths{1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64};
  static constexpr std::array<std::uint8_t, 6> kVotes{1, 2, 3, 5, 9, 17};
  static constexpr std::size_t kShares = 4;
  static constexpr std::size_t kPlaces = 3;
  static constexpr std::size_t kBuckets = kVoices * kLengths.size() * kVotes.size() * kShares * kPlaces;
  static constexpr std::size_t kTokenBits = 14;
  static constexpr std::size_t kPairBits = 15;
  static constexpr std::size_t kLongestDraft = 16;
  static constexpr std::size_t kLearned = kBuckets + DraftPosition::kKinds + 2 + (std::size_t{1} << kTokenBits) +
                                          (std::size_t{1} << kPairBits) + kVoices * kLengths.size() + kLongestDraft;

  static constexpr std::array<std::int64_t, 3> kAges{1, 3, 7};  // the oldest of each class but the last
  static constexpr std::size_t kRewards = 3;                    // unknown, below the mean, not below
  static_assert((kAges.size() + 1) * kRewards == DraftPosition::kKinds);

  static std::size_t length_bucket(std::size_t match);
  static std::uint8_t kind(const Occurrence& one, Standpoint standpoint);
  static std::size_t bucket(std::size_t voice, std::size_t length, std::size_t votes, float top, std::size_t place);
  static float prior(std::size_t bucket);
  float weight(std::size_t bucket) const;
  // `voted` is told the candidate of each occurrence; one beyond them for those that came when there was no place left.
  void mix(std::span<const Occurrence> occurrences, std::size_t since, DraftPosition& position,
           std::span<std::uint8_t> voted) const;
  void learn_kinds(const DraftPosition& position, std::size_t actual);
  void count_vote(std::size_t kind);
  // Calls `visit` with each number that is learned.
  template <typename Self, typename Visit>
  static void each(Self& self, Visit visit) {
    for (auto& share : self.weights_) visit(share);
    for (auto& weight : self.log_vote_) visit(weight);
    visit(self.slope_);
    visit(self.bias_);
    for (auto& weight : self.of_token_) visit(weight);
    for (auto& weight : self.of_pair_) visit(weight);
    for (auto& weight : self.of_match_) visit(weight);
    for (auto& weight : self.of_place_) visit(weight);
  }
  // By how much one candidate is rather drafted than others.
  float preference(const DraftPosition& position, std::size_t candidate) const;
  float calibrated(const DraftPosition& position, std::size_t candidate) const;
  static std::size_t hash(Token token) { return token * 2654435761U >> (32 - kTokenBits); }
  static std::size_t hash(Token previous, Token token) {
    const std::uint64_t pair = std::uint64_t{previous} << 32 | token;
    return ((pair ^ pair >> 29) * 0x9E3779B97F4A7C15U) >> (64 - kPairBits);
  }

  std::array<LearnedShare, kBuckets> weights_;
  std::array<LearnedWeight, DraftPosition::kKinds> log_vote_;
  std::array<std::atomic<float>, DraftPosition::kKinds> vote_;  // what a vote of a kind counts
  LearnedWeight slope_{1.0F};
  LearnedWeight bias_;
  std::array<LearnedWeight, std::size_t{1} << kTokenBits> of_token_;
  std::array<LearnedWeight, std::size_t{1} << kPairBits> of_pair_;
  std::array<LearnedWeight, kVoices * kLengths.size()> of_match_;
  std::array<LearnedWeight, kLongestDraft> of_place_;
};

}  // namespace das

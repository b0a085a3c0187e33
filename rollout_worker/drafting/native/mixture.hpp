// The probability model of a rollout's next tokens, given occurrences of the end of its text, and how it learns.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "text.hpp"

namespace das {

// The serialized state of one parameter. For a probability: the number of positive observations, and of all
// observations. For a weight: its value, and the sum of its squared gradients.
struct ParameterState {
  float value;
  float evidence;
};

// A probability, estimated as the mean of a beta distribution with exponential forgetting.
class LearnedProbability {
 public:
  ParameterState state() const {
    const float positive = positive_.load(std::memory_order_relaxed);
    return {positive, positive + negative_.load(std::memory_order_relaxed)};
  }

  static bool is_valid(ParameterState state) { return state.value >= 0.0F && state.value <= state.evidence; }

  // Continues from a saved state, scaled down to at most `max_observations`.
  void load(ParameterState state, float max_observations) {
    const float scale = state.evidence > max_observations ? max_observations / state.evidence : 1.0F;
    positive_.store(scale * state.value, std::memory_order_relaxed);
    negative_.store(scale * (state.evidence - state.value), std::memory_order_relaxed);
  }

  // Returns the mean, with a prior that counts as `strength` observations.
  float mean(float prior, float strength) const {
    const float positive = positive_.load(std::memory_order_relaxed);
    const float negative = negative_.load(std::memory_order_relaxed);
    return (positive + strength * prior) / (positive + negative + strength);
  }

  // Adds fractional observations, after scaling earlier ones down to `max_observations`. When two threads observe at
  // the same time, one observation may be lost.
  void observe(float positive, float negative, float max_observations) {
    const float old_positive = positive_.load(std::memory_order_relaxed);
    const float old_negative = negative_.load(std::memory_order_relaxed);
    const float total = old_positive + old_negative;
    const float scale = total > max_observations ? max_observations / total : 1.0F;
    positive_.store(scale * old_positive + positive, std::memory_order_relaxed);
    negative_.store(scale * old_negative + negative, std::memory_order_relaxed);
  }

 private:
  std::atomic<float> positive_{0.0F};
  std::atomic<float> negative_{0.0F};
};

// A coefficient that is learned by stochastic gradient ascent with AdaGrad step sizes (Duchi et al. 2011).
class LearnedWeight {
 public:
  explicit LearnedWeight(float value = 0.0F) : value_(value) {}

  ParameterState state() const { return {value(), squares_.load(std::memory_order_relaxed)}; }

  static bool is_valid(ParameterState state) { return std::abs(state.value) < kMaxValue && state.evidence > 0.0F; }

  // Continues from a saved state, as if it had seen at most `max_observations` observations.
  void load(ParameterState state, float max_observations) {
    value_.store(state.value, std::memory_order_relaxed);
    squares_.store(std::min(state.evidence, kTypicalSquare * max_observations), std::memory_order_relaxed);
  }

  float value() const { return value_.load(std::memory_order_relaxed); }

  void ascend(float gradient, float rate) {
    const float squares = squares_.load(std::memory_order_relaxed) + gradient * gradient;
    squares_.store(squares, std::memory_order_relaxed);
    value_.store(value() + rate * gradient / std::sqrt(squares), std::memory_order_relaxed);
  }

 private:
  static constexpr float kMaxValue = 100.0F;  // far beyond any useful log-odds
  // The square of a typical gradient: p (1 - p) for a token that is accepted with a probability p of about 0.9.
  static constexpr float kTypicalSquare = 0.1F;

  std::atomic<float> value_;
  std::atomic<float> squares_{1e-2F};
};

// The reference for the ages and rewards of finished rollouts.
class Baseline {
 public:
  // `generations` are those of the problem's rollouts, in ascending order; `newest` is that of all problems' rollouts.
  Baseline(std::int64_t newest, std::span<const std::int64_t> generations, float mean_reward)
      : newest_(newest),
        earlier_(generations.begin(), std::lower_bound(generations.begin(), generations.end(), newest)),
        mean_reward_(mean_reward) {}

  // Returns the age of a generation. The newest generation has the age 0. All generations between two of the problem
  // have the same age, so that ages do not depend on how many weight versions an epoch has.
  std::int64_t age(std::int64_t generation) const {
    if (generation >= newest_) return 0;
    return 1 + (earlier_.end() - std::upper_bound(earlier_.begin(), earlier_.end(), generation));
  }

  float mean_reward() const { return mean_reward_; }  // of the problem's rollouts

 private:
  std::int64_t newest_;
  std::span<const std::int64_t> earlier_;  // the problem's generations before the newest of all problems
  float mean_reward_;
};

// One position of a draft, with all that is needed to learn from the token that is sampled there.
struct DraftPosition {
  static constexpr std::size_t kCandidates = 6;
  static constexpr std::size_t kOthers = 16;
  static constexpr std::size_t kLevels = 32;
  static constexpr std::size_t kVoteClasses = 12;

  // The votes of one expert's occurrences whose match is at least as long as the level's.
  struct Level {
    std::uint16_t bucket;
    std::array<std::uint8_t, kCandidates> share;  // of the votes, for each candidate, in units of 1/255
  };

  Source source() const { return expert == kSources ? Source::history : static_cast<Source>(expert); }

  Token token = kBoundary;
  std::uint8_t expert = 0;        // the one that gives the token the most probability mass
  std::uint8_t match_length = 0;  // the longest
  std::uint8_t index = 0;         // in the draft
  std::uint8_t num_levels = 0;
  std::uint8_t num_candidates = 0;
  std::uint8_t num_others = 0;
  std::uint8_t chosen = 0;           // the candidate that was drafted
  bool has_several_classes = false;  // whether votes of the history belong to several classes
  std::int64_t generation = 0;       // the newest of the expert's votes for the token
  float probability = 0.0F;          // of the token, calibrated
  Token previous = kBoundary;        // the token before this position
  std::array<Token, kCandidates> candidates;
  std::array<Token, kOthers> others;     // more tokens that occurrences propose; the mixture ignores them
  std::array<float, kCandidates> mixed;  // uncalibrated probability of each candidate; 0 for kBoundary
  std::array<Level, kLevels> levels;
  // Votes of the history by class and candidate; set if has_several_classes.
  std::array<std::array<std::uint8_t, kCandidates>, kVoteClasses> votes;
};

// The model interpolates between match lengths (Jelinek and Mercer 1980): with probability w, the occurrences with the
// longest match determine the next token by their votes; otherwise those with the next shorter match do (the longer
// ones included), and so on, in one chain over all experts. The experts are the sources, and the rollouts of the
// history that the request has recently followed (the anchored ones).
//
// Each w is learned by online expectation maximization, in buckets of (expert, match length, number of votes, share of
// the votes for the top candidate, index in the draft). Votes are weighted by the class of their rollout, which
// combines its age with its reward relative to the mean; the weights are learned by gradient ascent on the likelihood.
// Finally, a logistic regression on the log-odds, the token, the pair of the token and the previous one, the longest
// match and the index calibrates the probabilities. The candidate with the highest calibrated probability is drafted.
//
// Any number of threads may draft and learn concurrently; updates may be lost when they collide.
class Mixture {
 public:
  // The number of occurrences that are used of each source.
  static constexpr std::size_t kHistoryOccurrences = 32;
  static constexpr std::size_t kLiveOccurrences = 24;
  static constexpr std::size_t kCrossProblemOccurrences = 16;
  static constexpr std::size_t kAnchors = 4;
  // History, anchors, cross-problem pool; and own response, prompt and siblings.
  static constexpr std::size_t kMaxOccurrences =
      kHistoryOccurrences + kAnchors + kCrossProblemOccurrences + 3 * kLiveOccurrences;

  Mixture();

  // Appends up to `budget` positions after the token `last` to `draft`, given occurrences that are sorted by match
  // length, longest first. The draft ends after one of `stop_tokens`, or with the first token whose survival is below
  // `min_survival`. That token is not drafted, but the model learns from its position as well; otherwise an
  // underestimated probability would never be corrected. If tokens are `given`, these are drafted, as far as
  // occurrences propose them. Keeps in `occurrences` only those that propose the whole draft.
  void draft(std::vector<Occurrence>& occurrences, Token last, Baseline baseline, std::span<const Token> stop_tokens,
             std::size_t budget, double min_survival, std::span<const Token> given,
             std::pmr::vector<DraftPosition>& draft) const;

  // Returns the calibrated probability of one of the candidates at a position.
  float probability(const DraftPosition& position, std::size_t candidate) const {
    return calibrated(position, candidate);
  }

  // Learns from the token `actual`, which was sampled at a position that was reached.
  void learn(const DraftPosition& position, Token actual);

  // Returns the state of all parameters, in an order that is fixed for each value of kLayout.
  std::vector<ParameterState> state() const;
  // Continues from the state of another mixture. Evidence is limited, since the distribution of tokens may have changed
  // in the meantime. Returns false and changes nothing if the state is invalid.
  bool load_state(std::span<const ParameterState> states);

  static constexpr std::uint32_t kLayout = 1;

 private:
  static constexpr std::array<std::uint8_t, 15> kLengths{1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64};
  static constexpr std::array<std::uint8_t, 6> kVotes{1, 2, 3, 5, 9, 17};
  static constexpr std::size_t kShares = 4;
  static constexpr std::size_t kPlaces = 3;  // the first token of a draft, the next two, and the rest
  static constexpr std::size_t kBuckets = kExperts * kLengths.size() * kVotes.size() * kShares * kPlaces;
  static constexpr std::size_t kTokenBits = 14;
  static constexpr std::size_t kPairBits = 15;
  static constexpr std::size_t kDistinctIndices = 16;  // larger indices in a draft share a weight
  static constexpr std::size_t kParameters = kBuckets + DraftPosition::kVoteClasses + 2 +
                                             (std::size_t{1} << kTokenBits) + (std::size_t{1} << kPairBits) +
                                             kExperts * kLengths.size() + kDistinctIndices;

  static constexpr std::array<std::int64_t, 3> kAges{1, 3, 7};  // the oldest age of each class but the last
  static constexpr std::size_t kRewardClasses = 3;              // unknown, below the mean, at least the mean
  static_assert((kAges.size() + 1) * kRewardClasses == DraftPosition::kVoteClasses);

  static std::size_t length_bucket(std::size_t match);
  static std::uint8_t vote_class(const Occurrence& occurrence, Baseline baseline);
  static std::size_t bucket(std::size_t expert, std::size_t length, std::size_t votes, float top_share,
                            std::size_t index);
  static float prior(std::size_t bucket);
  float weight(std::size_t bucket) const;
  // Fills in a position from the tokens at `offset` after each occurrence. Sets voted[i] to the candidate of
  // occurrence i, or to kCandidates if there are too many different tokens. Chooses the best token, or `given`, unless
  // that is kBoundary.
  void mix(std::span<const Occurrence> occurrences, std::size_t offset, Token given, DraftPosition& position,
           std::span<std::uint8_t> voted) const;
  void learn_vote_classes(const DraftPosition& position, std::size_t actual);
  void update_vote(std::size_t vote_class);
  template <typename Self, typename Visit>
  static void for_each_parameter(Self& self, Visit visit) {
    for (auto& probability : self.weights_) visit(probability);
    for (auto& weight : self.log_vote_) visit(weight);
    visit(self.slope_);
    visit(self.bias_);
    for (auto& weight : self.token_weight_) visit(weight);
    for (auto& weight : self.pair_weight_) visit(weight);
    for (auto& weight : self.match_weight_) visit(weight);
    for (auto& weight : self.index_weight_) visit(weight);
  }
  // Returns the part of a candidate's log-odds that differs between the candidates of one position.
  float preference(const DraftPosition& position, std::size_t candidate) const;
  float calibrated(const DraftPosition& position, std::size_t candidate) const;
  static std::size_t hash(Token token) { return token * 2654435761U >> (32 - kTokenBits); }
  static std::size_t hash(Token previous, Token token) {
    const std::uint64_t pair = std::uint64_t{previous} << 32 | token;
    return ((pair ^ pair >> 29) * 0x9E3779B97F4A7C15U) >> (64 - kPairBits);
  }

  std::array<LearnedProbability, kBuckets> weights_;
  std::array<LearnedWeight, DraftPosition::kVoteClasses> log_vote_;
  std::array<std::atomic<float>, DraftPosition::kVoteClasses> vote_;  // the weight of one vote: exp(log_vote_)
  LearnedWeight slope_{1.0F};
  LearnedWeight bias_;
  std::array<LearnedWeight, std::size_t{1} << kTokenBits> token_weight_;
  std::array<LearnedWeight, std::size_t{1} << kPairBits> pair_weight_;
  std::array<LearnedWeight, kExperts * kLengths.size()> match_weight_;
  std::array<LearnedWeight, kDistinctIndices> index_weight_;
};

}  // namespace das

#include "mixture.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace das {

namespace {

constexpr float kPriorStrength = 2.0F;  // in observations
constexpr float kMaxObservations = 2000.0F;
constexpr float kRate = 0.05F;      // AdaGrad step size
constexpr float kTokenRate = 0.1F;  // AdaGrad step size of weights of tokens and pairs
constexpr float kUnseen = 1e-3F;    // probability of a token that no occurrence proposes
constexpr float kUnlikely = 0.02F;  // candidates with a lower probability are not learned from
constexpr float kShareUnit = 255.0F;
constexpr float kMaxLogVote = 4.0F;
constexpr float kLoadedObservations = 256.0F;  // the most that a loaded state counts
constexpr float kMargin = 1e-3F;               // probabilities are clamped to this distance from 0 and 1 for log-odds

float log_odds(float probability) {
  const float p = std::clamp(probability, kMargin, 1.0F - kMargin);
  return std::log(p / (1.0F - p));
}

// Maps each number below `Count` to its class: the last one whose lower bound in `lowest` is not larger. Numbers below
// all bounds belong to the first class.
template <std::size_t Count, std::size_t Classes>
constexpr std::array<std::uint8_t, Count> classify(const std::array<std::uint8_t, Classes>& lowest) {
  std::array<std::uint8_t, Count> class_of{};
  for (std::size_t number = 0; number < Count; ++number) {
    std::size_t last = 0;
    while (last + 1 < Classes && lowest[last + 1] <= number) ++last;
    class_of[number] = static_cast<std::uint8_t>(last);
  }
  return class_of;
}

float logistic(float x) { return 1.0F / (1.0F + std::exp(-x)); }

}  // namespace

std::size_t Mixture::length_bucket(std::size_t match) {
  static constexpr auto kBuckets = classify<kMaxDepth + 1>(kLengths);
  return kBuckets[std::min(match, kMaxDepth)];
}

std::size_t Mixture::bucket(std::size_t expert, std::size_t length, std::size_t votes, float top_share,
                            std::size_t index) {
  static constexpr auto kVoteBuckets = classify<kMaxOccurrences + 1>(kVotes);
  constexpr float kRounding = 1e-4F;  // error of sums of weighted votes
  const float top = top_share + kRounding;
  const std::size_t share = top >= 1.0F ? 3 : top >= 0.8F ? 2 : top >= 0.5F ? 1 : 0;
  const std::size_t place = index == 0 ? 0 : index < 3 ? 1 : 2;
  return (((expert * kLengths.size() + length) * kVotes.size() + kVoteBuckets[votes]) * kShares + share) * kPlaces +
         place;
}

// Without observations, the top candidate is assumed to be likelier for longer matches, and for more and less divided
// votes.
float Mixture::prior(std::size_t bucket) {
  static constexpr auto kPriors = [] {
    constexpr std::array<float, kShares> kMeans{0.3F, 0.65F, 0.9F, 1.0F};
    std::array<float, kBuckets> priors{};
    for (std::size_t i = 0; i < kBuckets; ++i) {
      const std::size_t share = i / kPlaces % kShares;
      const auto votes = static_cast<float>(kVotes[i / kPlaces / kShares % kVotes.size()]);
      const auto length = static_cast<float>(kLengths[i / kPlaces / kShares / kVotes.size() % kLengths.size()]);
      priors[i] = kMeans[share] * length / (length + 1.0F) * votes * length / (votes * length + 1.0F);
    }
    return priors;
  }();
  return kPriors[bucket];
}

float Mixture::weight(std::size_t bucket) const { return weights_[bucket].mean(prior(bucket), kPriorStrength); }

Mixture::Mixture() {
  for (std::size_t c = 0; c < DraftPosition::kVoteClasses; ++c) update_vote(c);
}

void Mixture::update_vote(std::size_t vote_class) {
  const float value = std::clamp(log_vote_[vote_class].value(), -kMaxLogVote, kMaxLogVote);
  vote_[vote_class].store(std::exp(value), std::memory_order_relaxed);
}

std::vector<ParameterState> Mixture::state() const {
  std::vector<ParameterState> states;
  states.reserve(kParameters);
  for_each_parameter(*this, [&](const auto& parameter) { states.push_back(parameter.state()); });
  return states;
}

bool Mixture::load_state(std::span<const ParameterState> states) {
  if (states.size() != kParameters) return false;
  bool is_valid = true;
  std::size_t next = 0;
  for_each_parameter(*this, [&](const auto& parameter) {
    const ParameterState state = states[next++];
    is_valid = is_valid && std::isfinite(state.value) && std::isfinite(state.evidence) && parameter.is_valid(state);
  });
  if (!is_valid) return false;
  next = 0;
  for_each_parameter(*this, [&](auto& parameter) { parameter.load(states[next++], kLoadedObservations); });
  for (std::size_t c = 0; c < DraftPosition::kVoteClasses; ++c) update_vote(c);
  return true;
}

std::uint8_t Mixture::vote_class(const Occurrence& occurrence, Baseline baseline) {
  if (occurrence.source != Source::history && occurrence.source != Source::cross_problem) return 0;
  const std::int64_t age = baseline.age(occurrence.generation);
  std::size_t age_class = 0;
  for (const std::int64_t oldest : kAges) age_class += age > oldest ? 1 : 0;
  const std::size_t reward_class = std::isnan(occurrence.reward) || occurrence.source == Source::cross_problem ? 0
                                   : occurrence.reward < baseline.mean_reward()                                ? 1
                                                                                                               : 2;
  return static_cast<std::uint8_t>(age_class * kRewardClasses + reward_class);
}

void Mixture::mix(std::span<const Occurrence> occurrences, std::size_t offset, Token given, DraftPosition& position,
                  std::span<std::uint8_t> voted) const {
  constexpr std::size_t kCandidates = DraftPosition::kCandidates;
  // By expert: the weighted votes for each candidate and in total, the number of votes, the probability mass that the
  // expert gives to each candidate, and the newest generation that voted for it.
  std::array<std::array<float, kCandidates>, kExperts> weighted{};
  std::array<float, kExperts> total{};
  std::array<std::uint8_t, kExperts> votes{};
  std::array<std::array<float, kCandidates>, kExperts> mass{};
  std::array<std::array<std::int64_t, kCandidates>, kExperts> newest{};
  std::array<std::uint32_t, kCandidates> code;
  std::array<const Token*, kCandidates> dictionary;
  if (position.has_several_classes) position.votes = {};
  position.match_length = static_cast<std::uint8_t>(std::min(occurrences.front().match + offset, kMaxDepth));
  float remaining = 1.0F;
  for (std::size_t i = 0; i < occurrences.size();) {
    const std::size_t length = length_bucket(occurrences[i].match + offset);
    std::array<bool, kExperts> changed{};
    for (; i < occurrences.size() && length_bucket(occurrences[i].match + offset) == length; ++i) {
      const Occurrence& occurrence = occurrences[i];
      const std::size_t expert = occurrence.expert();
      const float vote = vote_[occurrence.vote_class].load(std::memory_order_relaxed);
      // Most occurrences propose the same token and share a dictionary, so comparing codes usually suffices.
      const std::uint32_t value = occurrence.text.code(offset);
      std::size_t k = 0;
      while (k < position.num_candidates && (code[k] != value || dictionary[k] != occurrence.text.dictionary())) ++k;
      if (k == position.num_candidates) {
        const Token token = occurrence.text.token(value);
        k = 0;
        while (k < position.num_candidates && position.candidates[k] != token) ++k;
        if (k == position.num_candidates && k < kCandidates) {
          position.candidates[k] = token;
          code[k] = value;
          dictionary[k] = occurrence.text.dictionary();
          ++position.num_candidates;
        } else if (k == kCandidates && position.num_others < DraftPosition::kOthers) {
          const auto* const end = position.others.begin() + position.num_others;
          if (std::find(position.others.cbegin(), end, token) == end) position.others[position.num_others++] = token;
        }
      }
      voted[i] = static_cast<std::uint8_t>(k);
      if (k < kCandidates) {
        newest[expert][k] =
            weighted[expert][k] == 0.0F ? occurrence.generation : std::max(newest[expert][k], occurrence.generation);
        weighted[expert][k] += vote;
        if (position.has_several_classes && occurrence.source == Source::history)
          ++position.votes[occurrence.vote_class][k];
      }
      total[expert] += vote;
      ++votes[expert];
      changed[expert] = true;
    }
    for (std::size_t e = 0; e < kExperts && position.num_levels < DraftPosition::kLevels; ++e) {
      if (!changed[e]) continue;
      const float top = *std::max_element(weighted[e].begin(), weighted[e].end());
      const std::size_t level_bucket = bucket(e, length, votes[e], top / total[e], position.index);
      DraftPosition::Level& level = position.levels[position.num_levels++];
      level.bucket = static_cast<std::uint16_t>(level_bucket);
      const float level_weight = weight(level_bucket);
      for (std::size_t k = 0; k < position.num_candidates; ++k) {
        const float share = weighted[e][k] / total[e];
        level.share[k] = static_cast<std::uint8_t>(kShareUnit * share + 0.5F);
        mass[e][k] += remaining * level_weight * share;
      }
      for (std::size_t k = position.num_candidates; k < kCandidates; ++k) level.share[k] = 0;
      remaining *= 1.0F - level_weight;
    }
  }
  float best = -std::numeric_limits<float>::infinity();
  for (std::size_t k = 0; k < position.num_candidates; ++k) {
    float sum = 0.0F;
    std::size_t top_expert = 0;
    for (std::size_t e = 0; e < kExperts; ++e) {
      sum += mass[e][k];
      if (mass[e][k] > mass[top_expert][k]) top_expert = e;
    }
    position.mixed[k] = position.candidates[k] == kBoundary ? 0.0F : sum;
    if (position.mixed[k] == 0.0F || (given != kBoundary && position.candidates[k] != given)) continue;
    const float score = preference(position, k);
    if (score < best || (score == best && newest[top_expert][k] <= position.generation)) continue;
    best = score;
    position.chosen = static_cast<std::uint8_t>(k);
    position.token = position.candidates[k];
    position.expert = static_cast<std::uint8_t>(top_expert);
    position.generation = newest[top_expert][k];
  }
}

float Mixture::preference(const DraftPosition& position, std::size_t k) const {
  const Token token = position.candidates[k];
  return slope_.value() * log_odds(position.mixed[k]) + token_weight_[hash(token)].value() +
         pair_weight_[hash(position.previous, token)].value();
}

float Mixture::calibrated(const DraftPosition& position, std::size_t k) const {
  const std::size_t match_bucket = position.expert * kLengths.size() + length_bucket(position.match_length);
  return logistic(preference(position, k) + bias_.value() + match_weight_[match_bucket].value() +
                  index_weight_[position.index].value());
}

void Mixture::draft(std::vector<Occurrence>& occurrences, Token last, Baseline baseline,
                    std::span<const Token> stop_tokens, std::size_t budget, double min_survival,
                    std::span<const Token> given, std::pmr::vector<DraftPosition>& draft) const {
  std::uint16_t vote_classes = 0;
  for (Occurrence& occurrence : occurrences) {
    occurrence.vote_class = vote_class(occurrence, baseline);
    if (occurrence.source == Source::history) vote_classes |= static_cast<std::uint16_t>(1U << occurrence.vote_class);
  }
  const bool has_several_classes = std::popcount(vote_classes) > 1;
  std::array<std::uint8_t, kMaxOccurrences> voted;
  double survival = 1.0;
  for (std::size_t index = 0; index < budget && !occurrences.empty(); ++index) {
    DraftPosition& position = draft.emplace_back();
    position.index = static_cast<std::uint8_t>(std::min(index, kDistinctIndices - 1));
    position.has_several_classes = has_several_classes;
    position.previous = last;
    mix(occurrences, index, index < given.size() ? given[index] : kBoundary, position, voted);
    if (position.token == kBoundary) {
      draft.pop_back();
      break;
    }
    position.probability = calibrated(position, position.chosen);
    last = position.token;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < occurrences.size(); ++i) {
      // A rollout of which no more is known has no vote.
      if (voted[i] != position.chosen || occurrences[i].is_unknown(index + 1)) continue;
      if (kept < i) occurrences[kept] = occurrences[i];
      ++kept;
    }
    survival *= position.probability;
    if (survival < min_survival) return;
    occurrences.erase(occurrences.begin() + static_cast<std::ptrdiff_t>(kept), occurrences.end());
    if (std::find(stop_tokens.begin(), stop_tokens.end(), position.token) != stop_tokens.end()) break;
  }
}

void Mixture::learn(const DraftPosition& position, Token actual) {
  const auto* const end = position.candidates.begin() + position.num_candidates;
  const auto k =
      static_cast<std::size_t>(std::find(position.candidates.begin(), end, actual) - position.candidates.begin());
  // The expectation step computes each level's responsibility for the token. Going up from the shortest match yields
  // the probability of the token under the chain that begins at each level; going down from the longest match yields
  // the probability that a level was reached.
  std::array<float, DraftPosition::kLevels> responsibility;
  float below = kUnseen;
  for (std::size_t i = position.num_levels; i-- > 0;) {
    const DraftPosition::Level& level = position.levels[i];
    const float level_weight = weight(level.bucket);
    const float here =
        k < position.num_candidates ? level_weight * static_cast<float>(level.share[k]) / kShareUnit : 0.0F;
    below = here + (1.0F - level_weight) * below;
    responsibility[i] = here > 0.0F ? here / below : 0.0F;  // both may underflow to 0
  }
  float reached = 1.0F;
  for (std::size_t i = 0; i < position.num_levels && reached > 1e-3F; ++i) {
    const float positive = reached * responsibility[i];
    weights_[position.levels[i].bucket].observe(positive, reached - positive, kMaxObservations);
    reached -= positive;
  }
  if (position.has_several_classes && k < position.num_candidates) learn_vote_classes(position, k);
  // Weights of tokens and pairs are learned from all likely candidates, so that the right one can be chosen next time.
  for (std::size_t c = 0; c < position.num_candidates; ++c) {
    if (position.mixed[c] < kUnlikely && c != position.chosen) continue;
    const float error = (c == k ? 1.0F : 0.0F) - calibrated(position, c);
    token_weight_[hash(position.candidates[c])].ascend(error, kTokenRate);
    pair_weight_[hash(position.previous, position.candidates[c])].ascend(error, kTokenRate);
    if (c != position.chosen) continue;
    const std::size_t match_bucket = position.expert * kLengths.size() + length_bucket(position.match_length);
    slope_.ascend(error * log_odds(position.mixed[c]), kRate);
    bias_.ascend(error, kRate);
    match_weight_[match_bucket].ascend(error, kRate);
    index_weight_[position.index].ascend(error, kRate);
  }
}

// The likelihood of a token is its share of the weighted votes. The derivative of the log-likelihood with respect to
// the logarithm of a vote is the share of the class among the votes for the token, minus its share among all votes.
void Mixture::learn_vote_classes(const DraftPosition& position, std::size_t actual) {
  std::array<float, DraftPosition::kVoteClasses> for_actual{};
  std::array<float, DraftPosition::kVoteClasses> for_all{};
  float total_for_actual = 0.0F;
  float total = 0.0F;
  for (std::size_t c = 0; c < DraftPosition::kVoteClasses; ++c) {
    const float vote = vote_[c].load(std::memory_order_relaxed);
    for (const std::uint8_t votes : position.votes[c]) for_all[c] += vote * static_cast<float>(votes);
    for_actual[c] = vote * static_cast<float>(position.votes[c][actual]);
    total_for_actual += for_actual[c];
    total += for_all[c];
  }
  if (total_for_actual == 0.0F) return;
  for (std::size_t c = 0; c < DraftPosition::kVoteClasses; ++c) {
    if (for_all[c] == 0.0F) continue;
    log_vote_[c].ascend(for_actual[c] / total_for_actual - for_all[c] / total, kRate);
    update_vote(c);
  }
}

}  // namespace das

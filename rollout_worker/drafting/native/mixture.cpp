#include "mixture.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace das {

namespace {

constexpr float kPriorStrength = 2.0F;
constexpr float kMostObservations = 2000.0F;
constexpr float kRate = 0.05F;
constexpr float kTokenRate = 0.1F;
constexpr float kUnseen = 1e-3F;    // of a token that no occurrence speaks for
constexpr float kUnlikely = 0.02F;  // candidates under it are not learned from
constexpr float kShareUnit = 255.0F;
constexpr float kMostLogVote = 4.0F;
constexpr float kTaken = 256.0F;  // observations that count of another's
constexpr float kSurest = 1e-3F;  // log-odds are taken of probabilities this far from 0 and 1

float log_odds(float probability) {
  const float p = std::clamp(probability, kSurest, 1.0F - kSurest);
  return std::log(p / (1.0F - p));
}

// Longer matches first. They come as a few runs that are sorted.
void sort_by_match(std::vector<Occurrence>& occurrences) {
  for (std::size_t i = 1; i < occurrences.size(); ++i) {
    if (occurrences[i].match <= occurrences[i - 1].match) continue;
    const Occurrence one = occurrences[i];
    const auto end = occurrences.begin() + static_cast<std::ptrdiff_t>(i);
    const auto place =
        std::upper_bound(occurrences.begin(), end, one.match,
                         [](std::uint8_t match, const Occurrence& other) { return match > other.match; });
    std::move_backward(place, end, end + 1);
    *place = one;
  }
}

// For each number below `Count` the last of `lowest` that it is not under; 0 is under all and in the first class.
template <std::size_t Count, std::size_t Classes>
constexpr std::array<std::uint8_t, Count> classes(const std::array<std::uint8_t, Classes>& lowest) {
  std::array<std::uint8_t, Count> of{};
  for (std::size_t number = 0; number < Count; ++number) {
    std::size_t last = 0;
    while (last + 1 < Classes && lowest[last + 1] <= number) ++last;
    of[number] = static_cast<std::uint8_t>(last);
  }
  return of;
}

float logistic(float x) { return 1.0F / (1.0F + std::exp(-x)); }

}  // namespace

std::size_t Mixture::length_bucket(std::size_t match) {
  static constexpr auto kOf = classes<kDeepest + 1>(kLengths);
  return kOf[std::min(match, kDeepest)];
}

std::size_t Mixture::bucket(std::size_t voice, std::size_t length, std::size_t votes, float top, std::size_t place) {
  static constexpr auto kNumbers = classes<kMostOccurrences + 1>(kVotes);
  constexpr float kRounding = 1e-4F;  // of weighted votes
  const float most = top + kRounding;
  const std::size_t share = most >= 1.0F ? 3 : most >= 0.8F ? 2 : most >= 0.5F ? 1 : 0;
  const std::size_t where = place == 0 ? 0 : place < 3 ? 1 : 2;
  return (((voice * kLengths.size() + length) * kVotes.size() + kNumbers[votes]) * kShares + share) * kPlaces + where;
}

// Before anything is known: the longer the match, the more votes and the more of one mind, the likelier.
float Mixture::prior(std::size_t bucket) {
  static constexpr auto kPriors = [] {
    constexpr std::array<float, kShares> kMeans{0.3F, 0.65F, 0.9F, 1.0F};
    std::array<float, kBuckets> of{};
    for (std::size_t i = 0; i < kBuckets; ++i) {
      const std::size_t share = i / kPlaces % kShares;
      const auto votes = static_cast<float>(kVotes[i / kPlaces / kShares % kVotes.size()]);
      const auto length = static_cast<float>(kLengths[i / kPlaces / kShares / kVotes.size() % kLengths.size()]);
      of[i] = kMeans[share] * length / (length + 1.0F) * votes * length / (votes * length + 1.0F);
    }
    return of;
  }();
  return kPriors[bucket];
}

float Mixture::weight(std::size_t bucket) const { return weights_[bucket].mean(prior(bucket), kPriorStrength); }

Mixture::Mixture() {
  for (std::size_t c = 0; c < DraftPosition::kKinds; ++c) count_vote(c);
}

void Mixture::count_vote(std::size_t kind) {
  const float value = std::clamp(log_vote_[kind].value(), -kMostLogVote, kMostLogVote);
  vote_[kind].store(std::exp(value), std::memory_order_relaxed);
}

std::vector<Learned> Mixture::learned() const {
  std::vector<Learned> all;
  all.reserve(kLearned);
  each(*this, [&](const auto& one) { all.push_back(one.learned()); });
  return all;
}

bool Mixture::take(std::span<const Learned> others) {
  if (others.size() != kLearned) return false;
  bool sound = true;
  std::size_t at = 0;
  each(*this, [&](const auto& one) {
    const Learned other = others[at++];
    sound = sound && std::isfinite(other.value) && std::isfinite(other.evidence) && one.sound(other);
  });
  if (!sound) return false;
  at = 0;
  each(*this, [&](auto& one) { one.take(others[at++], kTaken); });
  for (std::size_t c = 0; c < DraftPosition::kKinds; ++c) count_vote(c);
  return true;
}

std::uint8_t Mixture::kind(const Occurrence& one, Standpoint standpoint) {
  if (one.source != Source::history && one.source != Source::foreign) return 0;
  const std::int64_t age = standpoint.age(one.generation);
  std::size_t old = 0;
  for (const std::int64_t oldest : kAges) old += age > oldest ? 1 : 0;
  const std::size_t reward = std::isnan(one.reward) || one.source == Source::foreign ? 0
                             : one.reward < standpoint.reward                        ? 1
                                                                                     : 2;
  return static_cast<std::uint8_t>(old * kRewards + reward);
}

void Mixture::mix(std::span<const Occurrence> occurrences, std::size_t since, DraftPosition& position,
                  std::span<std::uint8_t> voted) const {
  constexpr std::size_t kCandidates = DraftPosition::kCandidates;
  std::array<std::array<float, kCandidates>, kVoices> of{};
  std::array<float, kVoices> all{};
  std::array<std::uint8_t, kVoices> votes{};
  std::array<std::array<float, kCandidates>, kVoices> said{};
  std::array<std::array<std::int64_t, kCandidates>, kVoices> newest{};
  std::array<std::uint32_t, kCandidates> raw;
  std::array<const Token*, kCandidates> dictionary;
  if (position.several_kinds) position.votes = {};
  position.match = static_cast<std::uint8_t>(std::min(occurrences.front().match + since, kDeepest));
  float left = 1.0F;
  for (std::size_t i = 0; i < occurrences.size();) {
    const std::size_t length = length_bucket(occurrences[i].match + since);
    std::array<bool, kVoices> changed{};
    for (; i < occurrences.size() && length_bucket(occurrences[i].match + since) == length; ++i) {
      const Occurrence& one = occurrences[i];
      const std::size_t voice = one.voice();
      const float vote = vote_[one.kind].load(std::memory_order_relaxed);
      // Most say the same and are from the same text, so that dictionaries are seldom looked into.
      const std::uint32_t value = one.text.raw(since);
      std::size_t k = 0;
      while (k < position.candidates && (raw[k] != value || dictionary[k] != one.text.dictionary())) ++k;
      if (k == position.candidates) {
        const Token token = one.text.token(value);
        k = 0;
        while (k < position.candidates && position.candidate[k] != token) ++k;
        if (k == position.candidates && k < kCandidates) {
          position.candidate[k] = token;
          raw[k] = value;
          dictionary[k] = one.text.dictionary();
          ++position.candidates;
        }
      }
      voted[i] = static_cast<std::uint8_t>(k);
      if (k < kCandidates) {
        newest[voice][k] = of[voice][k] == 0.0F ? one.generation : std::max(newest[voice][k], one.generation);
        of[voice][k] += vote;
        if (position.several_kinds && one.source == Source::history) ++position.votes[one.kind][k];
      }
      all[voice] += vote;
      ++votes[voice];
      changed[voice] = true;
    }
    for (std::size_t s = 0; s < kVoices && position.levels < DraftPosition::kLevels; ++s) {
      if (!changed[s]) continue;
      const float top = *std::max_element(of[s].begin(), of[s].end());
      const std::size_t place = bucket(s, length, votes[s], top / all[s], position.place);
      DraftPosition::Level& level = position.level[position.levels++];
      level.bucket = static_cast<std::uint16_t>(place);
      const float share = weight(place);
      for (std::size_t k = 0; k < position.candidates; ++k) {
        const float part = of[s][k] / all[s];
        level.share[k] = static_cast<std::uint8_t>(kShareUnit * part + 0.5F);
        said[s][k] += left * share * part;
      }
      for (std::size_t k = position.candidates; k < kCandidates; ++k) level.share[k] = 0;
      left *= 1.0F - share;
    }
  }
  float best = -std::numeric_limits<float>::infinity();
  for (std::size_t k = 0; k < position.candidates; ++k) {
    float sum = 0.0F;
    std::size_t most = 0;
    for (std::size_t s = 0; s < kVoices; ++s) {
      sum += said[s][k];
      if (said[s][k] > said[most][k]) most = s;
    }
    position.mixed[k] = position.candidate[k] == kStart ? 0.0F : sum;
    if (position.mixed[k] == 0.0F) continue;
    const float score = preference(position, k);
    if (score < best || (score == best && newest[most][k] <= position.generation)) continue;
    best = score;
    position.favourite = static_cast<std::uint8_t>(k);
    position.token = position.candidate[k];
    position.voice = static_cast<std::uint8_t>(most);
    position.generation = newest[most][k];
  }
}

float Mixture::preference(const DraftPosition& position, std::size_t k) const {
  const Token token = position.candidate[k];
  return slope_.value() * log_odds(position.mixed[k]) + of_token_[hash(token)].value() +
         of_pair_[hash(position.previous, token)].value();
}

float Mixture::calibrated(const DraftPosition& position, std::size_t k) const {
  const std::size_t match = position.voice * kLengths.size() + length_bucket(position.match);
  return logistic(preference(position, k) + bias_.value() + of_match_[match].value() +
                  of_place_[position.place].value());
}

std::size_t Mixture::draft(std::vector<Occurrence>& occurrences, Token last, Standpoint standpoint,
                           std::span<const Token> ends, std::size_t budget, double min_survival,
                           std::pmr::vector<DraftPosition>& draft) const {
  draft.clear();
  draft.reserve(std::min(budget, kLongestDraft));
  std::uint16_t kinds = 0;
  for (Occurrence& one : occurrences) {
    one.kind = kind(one, standpoint);
    if (one.source != Source::history) continue;
    kinds |= static_cast<std::uint16_t>(1U << one.kind);
    one.age = AgeCounts::bit(standpoint.age(one.generation));
  }
  const bool several_kinds = std::popcount(kinds) > 1;
  sort_by_match(occurrences);
  std::array<std::uint8_t, kMostOccurrences> voted;
  double survival = 1.0;
  for (std::size_t place = 0; place < budget && !occurrences.empty(); ++place) {
    DraftPosition& position = draft.emplace_back();
    position.place = static_cast<std::uint8_t>(std::min(place, kLongestDraft - 1));
    position.several_kinds = several_kinds;
    position.previous = place == 0 ? last : draft[place - 1].token;
    mix(occurrences, place, position, voted);
    if (position.token == kStart) {
      draft.pop_back();
      break;
    }
    position.probability = calibrated(position, position.favourite);
    survival *= position.probability;
    if (survival < min_survival) return place;
    std::size_t left = 0;
    for (std::size_t i = 0; i < occurrences.size(); ++i) {
      if (voted[i] != position.favourite) continue;
      position.ages |= occurrences[i].age;
      if (left < i) occurrences[left] = occurrences[i];
      ++left;
    }
    occurrences.erase(occurrences.begin() + static_cast<std::ptrdiff_t>(left), occurrences.end());
    if (std::find(ends.begin(), ends.end(), position.token) != ends.end()) break;
  }
  return draft.size();
}

void Mixture::learn(const DraftPosition& position, Token actual) {
  const auto* const end = position.candidate.begin() + position.candidates;
  const auto k =
      static_cast<std::size_t>(std::find(position.candidate.begin(), end, actual) - position.candidate.begin());
  // Expectation: which level spoke. From the shortest match up, how likely each level's chain makes the token; from
  // the longest down, with what probability the word came to a level.
  std::array<float, DraftPosition::kLevels> spoke;
  float below = kUnseen;
  for (std::size_t i = position.levels; i-- > 0;) {
    const DraftPosition::Level& level = position.level[i];
    const float share = weight(level.bucket);
    const float here = k < position.candidates ? share * static_cast<float>(level.share[k]) / kShareUnit : 0.0F;
    below = here + (1.0F - share) * below;
    spoke[i] = here > 0.0F ? here / below : 0.0F;  // both may be too small for a float
  }
  float reached = 1.0F;
  for (std::size_t i = 0; i < position.levels && reached > 1e-3F; ++i) {
    const float yes = reached * spoke[i];
    weights_[position.level[i].bucket].observe(yes, reached - yes, kMostObservations);
    reached -= yes;
  }
  if (position.several_kinds && k < position.candidates) learn_kinds(position, k);
  // What tokens and pairs are worth is learned from all candidates, that the right one may be preferred another time.
  for (std::size_t c = 0; c < position.candidates; ++c) {
    if (position.mixed[c] < kUnlikely && c != position.favourite) continue;
    const float wrong = (c == k ? 1.0F : 0.0F) - calibrated(position, c);
    of_token_[hash(position.candidate[c])].ascend(wrong, kTokenRate);
    of_pair_[hash(position.previous, position.candidate[c])].ascend(wrong, kTokenRate);
    if (c != position.favourite) continue;
    const std::size_t match = position.voice * kLengths.size() + length_bucket(position.match);
    slope_.ascend(wrong * log_odds(position.mixed[c]), kRate);
    bias_.ascend(wrong, kRate);
    of_match_[match].ascend(wrong, kRate);
    of_place_[position.place].ascend(wrong, kRate);
  }
}

// The likelihood of a token is the share of the votes for it; of a vote's logarithm its derivative is the share of the
// kind among the votes for the token, less its share among all votes.
void Mixture::learn_kinds(const DraftPosition& position, std::size_t actual) {
  std::array<float, DraftPosition::kKinds> right{};
  std::array<float, DraftPosition::kKinds> each{};
  float all_right = 0.0F;
  float all = 0.0F;
  for (std::size_t c = 0; c < DraftPosition::kKinds; ++c) {
    const float vote = vote_[c].load(std::memory_order_relaxed);
    for (const std::uint8_t votes : position.votes[c]) each[c] += vote * static_cast<float>(votes);
    right[c] = vote * static_cast<float>(position.votes[c][actual]);
    all_right += right[c];
    all += each[c];
  }
  if (all_right == 0.0F) return;
  for (std::size_t c = 0; c < DraftPosition::kKinds; ++c) {
    if (each[c] == 0.0F) continue;
    log_vote_[c].ascend(right[c] / all_right - each[c] / all, kRate);
    count_vote(c);
  }
}

}  // namespace das

// Numbers that are learned while others read them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace das {

// What was learned of one number, for another that goes on from it. Of a share: observations that said yes, and all of
// them; of a weight: its value, and the sum of its squared gradients.
struct Learned {
  float value;
  float evidence;
};

// A share, as the mean of a beta distribution whose evidence fades.
class LearnedShare {
 public:
  Learned learned() const {
    const float yes = yes_.load(std::memory_order_relaxed);
    return {yes, yes + no_.load(std::memory_order_relaxed)};
  }

  static bool sound(Learned other) { return other.value >= 0.0F && other.value <= other.evidence; }

  // Goes on from what another learned, as if it had seen `most` observations at most.
  void take(Learned other, float most) {
    const float kept = other.evidence > most ? most / other.evidence : 1.0F;
    yes_.store(kept * other.value, std::memory_order_relaxed);
    no_.store(kept * (other.evidence - other.value), std::memory_order_relaxed);
  }

  // With a prior that counts as `strength` observations.
  float mean(float prior, float strength) const {
    const float yes = yes_.load(std::memory_order_relaxed);
    const float no = no_.load(std::memory_order_relaxed);
    return (yes + strength * prior) / (yes + no + strength);
  }

  // Adds evidence; what is beyond `most` observations fades. Two that learn at once may lose one observation.
  void observe(float yes, float no, float most) {
    const float before_yes = yes_.load(std::memory_order_relaxed);
    const float before_no = no_.load(std::memory_order_relaxed);
    const float total = before_yes + before_no;
    const float fade = total > most ? most / total : 1.0F;
    yes_.store(fade * before_yes + yes, std::memory_order_relaxed);
    no_.store(fade * before_no + no, std::memory_order_relaxed);
  }

 private:
  std::atomic<float> yes_{0.0F};
  std::atomic<float> no_{0.0F};
};

// A coefficient under stochastic gradient ascent with AdaGrad's step sizes (Duchi et al. 2011).
class LearnedWeight {
 public:
  explicit LearnedWeight(float value = 0.0F) : value_(value) {}

  Learned learned() const { return {value(), squares_.load(std::memory_order_relaxed)}; }

  static bool sound(Learned other) { return std::abs(other.value) < kLargest && other.evidence > 0.0F; }

  // Goes on from what another learned, as if it had seen `most` observations at most.
  void take(Learned other, float most) {
    value_.store(other.value, std::memory_order_relaxed);
    squares_.store(std::min(other.evidence, kUsualSquare * most), std::memory_order_relaxed);
  }

  float value() const { return value_.load(std::memory_order_relaxed); }

  void ascend(float gradient, float rate) {
    const float squares = squares_.load(std::memory_order_relaxed) + gradient * gradient;
    squares_.store(squares, std::memory_order_relaxed);
    value_.store(value() + rate * gradient / std::sqrt(squares), std::memory_order_relaxed);
  }

 private:
  static constexpr float kLargest = 100.0F;    // of a log-odds nothing is left to learn long before
  static constexpr float kUsualSquare = 0.1F;  // of a gradient: p (1 - p) where a token is accepted with p = 0.9 or so

  std::atomic<float> value_;
  std::atomic<float> squares_{1e-2F};
};

// How many tokens that history of each age spoke for were accepted, and how many were refused. A token counts as one,
// in equal parts for each age at which some rollout says it.
class AgeCounts {
 public:
  static constexpr std::size_t kAges = 64;  // in generations; the last stands for all that are older

  struct Counts {
    double drafted;
    double accepted;
  };

  // What stands for an age, 0 or more, in a set of ages.
  static std::uint64_t bit(std::int64_t age) {
    return std::uint64_t{1} << std::min<std::int64_t>(age, static_cast<std::int64_t>(kAges) - 1);
  }

  // One addition for each of `ages`, of which there is one at least. What is drafted is not kept on its own, so that
  // whoever reads meanwhile never finds more tokens accepted than drafted.
  void observe(std::uint64_t ages, bool accepted) {
    auto& counts = accepted ? accepted_ : refused_;
    const auto parts = static_cast<std::uint64_t>(std::popcount(ages));
    // The youngest takes what cannot be divided, so that all parts together are one token.
    for (std::uint64_t rest = kToken % parts; ages != 0; ages &= ages - 1, rest = 0) {
      counts[static_cast<std::size_t>(std::countr_zero(ages))].fetch_add(kToken / parts + rest,
                                                                         std::memory_order_relaxed);
    }
  }

  Counts of(std::size_t age) const {
    const std::uint64_t accepted = accepted_[age].load(std::memory_order_relaxed);
    const std::uint64_t refused = refused_[age].load(std::memory_order_relaxed);
    return {static_cast<double>(accepted + refused) / kToken, static_cast<double>(accepted) / kToken};
  }

 private:
  static constexpr std::uint64_t kToken = 720720;  // the least that 1 to 16 divide: their parts are equal

  std::array<std::atomic<std::uint64_t>, kAges> accepted_{};
  std::array<std::atomic<std::uint64_t>, kAges> refused_{};
};

}  // namespace das

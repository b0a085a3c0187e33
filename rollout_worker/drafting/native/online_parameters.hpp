// Model parameters that are learned online while other threads read them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>

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

}  // namespace das

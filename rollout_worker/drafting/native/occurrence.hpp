// Places where the end of a running rollout's text stood before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "text.hpp"

namespace das {

// Where an occurrence was found.
enum class Source : std::uint8_t { history = 0, self = 1, siblings = 2, foreign = 3 };
inline constexpr std::size_t kSources = 4;

// Text that goes on from an occurrence.
class Continuation {
 public:
  Continuation() = default;
  // `length` tokens.
  Continuation(const Token* next, std::size_t length) : next_(next), length_(static_cast<std::uint32_t>(length)) {}
  // Places of tokens in a dictionary, with that of kStart behind them.
  Continuation(const std::uint16_t* next, const Token* dictionary)
      : next_(next), dictionary_(dictionary), narrow_(true) {}
  Continuation(const std::uint32_t* next, const Token* dictionary) : next_(next), dictionary_(dictionary) {}

  // What stands for a token: the same for the same token where dictionaries are the same. kStart's at the end, beyond
  // which nothing may be asked for.
  std::uint32_t raw(std::size_t i) const {
    if (narrow_) return static_cast<const std::uint16_t*>(next_)[i];
    return i < length_ ? static_cast<const std::uint32_t*>(next_)[i] : kStart;
  }
  const Token* dictionary() const { return dictionary_; }
  const void* place() const { return next_; }
  Token token(std::uint32_t raw) const { return dictionary_ == nullptr ? raw : dictionary_[raw]; }
  Token at(std::size_t i) const { return token(raw(i)); }

 private:
  const void* next_ = nullptr;
  const Token* dictionary_ = nullptr;
  std::uint32_t length_ = ~std::uint32_t{0};
  bool narrow_ = false;
};

inline constexpr float kNoReward = std::numeric_limits<float>::quiet_NaN();

struct Occurrence {
  Continuation text;
  std::int64_t generation;  // of the weights that wrote it
  float reward;             // of the rollout, kNoReward if nobody has told it
  std::uint8_t match;       // how many tokens before it are the same, at most the depth of comparison
  Source source;
  bool anchored = false;  // the request has gone along with this rollout of the history lately
  std::uint8_t kind = 0;  // of its vote, set by who counts it, as the next
  std::uint64_t age = 0;  // the bit of its age, of history only

  // Who speaks in a mixture: a source, or the rollouts that a request goes along with.
  std::size_t voice() const { return anchored ? kSources : static_cast<std::size_t>(source); }
};

inline constexpr std::size_t kVoices = kSources + 1;

}  // namespace das

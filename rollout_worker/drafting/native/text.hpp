// Token ids, comparison of texts from their ends, and occurrences of the end of a running rollout in other texts.
//
// A position p of a text lies before the token text[p]. Its context is the text before it, newest token first:
// text[p - 1], text[p - 2], ... The eight bytes that end at p hold the newest tokens of the context, with the newest in
// the most significant bits (on little-endian machines, which are all that vLLM supports), so that contexts can be
// compared as numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace das {

static_assert(std::endian::native == std::endian::little);

using Token = std::uint32_t;

// A sentinel before the first token and after the last token of a document. It is larger than every token id.
inline constexpr Token kBoundary = 0xFFFFFFFFu;

// The largest number of context tokens that can be compared; match lengths fit into a byte.
inline constexpr std::size_t kMaxDepth = 255;

template <class Id>
struct Words {
  static constexpr std::size_t kTokens = sizeof(std::uint64_t) / sizeof(Id);

  // Returns the kTokens tokens before `end` as one word.
  static std::uint64_t before(const Id* end) {
    std::uint64_t word = 0;
    std::memcpy(&word, end - kTokens, sizeof word);
    return word;
  }

  // Returns the number of newest tokens that two words share.
  static std::size_t common(std::uint64_t a, std::uint64_t b) {
    return static_cast<std::size_t>(std::countl_zero(a ^ b)) / (8 * sizeof(Id));
  }
};

// The kind of text that contains an occurrence.
enum class Source : std::uint8_t { history = 0, self = 1, siblings = 2, cross_problem = 3 };
inline constexpr std::size_t kSources = 4;

// The text that follows an occurrence. It is stored either as token ids or as 16-bit or 32-bit indices into a
// dictionary.
class Continuation {
 public:
  Continuation() = default;
  // `length` token ids.
  Continuation(const Token* next, std::size_t length) : next_(next), length_(static_cast<std::uint32_t>(length)) {}
  // Dictionary indices, terminated by the index of kBoundary.
  Continuation(const std::uint16_t* next, const Token* dictionary)
      : next_(next), dictionary_(dictionary), is_16_bit_(true) {}
  Continuation(const std::uint32_t* next, const Token* dictionary) : next_(next), dictionary_(dictionary) {}

  // Returns the stored code of a token. Codes from the same dictionary are equal if and only if the tokens are equal.
  // The code at the end is that of kBoundary; nothing beyond it may be read.
  std::uint32_t code(std::size_t i) const {
    if (is_16_bit_) return static_cast<const std::uint16_t*>(next_)[i];
    return i < length_ ? static_cast<const std::uint32_t*>(next_)[i] : kBoundary;
  }
  const Token* dictionary() const { return dictionary_; }
  const void* address() const { return next_; }
  Token token(std::uint32_t code) const { return dictionary_ == nullptr ? code : dictionary_[code]; }
  Token at(std::size_t i) const { return token(code(i)); }

 private:
  const void* next_ = nullptr;
  const Token* dictionary_ = nullptr;
  std::uint32_t length_ = ~std::uint32_t{0};
  bool is_16_bit_ = false;
};

inline constexpr float kNoReward = std::numeric_limits<float>::quiet_NaN();

struct Occurrence {
  Continuation text;
  std::int64_t generation;  // of the weights that sampled the text
  float reward;             // of the rollout; kNoReward if it is unknown
  std::uint8_t match;       // number of equal tokens before the occurrence, at most the depth of the index
  Source source;
  bool anchored = false;        // whether the request has recently followed this rollout of the history
  std::uint8_t vote_class = 0;  // set by Mixture::draft

  // Whether the text ends before the token at `offset`, but goes on: it is that of a running rollout, or its prompt.
  bool is_unknown(std::size_t offset) const {
    return (source == Source::self || source == Source::siblings) && text.at(offset) == kBoundary;
  }

  // The expert of the mixture that this occurrence belongs to: its source, or the anchored rollouts.
  std::size_t expert() const { return anchored ? kSources : static_cast<std::size_t>(source); }
};

inline constexpr std::size_t kExperts = kSources + 1;

}  // namespace das

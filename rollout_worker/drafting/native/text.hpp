// Token ids, and comparison of texts from their ends.
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

}  // namespace das

// Token ids, and text seen from its end.
//
// A position p of a text stands before the token text[p]. Its context is what comes before it, newest first:
// text[p - 1], text[p - 2], ... Eight bytes that end at p hold the newest tokens of the context, the newest in the most
// significant bits (on little-endian machines, as all that vLLM runs on are), so that contexts compare as numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace das {

static_assert(std::endian::native == std::endian::little);

using Token = std::uint32_t;

// Stands before the first token of a document and behind its last; larger than every token id.
inline constexpr Token kStart = 0xFFFFFFFFu;

// Contexts are compared up to here; lengths of matches fit into a byte.
inline constexpr std::size_t kDeepest = 255;

template <class Id>
struct Words {
  static constexpr std::size_t kTokens = sizeof(std::uint64_t) / sizeof(Id);

  // The kTokens tokens before `end`.
  static std::uint64_t before(const Id* end) {
    std::uint64_t word = 0;
    std::memcpy(&word, end - kTokens, sizeof word);
    return word;
  }

  // How many newest tokens two words share.
  static std::size_t common(std::uint64_t a, std::uint64_t b) {
    return static_cast<std::size_t>(std::countl_zero(a ^ b)) / (8 * sizeof(Id));
  }
};

// How many newest tokens the contexts at a and b share, at most `limit`. The first `known` are known to be the same;
// whole words are read, so that kTokens - 1 tokens more than `limit` must be readable before both.
template <class Id>
std::size_t common_context(const Id* a, const Id* b, std::size_t known, std::size_t limit) {
  for (std::size_t d = known; d < limit; d += Words<Id>::kTokens) {
    const std::uint64_t x = Words<Id>::before(a - d);
    const std::uint64_t y = Words<Id>::before(b - d);
    if (x != y) return std::min(limit, d + Words<Id>::common(x, y));
  }
  return limit;
}

}  // namespace das

// Sorting text positions by what stands to their left.
//
// Texts are stored reversed, newest token first, so that "the last L tokens before a position" is a forward run of
// memory. A position q of a reversed text stands for the context text[q], text[q + 1], ... and is followed, in
// reading order, by text[q - 1], text[q - 2], ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace das {

using Token = std::uint32_t;

// Marks the beginning of a document; larger than every token id, so that it sorts last.
inline constexpr Token kStart = 0xFFFFFFFFu;

// The length of the common beginning of a and b, at most `limit`; the first `known` tokens are known to agree.
inline std::size_t common_length(const Token* a, const Token* b, std::size_t known, std::size_t limit) {
  std::size_t i = known;
  while (i + 2 <= limit) {
    std::uint64_t x = 0;
    std::uint64_t y = 0;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    if (x != y) return a[i] == b[i] ? i + 1 : i;
    i += 2;
  }
  if (i < limit && a[i] == b[i]) ++i;
  return i;
}

// The positions of `reversed` that have a following token, sorted by their contexts, of which at most `depth` tokens
// are compared; positions with equal contexts stand in any order.
//
// `reversed` begins with kStart and every document in it ends with kStart (its START). The time is
// O(n log n log depth) whatever the text: ranks of contexts of length h give those of length 2h (Manber and Myers
// 1993; only groups that are not yet told apart are sorted again, as in Larsson and Sadakane 2007).
std::vector<std::uint32_t> order_by_context(std::span<const Token> reversed, std::size_t depth);

}  // namespace das

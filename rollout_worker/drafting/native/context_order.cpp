#include "context_order.hpp"

#include <algorithm>

namespace das {

namespace {

struct Group {
  std::uint32_t begin;
  std::uint32_t end;
};

std::uint64_t sort_key(std::uint32_t major, std::uint32_t position) {
  return (static_cast<std::uint64_t>(major) << 32) | position;
}

}  // namespace

std::vector<std::uint32_t> order_by_context(std::span<const Token> reversed, std::size_t depth) {
  std::vector<std::uint64_t> keys;
  keys.reserve(reversed.size());
  for (std::uint32_t q = 1; q < reversed.size(); ++q) {
    if (reversed[q - 1] != kStart) keys.push_back(sort_key(reversed[q], q));
  }
  std::sort(keys.begin(), keys.end());

  const auto count = static_cast<std::uint32_t>(keys.size());
  std::vector<std::uint32_t> order(count);
  // rank[q]: where the group of q begins in `order`. A group holds the positions whose contexts agree so far.
  std::vector<std::uint32_t> rank(reversed.size());
  // ended[r]: the contexts of the group that begins at r reach their START: nothing will tell them apart.
  std::vector<std::uint8_t> ended(count, 0);
  std::vector<Group> open;
  for (std::uint32_t begin = 0; begin < count;) {
    std::uint32_t end = begin;
    const auto token = static_cast<Token>(keys[begin] >> 32);
    for (; end < count && static_cast<Token>(keys[end] >> 32) == token; ++end) {
      const auto q = static_cast<std::uint32_t>(keys[end]);
      order[end] = q;
      rank[q] = begin;
    }
    if (token == kStart) {
      ended[begin] = 1;
    } else if (end - begin > 1) {
      open.push_back({begin, end});
    }
    begin = end;
  }

  std::vector<Group> split;
  std::vector<Group> still_open;
  std::vector<Group> finished;
  for (std::size_t length = 1; length < depth && !open.empty();) {
    // No context in an open group reaches its START within `length` tokens, and step <= length, so q + step is
    // always a position of the same document.
    const auto step = static_cast<std::uint32_t>(std::min(length, depth - length));
    split.clear();
    for (const Group& group : open) {
      keys.clear();
      for (std::uint32_t i = group.begin; i < group.end; ++i) keys.push_back(sort_key(rank[order[i] + step], order[i]));
      // Repetitive text arrives sorted.
      if (!std::is_sorted(keys.begin(), keys.end())) std::sort(keys.begin(), keys.end());
      std::uint32_t begin = group.begin;
      for (std::uint32_t i = group.begin; i < group.end; ++i) {
        const std::uint64_t key = keys[i - group.begin];
        order[i] = static_cast<std::uint32_t>(key);
        if (i + 1 == group.end || (keys[i + 1 - group.begin] >> 32) != (key >> 32)) {
          split.push_back({begin, i + 1});
          begin = i + 1;
        }
      }
    }
    still_open.clear();
    finished.clear();
    for (const Group& group : split) {
      if (group.end - group.begin == 1) continue;
      (ended[rank[order[group.begin] + step]] != 0 ? finished : still_open).push_back(group);
    }
    // Only now may ranks change: until here they had to mean contexts of exactly `length` tokens.
    for (const Group& group : finished) ended[group.begin] = 1;
    for (const Group& group : split) {
      for (std::uint32_t i = group.begin; i < group.end; ++i) rank[order[i]] = group.begin;
    }
    open.swap(still_open);
    length += step;
  }
  return order;
}

}  // namespace das

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
  std::vector<Group> open;
  for (std::uint32_t begin = 0; begin < count;) {
    std::uint32_t end = begin;
    for (; end < count && (keys[end] >> 32) == (keys[begin] >> 32); ++end) {
      order[end] = static_cast<std::uint32_t>(keys[end]);
      rank[order[end]] = begin;
    }
    if (end - begin > 1) open.push_back({begin, end});
    begin = end;
  }

  std::vector<Group> split;
  for (std::size_t length = 1; length < depth && !open.empty();) {
    const std::size_t step = std::min(length, depth - length);
    split.clear();
    for (const Group& group : open) {
      keys.clear();
      for (std::uint32_t i = group.begin; i < group.end; ++i) {
        // What stands beyond a document's START may be anything: only contexts that are equal up to their START are
        // told apart by it, and those may stand in any order.
        const std::size_t beyond = order[i] + step;
        keys.push_back(sort_key(beyond < rank.size() ? rank[beyond] : 0, order[i]));
      }
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
    // Only now may ranks change: until here they had to mean contexts of exactly `length` tokens.
    open.clear();
    for (const Group& group : split) {
      for (std::uint32_t i = group.begin; i < group.end; ++i) rank[order[i]] = group.begin;
      if (group.end - group.begin > 1) open.push_back(group);
    }
    length += step;
  }
  return order;
}

}  // namespace das

// Sorting of text positions by their contexts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "text.hpp"

namespace das {

// Sorts runs of positions that share their newest token, and computes how many tokens neighbors have in common.
//
// This is multikey quicksort (Bentley and Sedgewick 1997) on words of several tokens, which are stored beside the
// positions while these are moved (as in Ng and Kakehi 2007). A pass over positions that are still equal moves nothing,
// so that repetitive text costs at most depth / kTokens passes.
template <class Id, class Pos>
class ContextSort {
 public:
  // Compares at most `depth` tokens. Words<Id>::kTokens more must be readable before every position.
  ContextSort(const Id* text, std::size_t depth, Pos* order, std::uint8_t* common)
      : text_(text), depth_(depth), order_(order), common_(common) {}

  // Sorts order[begin, end), whose positions share their newest token. Where contexts are equal, later positions come
  // first. For begin < i < end, sets common[i] to the number of tokens that order[i - 1] and order[i] share.
  void sort(std::size_t begin, std::size_t end) {
    const std::size_t count = end - begin;
    if (count < 2) return;
    if (count == 2) return sort_two(begin, 1);
    if (items_.size() < count) items_.resize(count);
    for (std::size_t i = 0; i < count; ++i) items_[i].position = order_[begin + i];
    sort_group(items_.data(), count, begin, 1);
  }

 private:
  static constexpr std::size_t kTokens = Words<Id>::kTokens;
  static constexpr std::size_t kInsertionSort = 24;  // the largest group sorted by insertion

  struct Item {
    std::uint64_t word;
    Pos position;
  };

  std::uint64_t word(Pos position, std::size_t known) const {
    const std::uint64_t whole = Words<Id>::before(text_ + position - known);
    if (known + kTokens <= depth_) [[likely]]
      return whole;
    const std::size_t excess = 8 * sizeof(Id) * (known + kTokens - depth_);
    return whole >> excess << excess;
  }

  void set_common(std::size_t index, std::size_t known, std::uint64_t a, std::uint64_t b) {
    common_[index] = static_cast<std::uint8_t>(known + Words<Id>::common(a, b));
  }

  void sort_two(std::size_t begin, std::size_t known) {
    Pos& a = order_[begin];
    Pos& b = order_[begin + 1];
    for (; known < depth_; known += kTokens) {
      const std::uint64_t x = word(a, known);
      const std::uint64_t y = word(b, known);
      if (x == y) continue;
      if (x > y) std::swap(a, b);
      return set_common(begin + 1, known, x, y);
    }
    if (a < b) std::swap(a, b);
    common_[begin + 1] = static_cast<std::uint8_t>(depth_);
  }

  // Sorts items with valid positions that share `known` tokens.
  void sort_group(Item* items, std::size_t count, std::size_t begin, std::size_t known) {
    if (count == 1) {
      order_[begin] = items[0].position;
      return;
    }
    if (count == 2) {
      order_[begin] = items[0].position;
      order_[begin + 1] = items[1].position;
      return sort_two(begin, known);
    }
    for (; known < depth_; known += kTokens) {
      std::uint64_t differences = 0;
      for (std::size_t i = 0; i < count; ++i) {
        items[i].word = word(items[i].position, known);
        differences |= items[i].word ^ items[0].word;
      }
      if (differences != 0) return split(items, count, begin, known, 2 * std::bit_width(count));
    }
    bool sorted = true;
    for (std::size_t i = 0; i < count; ++i) {
      order_[begin + i] = items[i].position;
      if (i == 0) continue;
      sorted &= items[i - 1].position > items[i].position;
      common_[begin + i] = static_cast<std::uint8_t>(depth_);
    }
    if (!sorted) std::sort(order_ + begin, order_ + begin + count, std::greater<>());
  }

  // Sorts items with valid words. After `rounds` levels of partitioning, the words are sorted as a whole (as in
  // introsort).
  void split(Item* items, std::size_t count, std::size_t begin, std::size_t known, int rounds) {
    if (count <= kInsertionSort) {
      for (std::size_t i = 1; i < count; ++i) {
        const Item item = items[i];
        std::size_t j = i;
        for (; j > 0 && items[j - 1].word > item.word; --j) items[j] = items[j - 1];
        items[j] = item;
      }
      return sort_runs(items, count, begin, known);
    }
    if (rounds == 0) {
      std::sort(items, items + count, [](const Item& a, const Item& b) { return a.word < b.word; });
      return sort_runs(items, count, begin, known);
    }
    const std::uint64_t pivot = median(items[0].word, items[count / 2].word, items[count - 1].word);
    std::size_t equal = 0;
    std::size_t greater = count;
    std::uint64_t below = 0;
    std::uint64_t above = ~std::uint64_t{0};
    for (std::size_t i = 0; i < greater;) {
      if (items[i].word < pivot) {
        below = std::max(below, items[i].word);
        std::swap(items[equal++], items[i++]);
      } else if (items[i].word > pivot) {
        above = std::min(above, items[i].word);
        std::swap(items[i], items[--greater]);
      } else {
        ++i;
      }
    }
    if (equal > 0) set_common(begin + equal, known, below, pivot);
    if (greater < count) set_common(begin + greater, known, pivot, above);
    if (equal > 0) split(items, equal, begin, known, rounds - 1);
    sort_group(items + equal, greater - equal, begin + equal, known + kTokens);
    if (greater < count) split(items + greater, count - greater, begin + greater, known, rounds - 1);
  }

  // Sorts each run of items with equal words; the items are sorted by their words.
  void sort_runs(Item* items, std::size_t count, std::size_t begin, std::size_t known) {
    for (std::size_t i = 0; i < count;) {
      std::size_t j = i + 1;
      while (j < count && items[j].word == items[i].word) ++j;
      if (j < count) set_common(begin + j, known, items[i].word, items[j].word);
      sort_group(items + i, j - i, begin + i, known + kTokens);
      i = j;
    }
  }

  static std::uint64_t median(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
    return std::max(std::min(a, b), std::min(std::max(a, b), c));
  }

  const Id* text_;
  std::size_t depth_;
  Pos* order_;
  std::uint8_t* common_;
  std::vector<Item> items_;
};

}  // namespace das

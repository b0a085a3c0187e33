// Text that grows while others look for matches in it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "occurrence.hpp"
#include "text.hpp"

namespace das {

// The texts of rollouts that are being made, with every position in chains of those whose newest tokens are the same,
// the latest first. Appending is constant work. One thread may write at a time; any number may read meanwhile, without
// locks: nothing that was published moves or changes, tables that are full stay and larger ones follow.
class LiveText {
 public:
  // So many newest tokens make the chains; a shorter match is not found.
  static constexpr std::array<std::size_t, 3> kOrders{2, 4, 8};
  using Text = std::uint32_t;
  static constexpr Text kNoText = 0xFFFFFFFFu;

  explicit LiveText(std::pmr::memory_resource* memory);
  ~LiveText();
  LiveText(const LiveText&) = delete;
  LiveText& operator=(const LiveText&) = delete;

  // Begins a text, with a context that is matched and never drafted.
  Text begin(std::span<const Token> context);
  void append(Text text, std::span<const Token> tokens);

  // Appended to all texts.
  std::size_t tokens() const { return tokens_.load(std::memory_order_relaxed); }

  // Appends occurrences of the end of `context` (in reading order), longer matches first as far as a bounded search
  // tells: at most `own` in the text `mine`, and `others` elsewhere.
  void find_longest(std::span<const Token> context, std::size_t depth, Text mine, std::size_t own, std::size_t others,
                    std::vector<Occurrence>& found) const;

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  static constexpr std::size_t kCacheLine = 64;
  static constexpr std::size_t kFirstBuffer = 64;
  static constexpr std::size_t kFirstTable = 256;
  static constexpr std::size_t kMaxTables = 24;  // each twice as large as the one before: 4 * 10^9 tokens
  static constexpr std::size_t kWalk = 48;       // how many of a chain are looked at

  struct Entry {
    Text text;
    std::uint32_t position;
    std::array<std::uint32_t, kOrders.size()> previous;
  };

  struct Table {
    std::size_t capacity;
    Entry* entries;
    std::atomic<std::uint32_t>* heads;  // kOrders.size() times `capacity`
  };

  struct Body {
    std::atomic<Token*> tokens{nullptr};
    std::atomic<std::uint32_t> length{0};
    std::size_t buffers = 0;          // of the writer, as the next
    std::array<Token*, 27> buffer{};  // each twice as large as the one before; the last one is `tokens`
  };

  Body& body(Text text) const;
  void push(Body& body, Token token);
  void enter(Text text, const Body& body, std::uint32_t position);
  Table& writable();
  // Of the tokens before `end`, for each order that is at most `length`.
  using Hashes = std::array<std::uint64_t, kOrders.size()>;
  static Hashes hash(const Token* end, std::size_t length);

  std::pmr::memory_resource* memory_;
  std::array<Table, kMaxTables> tables_{};
  std::atomic<std::size_t> table_count_{0};
  // Bodies in blocks of doubling size, so that none moves.
  std::array<std::atomic<Body*>, 32> blocks_{};
  // What changes with each token, apart from what readers need for each match: they run on other cores.
  alignas(kCacheLine) std::atomic<std::size_t> tokens_{0};
  std::uint32_t used_ = 0;  // of the last table
  std::uint32_t texts_ = 0;
};

}  // namespace das

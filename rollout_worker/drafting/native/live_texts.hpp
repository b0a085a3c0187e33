// The texts of running rollouts, which can be searched while they grow.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "text.hpp"

namespace das {

// A set of growing texts. Every position is linked into chains of positions that are preceded by the same tokens,
// latest first. Appending a token takes constant time. One thread may write at a time, while any number of threads read
// without locks: published data never moves or changes, and a full table is kept and followed by a larger one.
class LiveTexts {
 public:
  // The numbers of newest tokens that are hashed into chains. Matches shorter than the first are not found.
  static constexpr std::array<std::size_t, 3> kOrders{2, 4, 8};
  using TextId = std::uint32_t;
  static constexpr TextId kNoText = 0xFFFFFFFFu;

  explicit LiveTexts(std::pmr::memory_resource* memory);
  ~LiveTexts();
  LiveTexts(const LiveTexts&) = delete;
  LiveTexts& operator=(const LiveTexts&) = delete;

  // Starts a text with a context, which is matched but never drafted.
  TextId begin(std::span<const Token> context);
  void append(TextId text, std::span<const Token> tokens);

  // Returns the number of tokens appended to all texts.
  std::size_t tokens() const { return tokens_.load(std::memory_order_relaxed); }

  // Appends occurrences of the end of `context` (in reading order) to `found`: at most `max_own` of them in the text
  // `own`, and at most `max_others` in other texts. The search is bounded; it prefers longer matches, and of equally
  // long ones those that are followed by more tokens.
  void find_longest(std::span<const Token> context, std::size_t depth, TextId own, std::size_t max_own,
                    std::size_t max_others, std::vector<Occurrence>& found) const;

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  static constexpr std::size_t kCacheLine = 64;
  static constexpr std::size_t kFirstBuffer = 64;
  static constexpr std::size_t kFirstTable = 256;
  static constexpr std::size_t kMaxTables = 24;  // each is twice as large as the previous one: 4 * 10^9 tokens

  // Siblings that generate the same text at almost the same time provide only the next few tokens. While a chain is
  // followed, such entries cost less than others, so that the search reaches a sibling that is ahead of many.
  static constexpr std::size_t kManyFollowing = 32;  // tokens after an entry; drafts are rarely longer
  static constexpr std::size_t kMaxCost = 192;       // of following the chains of one order
  static constexpr std::size_t kFewFollowingCost = 1;
  static constexpr std::size_t kEntryCost = 4;     // of an entry that is followed by more tokens, or not wanted
  static constexpr std::size_t kMaxCompared = 64;  // the entries whose texts are compared, those with most to follow

  struct Entry {
    TextId text;
    std::uint32_t position;
    std::array<std::uint32_t, kOrders.size()> previous;
  };

  // An entry whose text is compared.
  struct Candidate {
    const Token* position;
    std::uint32_t num_before;
    std::uint32_t num_following;
    bool is_own;
    std::uint8_t match;

    // Whether this one is preferred to another one with an equally long match.
    bool is_followed_by_more(const Candidate& other) const {
      return std::min<std::size_t>(num_following, kManyFollowing) >
             std::min<std::size_t>(other.num_following, kManyFollowing);
    }
    bool is_better(const Candidate& other) const {
      return match != other.match ? match > other.match : is_followed_by_more(other);
    }
  };
  using Candidates = std::array<Candidate, kMaxCost / kFewFollowingCost>;

  struct Table {
    std::size_t capacity;
    Entry* entries;
    std::atomic<std::uint32_t>* heads;  // kOrders.size() times `capacity`
  };

  struct Body {
    std::atomic<Token*> tokens{nullptr};
    std::atomic<std::uint32_t> length{0};
    std::size_t buffer_count = 0;      // used by the writer only, like the next
    std::array<Token*, 27> buffers{};  // each is twice as large as the previous one; the last one is `tokens`
  };

  Body& body(TextId text) const;
  void push(Body& body, Token token);
  void link(TextId text, const Body& body, std::uint32_t position);
  Table& writable_table();
  // Hashes of the tokens before `end`, for each order that is at most `length`.
  using Hashes = std::array<std::uint64_t, kOrders.size()>;
  static Hashes hashes_before(const Token* end, std::size_t length);
  // Fills in the entries of the chains for order number `k` that should be compared, and returns their number. Entries
  // of the text `own`, or of other texts, are left out unless they are wanted.
  std::size_t follow_chains(std::size_t k, std::uint64_t hash, TextId own, bool wants_own, bool wants_others,
                            Candidates& candidates) const;

  std::pmr::memory_resource* memory_;
  std::array<Table, kMaxTables> tables_{};
  std::atomic<std::size_t> table_count_{0};
  // Bodies are allocated in blocks of doubling size, so that they never move.
  std::array<std::atomic<Body*>, 32> blocks_{};
  // These change with every token. They have a cache line of their own, because readers on other cores need the rest.
  alignas(kCacheLine) std::atomic<std::size_t> tokens_{0};
  std::uint32_t used_entries_ = 0;  // in the last table
  std::uint32_t text_count_ = 0;
};

}  // namespace das

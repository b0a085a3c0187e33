// An immutable, bulk-built index over some rollouts of one problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <vector>

#include "context_order.hpp"
#include "memory.hpp"

namespace das {

// How many occurrences of a match vote on a draft: the newest.
inline constexpr std::size_t kMaxOccurrences = 64;

// One rollout's response. `sequence` counts the rollouts added to a problem and identifies a rollout within it.
struct Document {
  std::int64_t generation;
  std::uint64_t sequence;
  std::span<const Token> tokens;
  bool reversed;  // tokens run from the newest to the oldest
};

// Where a match continues: `next` is its next token, *(next - 1) the one after; kStart ends the document.
struct Occurrence {
  std::int64_t generation;
  std::uint64_t sequence;
  const Token* next;
};

// The longest match of a context in one segment, as an interval of its order.
struct Match {
  std::size_t length = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
};

class Segment {
 public:
  // Builds the segment; documents must not be empty. Throws std::length_error at 2^32 tokens.
  Segment(std::shared_ptr<ByteCounter> counter, std::vector<Document> documents, std::size_t depth);

  // A copy without the documents for which `dropped` (by sequence, sorted) says so, in linear time.
  Segment(std::shared_ptr<ByteCounter> counter, const Segment& source, std::span<const std::uint64_t> dropped);

  std::size_t tokens() const { return order_.size(); }
  std::size_t documents() const { return documents_.size(); }
  bool contains_any(std::span<const std::uint64_t> sequences) const;

  // Appends views of the documents held, for building another segment.
  void append_documents(std::vector<Document>& out) const;

  // The longest beginning of the reversed context that occurs, of at most context.size() <= depth tokens.
  Match longest_match(std::span<const Token> context) const;

  // Appends the newest occurrences of a match, at most kMaxOccurrences, newest first: higher generation, then higher
  // sequence, then later position.
  void append_newest(const Match& match, std::vector<Occurrence>& out) const;

 private:
  struct Entry {
    std::uint32_t begin;  // where its newest token stands in reversed_
    std::int64_t generation;
    std::uint64_t sequence;
  };

  std::size_t end_of(std::size_t document) const;  // one past its START
  void index_newest();
  std::uint32_t newest_in_blocks(std::size_t first, std::size_t last) const;
  void newest_positions(const Match& match, std::vector<std::uint32_t>& out) const;

  Charge charge_;
  // kStart, then each document reversed and followed by kStart, newest document first: the smaller a position, the
  // newer the occurrence. One more kStart ends it, so that comparing two tokens at a time stays inside.
  std::pmr::vector<Token> reversed_;
  std::pmr::vector<Entry> documents_;
  std::pmr::vector<std::uint32_t> order_;
  // Sparse table over blocks of order_: level k, entry b is the index of the block with the smallest position among
  // blocks b .. b + 2^k - 1. Absent in small segments.
  std::pmr::vector<std::uint32_t> block_minimum_;
  std::pmr::vector<std::uint32_t> newest_block_;
};

}  // namespace das

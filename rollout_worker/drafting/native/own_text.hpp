// The text of one open request, and the match of its end within itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "context_order.hpp"
#include "segment.hpp"

namespace das {

// A growing text, stored reversed: it grows towards lower addresses. Before its newest and after its oldest token
// stands kStart.
class GrowingText {
 public:
  explicit GrowingText(std::pmr::memory_resource* memory) : buffer_(memory) {}

  std::size_t size() const { return size_; }
  void reserve(std::size_t size);
  void append(Token token);

  // The context made of the first `length` tokens, newest first.
  const Token* context(std::size_t length) const { return buffer_.data() + buffer_.size() - 2 - length; }

  // Where the newest token stands, with kStart before it.
  const Token* newest() const { return context(size_); }

 private:
  void grow(std::size_t capacity);

  std::pmr::vector<Token> buffer_;
  std::size_t size_ = 0;
};

// The positions of a GrowingText that have a following token, kept sorted by their contexts in blocks of bounded
// size, so that adding one costs a binary search and a short move, without pauses for rebuilding.
//
// A position is the number of tokens before it. Contexts are compared over at most `depth` tokens.
class OwnPositions {
 public:
  OwnPositions(std::size_t depth, std::pmr::memory_resource* memory) : depth_(depth), blocks_(memory) {}

  // Indexes everything in `text` at once; nothing may have been added before.
  void build(const GrowingText& text);

  // Adds the position text.size(), whose following token is about to be appended.
  void add(const GrowingText& text);

  // The longest earlier occurrence of the end of the text: its length (0: none of at least `min_match` tokens) and
  // the latest kMaxOccurrences positions where it occurs, latest first.
  std::size_t longest_match(const GrowingText& text, std::size_t min_match, std::vector<std::uint32_t>& out) const;

 private:
  struct Block {
    using allocator_type = std::pmr::polymorphic_allocator<>;

    explicit Block(const allocator_type& allocator) : positions(allocator) {}
    Block(Block&& other, const allocator_type& allocator)
        : latest(other.latest), positions(std::move(other.positions), allocator) {}
    Block(Block&&) = default;
    Block& operator=(Block&&) = default;

    std::uint32_t latest = 0;
    std::pmr::vector<std::uint32_t> positions;
  };

  struct Place {
    std::size_t block;
    std::size_t offset;
  };

  // The first place whose context is not smaller (`after` false) or is greater (`after` true) than the first `length`
  // tokens of the context sought. Both are the end of the last block if there is none.
  Place search(const GrowingText& text, const Token* context, std::size_t length, bool after) const;

  std::size_t depth_;
  std::pmr::vector<Block> blocks_;
};

}  // namespace das

// An immutable, bulk-built index over some rollouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "memory.hpp"
#include "occurrence.hpp"
#include "text.hpp"

namespace das {

// One rollout's text.
struct Document {
  std::int64_t generation = 0;
  std::uint64_t number = 0;  // identifies it among all that are searched together
  std::size_t context = 0;   // so many leading tokens are matched, and never drafted
  std::span<const Token> tokens;
  float reward = kNoReward;
  std::uint32_t origin = 0;  // tells problems apart where those of several are searched together
};

// Positions of all documents sorted by their contexts, with what neighbours have in common: a suffix array of the
// reversed text with its longest common prefixes (Abouelhoda et al. 2004), cut off at a depth. Token ids are replaced
// by their places among the segment's own, so that nearly always two bytes hold one. Only what is told about a document
// later, its reward and that it is gone, changes in place.
class Segment {
 public:
  // Throws std::length_error at 2^32 tokens.
  static std::shared_ptr<const Segment> build(const std::shared_ptr<ByteCounter>& counter,
                                              std::span<const Document> documents, std::size_t depth);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  virtual ~Segment() = default;

  virtual std::size_t tokens() const = 0;           // that can be drafted
  std::uint64_t serial() const { return serial_; }  // that no other segment has, nor will have
  virtual bool contains_any(std::span<const std::uint64_t> numbers) const = 0;

  // Of the document with this number; whether there is one.
  virtual bool set_reward(std::uint64_t number, float reward) const = 0;
  // Documents of an origin that are of earlier generations (none: of any), or have these numbers, are not to be found
  // any more, and not to be built into another segment. `forgotten` is told their numbers.
  virtual void forget(std::uint32_t origin, std::optional<std::int64_t> before, std::span<const std::uint64_t> numbers,
                      std::vector<std::uint64_t>& forgotten) const = 0;

  // Appends the documents held, to be built into another segment; their text goes to `text`.
  virtual void copy_documents(std::vector<Document>& documents, std::vector<std::unique_ptr<Token[]>>& text) const = 0;

  // The same without some documents (by number, sorted), in linear time.
  virtual std::shared_ptr<const Segment> without(std::span<const std::uint64_t> numbers) const = 0;

  // Appends the `limit` occurrences with the longest matches of `context` (in reading order), at least one token long.
  virtual void find_longest(std::span<const Token> context, std::size_t limit,
                            std::vector<Occurrence>& found) const = 0;
  // The same, with none in documents of `origin`, as far as a bounded search finds others.
  virtual void find_foreign(std::span<const Token> context, std::uint32_t origin, std::size_t limit,
                            std::vector<Occurrence>& found) const = 0;

  // Where an occurrence stands, as the next takes it; none for what another segment found.
  virtual std::optional<std::size_t> position_of(const Occurrence& occurrence) const = 0;
  // The occurrence with the longest match in the document of a position, near where that is `since` tokens later; the
  // nearest of equals.
  virtual std::optional<Occurrence> find_near(std::size_t position, std::size_t since,
                                              std::span<const Token> context) const = 0;

 protected:
  Segment() : serial_(next_serial()) {}

 private:
  static std::uint64_t next_serial();
  const std::uint64_t serial_;
};

}  // namespace das

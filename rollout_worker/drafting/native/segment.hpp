// A segment: an immutable, bulk-built index over the texts of some rollouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "memory.hpp"
#include "text.hpp"

namespace das {

// The text of one rollout.
struct Document {
  std::int64_t generation = 0;
  std::uint64_t id = 0;     // unique among all documents that are searched together
  std::size_t context = 0;  // number of leading tokens that are matched but never drafted
  std::span<const Token> tokens;
  float reward = kNoReward;
  std::uint32_t problem_hash = 0;  // identifies the problem in segments that hold documents of several problems
};

// All positions of all documents, sorted by their contexts, with the lengths that neighbors have in common: a suffix
// array of the reversed text with its longest common prefixes (Abouelhoda et al. 2004), cut off at a maximum depth.
// Token ids are replaced by their indices in the segment's own dictionary, so that almost always two bytes hold one.
// Only a document's reward and whether it was removed can change after the segment was built.
class Segment {
 public:
  // Throws std::length_error at 2^32 tokens.
  static std::shared_ptr<const Segment> build(const std::shared_ptr<ByteCounter>& counter,
                                              std::span<const Document> documents, std::size_t depth);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  virtual ~Segment() = default;

  virtual std::size_t tokens() const = 0;           // without contexts
  std::uint64_t serial() const { return serial_; }  // unique in this process
  virtual bool contains_any(std::span<const std::uint64_t> ids) const = 0;

  // Sets the reward of a document; returns false if the segment does not contain it.
  virtual bool set_reward(std::uint64_t id, float reward) const = 0;
  // Removes documents of a problem from all later searches and copies: those of generations before `before` (nullopt:
  // of any generation), and those with one of `ids`. Appends the ids of the removed documents to `removed`.
  virtual void remove(std::uint32_t problem_hash, std::optional<std::int64_t> before,
                      std::span<const std::uint64_t> ids, std::vector<std::uint64_t>& removed) const = 0;

  // Appends all documents that were not removed, for building another segment. `text` owns their tokens.
  virtual void copy_documents(std::vector<Document>& documents, std::vector<std::unique_ptr<Token[]>>& text) const = 0;

  // Returns a copy of the segment without the documents with these sorted ids, in linear time.
  virtual std::shared_ptr<const Segment> without(std::span<const std::uint64_t> ids) const = 0;

  // Appends the `limit` occurrences with the longest matches of `context` (in reading order), at least `min_match`
  // tokens long.
  virtual void find_longest(std::span<const Token> context, std::size_t limit, std::size_t min_match,
                            std::vector<Occurrence>& found) const = 0;
  // Does the same, but skips documents of one problem. The search is bounded, so that it may find fewer than `limit`.
  virtual void find_cross_problem(std::span<const Token> context, std::uint32_t problem_hash, std::size_t limit,
                                  std::size_t min_match, std::vector<Occurrence>& found) const = 0;

  // Returns the position of an occurrence for find_near(), or nullopt if another segment found the occurrence.
  virtual std::optional<std::size_t> position_of(const Occurrence& occurrence) const = 0;
  // Returns the occurrence with the longest match in the document of `anchor`, among the positions close to
  // `anchor + distance`; of equally long matches, the closest one.
  virtual std::optional<Occurrence> find_near(std::size_t anchor, std::size_t distance,
                                              std::span<const Token> context) const = 0;

 protected:
  Segment() : serial_(next_serial()) {}

 private:
  static std::uint64_t next_serial();
  const std::uint64_t serial_;
};

}  // namespace das

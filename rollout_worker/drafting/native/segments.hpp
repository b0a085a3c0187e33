// Lists of segments that are searched together, and how they are merged.
#pragma once

#include <cstddef>
#include <memory>
#include <memory_resource>
#include <span>
#include <vector>

#include "memory.hpp"
#include "segment.hpp"

namespace das {

using SegmentList = std::vector<std::shared_ptr<const Segment>>;

// Neighbors in a list are merged unless the larger one is at least this many times as large as the smaller one.
inline constexpr std::size_t kSegmentGrowth = 4;

// An immutable list of segments.
struct Segments {
  explicit Segments(const std::shared_ptr<ByteCounter>& counter,
                    std::span<const std::shared_ptr<const Segment>> all = {})
      : charge(counter, sizeof(Segments)), list(all.begin(), all.end(), counter.get()) {}

  std::size_t tokens() const {
    std::size_t tokens = 0;
    for (const auto& segment : list) tokens += segment->tokens();
    return tokens;
  }

  Charge charge;
  std::pmr::vector<std::shared_ptr<const Segment>> list;
};

// Builds one segment of all documents of `segments`, in the order of their ids.
std::shared_ptr<const Segment> rebuild(const std::shared_ptr<ByteCounter>& counter,
                                       std::span<const std::shared_ptr<const Segment>> segments, std::size_t depth);

// Returns the list sorted by size, smallest segment first, as the next two functions expect it.
std::shared_ptr<const Segments> sorted_by_size(const std::shared_ptr<ByteCounter>& counter, SegmentList segments);

// Returns whether merge() would change the list.
bool should_merge(const Segments& segments);

// Merges segments of similar size, so that sizes grow geometrically.
SegmentList merge(const std::shared_ptr<ByteCounter>& counter, const Segments& segments, std::size_t depth);

}  // namespace das

// Segments that are searched together.
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

// Each merged segment is so many times as large as the next smaller one, or the two are merged.
inline constexpr std::size_t kSegmentGrowth = 4;

// At one moment; never changed after it is published.
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

}  // namespace das

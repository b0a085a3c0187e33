#include "segments.hpp"

#include <algorithm>

namespace das {

std::shared_ptr<const Segment> rebuild(const std::shared_ptr<ByteCounter>& counter,
                                       std::span<const std::shared_ptr<const Segment>> segments, std::size_t depth) {
  std::vector<Document> documents;
  std::vector<std::unique_ptr<Token[]>> text;
  for (const auto& segment : segments) segment->copy_documents(documents, text);
  // Oldest first, because a search finds later documents first where contexts are equal.
  std::sort(documents.begin(), documents.end(), [](const Document& a, const Document& b) { return a.id < b.id; });
  return Segment::build(counter, documents, depth);
}

std::shared_ptr<const Segments> sorted_by_size(const std::shared_ptr<ByteCounter>& counter, SegmentList segments) {
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a->tokens() < b->tokens(); });
  return std::make_shared<const Segments>(counter, segments);
}

bool should_merge(const Segments& segments) {
  for (std::size_t i = 1; i < segments.list.size(); ++i) {
    if (segments.list[i]->tokens() < kSegmentGrowth * segments.list[i - 1]->tokens()) return true;
  }
  return false;
}

SegmentList merge(const std::shared_ptr<ByteCounter>& counter, const Segments& segments, std::size_t depth) {
  SegmentList merged;
  SegmentList group;
  std::size_t tokens = 0;
  const auto finish_group = [&] {
    if (group.size() > 1) {
      merged.push_back(rebuild(counter, group, depth));
    } else if (!group.empty()) {
      merged.push_back(group.front());
    }
    group.clear();
    tokens = 0;
  };
  for (const auto& segment : segments.list) {
    if (tokens > 0 && segment->tokens() >= kSegmentGrowth * tokens) finish_group();
    tokens += segment->tokens();
    group.push_back(segment);
  }
  finish_group();
  return merged;
}

}  // namespace das

#include "own_text.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace das {

namespace {

constexpr std::size_t kBlockCapacity = 256;
// Blocks built in bulk leave room for what comes.
constexpr std::size_t kBlockFill = 192;

}  // namespace

void GrowingText::reserve(std::size_t size) {
  if (size + 3 > buffer_.size()) grow(size + 3);
}

void GrowingText::grow(std::size_t capacity) {
  // Three slots are not text: kStart before it, kStart after it, and one more so that comparing two tokens at a time
  // stays inside.
  std::pmr::vector<Token> larger(capacity, kStart, buffer_.get_allocator());
  if (!buffer_.empty()) std::copy(newest(), newest() + size_, larger.data() + capacity - 2 - size_);
  buffer_ = std::move(larger);
}

void GrowingText::append(Token token) {
  if (size_ + 3 >= buffer_.size()) grow(std::max<std::size_t>(64, 2 * buffer_.size()));
  ++size_;
  buffer_[buffer_.size() - 2 - size_] = token;
}

void OwnPositions::build(const GrowingText& text) {
  const std::size_t size = text.size();
  if (size == 0) return;
  // kStart, the text, kStart: position p of the text stands at size - p + 1.
  const std::vector<std::uint32_t> order =
      order_by_context(std::span<const Token>(text.newest() - 1, size + 2), depth_);
  for (const std::uint32_t q : order) {
    if (q == size + 1) continue;  // the empty context
    if (blocks_.empty() || blocks_.back().positions.size() == kBlockFill) {
      blocks_.emplace_back();
      blocks_.back().positions.reserve(kBlockCapacity);
    }
    Block& block = blocks_.back();
    const auto position = static_cast<std::uint32_t>(size - q + 1);
    block.positions.push_back(position);
    block.latest = std::max(block.latest, position);
  }
}

void OwnPositions::add(const GrowingText& text) {
  const auto position = static_cast<std::uint32_t>(text.size());
  if (position == 0) return;
  if (blocks_.empty()) {
    blocks_.emplace_back();
    blocks_.back().positions.reserve(kBlockCapacity);
    blocks_.back().positions.push_back(position);
    blocks_.back().latest = position;
    return;
  }
  const Place place = search(text, text.newest(), std::min(depth_, text.size()), false);
  Block& block = blocks_[place.block];
  block.positions.insert(block.positions.begin() + static_cast<std::ptrdiff_t>(place.offset), position);
  block.latest = position;
  if (block.positions.size() < kBlockCapacity) return;
  const auto right = blocks_.emplace(blocks_.begin() + static_cast<std::ptrdiff_t>(place.block) + 1);
  Block& left = *std::prev(right);
  right->positions.reserve(kBlockCapacity);
  right->positions.assign(left.positions.begin() + kBlockCapacity / 2, left.positions.end());
  left.positions.resize(kBlockCapacity / 2);
  for (Block* half : {&left, &*right}) half->latest = *std::max_element(half->positions.begin(), half->positions.end());
}

OwnPositions::Place OwnPositions::search(const GrowingText& text, const Token* context, std::size_t length,
                                         bool after) const {
  // Whether a position stands before the place sought. kStart after the oldest token makes a context that is too
  // short differ, and greater.
  const auto before = [&](std::uint32_t position) {
    const Token* candidate = text.context(position);
    const std::size_t common = common_length(candidate, context, 0, length);
    return common == length ? after : candidate[common] < context[common];
  };
  const auto block = std::partition_point(blocks_.begin(), blocks_.end(), [&](const Block& b) {
    return before(b.positions.front());
  });
  if (block == blocks_.begin()) return {0, 0};
  const auto& positions = std::prev(block)->positions;
  const auto offset = std::partition_point(positions.begin() + 1, positions.end(), before);
  return {static_cast<std::size_t>(block - blocks_.begin()) - 1, static_cast<std::size_t>(offset - positions.begin())};
}

std::size_t OwnPositions::longest_match(const GrowingText& text, std::size_t min_match,
                                        std::vector<std::uint32_t>& out) const {
  out.clear();
  if (blocks_.empty()) return 0;
  const Token* context = text.newest();
  const std::size_t limit = std::min(depth_, text.size());
  const Place place = search(text, context, limit, false);
  const auto common = [&](std::uint32_t position) { return common_length(text.context(position), context, 0, limit); };
  std::size_t length = 0;
  if (place.offset > 0) length = common(blocks_[place.block].positions[place.offset - 1]);
  if (place.offset < blocks_[place.block].positions.size()) {
    length = std::max(length, common(blocks_[place.block].positions[place.offset]));
  } else if (place.block + 1 < blocks_.size()) {
    length = std::max(length, common(blocks_[place.block + 1].positions.front()));
  }
  if (length == 0 || length < min_match) return 0;

  const Place first = search(text, context, length, false);
  const Place last = search(text, context, length, true);
  // Blocks wholly inside the interval, by their latest position: the latest kMaxOccurrences positions lie in the
  // kMaxOccurrences blocks whose latest positions are the latest, or at the two ends.
  thread_local std::vector<std::pair<std::uint32_t, const Block*>> inside;
  inside.clear();
  for (std::size_t b = first.block; b <= last.block; ++b) {
    const Block& block = blocks_[b];
    const std::size_t begin = b == first.block ? first.offset : 0;
    const std::size_t end = b == last.block ? last.offset : block.positions.size();
    if (b == first.block || b == last.block) {
      out.insert(out.end(), block.positions.begin() + static_cast<std::ptrdiff_t>(begin),
                 block.positions.begin() + static_cast<std::ptrdiff_t>(end));
    } else {
      inside.emplace_back(block.latest, &block);
    }
  }
  if (inside.size() > kMaxOccurrences) {
    std::nth_element(inside.begin(), inside.begin() + kMaxOccurrences, inside.end(), std::greater<>());
    inside.resize(kMaxOccurrences);
  }
  for (const auto& [latest, block] : inside) {
    out.insert(out.end(), block->positions.begin(), block->positions.end());
  }
  if (out.size() > kMaxOccurrences) {
    std::nth_element(out.begin(), out.begin() + kMaxOccurrences, out.end(), std::greater<>());
    out.resize(kMaxOccurrences);
  }
  std::sort(out.begin(), out.end(), std::greater<>());
  return length;
}

}  // namespace das

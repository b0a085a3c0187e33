#include "segment.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <queue>
#include <stdexcept>
#include <utility>

namespace das {

namespace {

constexpr std::size_t kBlock = 64;
// Intervals up to this size are scanned; longer ones go through the sparse table.
constexpr std::size_t kScan = 1024;

// Keeps the kMaxOccurrences smallest positions, sorted.
void keep_newest(std::vector<std::uint32_t>& positions) {
  if (positions.size() > kMaxOccurrences) {
    std::nth_element(positions.begin(), positions.begin() + kMaxOccurrences, positions.end());
    positions.resize(kMaxOccurrences);
  }
  std::sort(positions.begin(), positions.end());
}

}  // namespace

Segment::Segment(std::shared_ptr<ByteCounter> counter, std::vector<Document> documents, std::size_t depth)
    : charge_(std::move(counter), sizeof(Segment)),
      reversed_(charge_.counter().get()),
      documents_(charge_.counter().get()),
      order_(charge_.counter().get()),
      block_minimum_(charge_.counter().get()),
      newest_block_(charge_.counter().get()) {
  std::sort(documents.begin(), documents.end(), [](const Document& a, const Document& b) {
    return a.generation != b.generation ? a.generation > b.generation : a.sequence > b.sequence;
  });
  std::size_t size = 2;
  for (const Document& document : documents) size += document.tokens.size() + 1;
  if (size >= std::numeric_limits<std::uint32_t>::max()) {
    throw std::length_error("one problem's history reaches 2^32 tokens; drop old generations first");
  }
  reversed_.reserve(size);
  documents_.reserve(documents.size());
  reversed_.push_back(kStart);
  for (const Document& document : documents) {
    documents_.push_back({static_cast<std::uint32_t>(reversed_.size()), document.generation, document.sequence});
    if (document.reversed) {
      reversed_.insert(reversed_.end(), document.tokens.begin(), document.tokens.end());
    } else {
      reversed_.insert(reversed_.end(), document.tokens.rbegin(), document.tokens.rend());
    }
    reversed_.push_back(kStart);
  }
  reversed_.push_back(kStart);
  const std::vector<std::uint32_t> order = order_by_context(reversed_, depth);
  order_.assign(order.begin(), order.end());
  index_newest();
}

Segment::Segment(std::shared_ptr<ByteCounter> counter, const Segment& source, std::span<const std::uint64_t> dropped)
    : charge_(std::move(counter), sizeof(Segment)),
      reversed_(charge_.counter().get()),
      documents_(charge_.counter().get()),
      order_(charge_.counter().get()),
      block_minimum_(charge_.counter().get()),
      newest_block_(charge_.counter().get()) {
  constexpr std::uint32_t gone = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> moved(source.reversed_.size(), gone);
  std::size_t size = 1;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < source.documents_.size(); ++i) {
    const Entry& entry = source.documents_[i];
    if (std::binary_search(dropped.begin(), dropped.end(), entry.sequence)) continue;
    const std::size_t end = source.end_of(i);
    for (std::size_t q = entry.begin; q < end; ++q) moved[q] = static_cast<std::uint32_t>(size++);
    ++kept;
  }
  reversed_.reserve(size + 1);
  documents_.reserve(kept);
  order_.reserve(size - 1 - kept);
  reversed_.push_back(kStart);
  for (std::size_t q = 1; q < source.reversed_.size(); ++q) {
    if (moved[q] != gone) reversed_.push_back(source.reversed_[q]);
  }
  reversed_.push_back(kStart);
  for (const Entry& entry : source.documents_) {
    if (moved[entry.begin] != gone) documents_.push_back({moved[entry.begin], entry.generation, entry.sequence});
  }
  // Dropping documents does not change how the others compare, and positions move without changing places.
  for (const std::uint32_t q : source.order_) {
    if (moved[q] != gone) order_.push_back(moved[q]);
  }
  index_newest();
}

std::size_t Segment::end_of(std::size_t document) const {
  return document + 1 < documents_.size() ? documents_[document + 1].begin : reversed_.size() - 1;
}

bool Segment::contains_any(std::span<const std::uint64_t> sequences) const {
  return std::any_of(documents_.begin(), documents_.end(), [&](const Entry& entry) {
    return std::binary_search(sequences.begin(), sequences.end(), entry.sequence);
  });
}

void Segment::append_documents(std::vector<Document>& out) const {
  for (std::size_t i = 0; i < documents_.size(); ++i) {
    const Entry& entry = documents_[i];
    const std::size_t length = end_of(i) - 1 - entry.begin;
    out.push_back({entry.generation, entry.sequence,
                   std::span<const Token>(reversed_).subspan(entry.begin, length), true});
  }
}

Match Segment::longest_match(std::span<const Token> context) const {
  const Token* text = reversed_.data();
  const std::size_t limit = context.size();
  // The first position whose context is not smaller than the one sought is `high`; the longest match is there or
  // just before it.
  std::size_t low = 0;  // positions before `low` are smaller
  std::size_t high = order_.size();
  std::size_t low_length = 0;
  std::size_t high_length = 0;
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    const Token* candidate = text + order_[middle];
    const std::size_t length =
        common_length(candidate, context.data(), std::min(low_length, high_length), limit);
    if (length == limit || context[length] < candidate[length]) {
      high = middle;
      high_length = length;
    } else {
      low = middle + 1;
      low_length = length;
    }
  }
  Match match{std::max(low_length, high_length), low, low};
  if (match.length == 0) return match;

  const auto matches = [&](std::size_t i) {
    return common_length(text + order_[i], context.data(), 0, match.length) == match.length;
  };
  // Gallop to both ends of the interval of equally long matches: it is short as a rule, but may be everything.
  if (low_length == match.length) {
    std::size_t inside = low - 1;
    std::size_t outside = 0;  // everything before `outside` is known or assumed not to match
    for (std::size_t step = 1; inside >= step; step *= 2) {
      if (!matches(inside - step)) {
        outside = inside - step + 1;
        break;
      }
      inside -= step;
    }
    while (outside < inside) {
      const std::size_t middle = outside + (inside - outside) / 2;
      if (matches(middle)) {
        inside = middle;
      } else {
        outside = middle + 1;
      }
    }
    match.begin = inside;
  }
  if (high_length == match.length) {
    std::size_t inside = low;
    std::size_t outside = order_.size();
    for (std::size_t step = 1; inside + step < order_.size(); step *= 2) {
      if (!matches(inside + step)) {
        outside = inside + step;
        break;
      }
      inside += step;
    }
    while (inside + 1 < outside) {
      const std::size_t middle = inside + (outside - inside) / 2;
      if (matches(middle)) {
        inside = middle;
      } else {
        outside = middle;
      }
    }
    match.end = inside + 1;
  }
  return match;
}

void Segment::index_newest() {
  if (order_.size() <= kScan) return;
  const std::size_t blocks = (order_.size() + kBlock - 1) / kBlock;
  const auto levels = static_cast<std::size_t>(std::bit_width(blocks));
  block_minimum_.reserve(blocks);
  for (std::size_t b = 0; b < blocks; ++b) {
    const auto first = order_.begin() + static_cast<std::ptrdiff_t>(b * kBlock);
    const auto last = order_.begin() + static_cast<std::ptrdiff_t>(std::min((b + 1) * kBlock, order_.size()));
    block_minimum_.push_back(*std::min_element(first, last));
  }
  std::size_t size = 0;
  for (std::size_t level = 0; level < levels; ++level) size += blocks - (std::size_t{1} << level) + 1;
  newest_block_.reserve(size);
  for (std::size_t b = 0; b < blocks; ++b) newest_block_.push_back(static_cast<std::uint32_t>(b));
  std::size_t below = 0;
  for (std::size_t level = 1; level < levels; ++level) {
    const std::size_t half = std::size_t{1} << (level - 1);
    const std::size_t entries = blocks - 2 * half + 1;
    const std::size_t next = newest_block_.size();
    for (std::size_t b = 0; b < entries; ++b) {
      const std::uint32_t left = newest_block_[below + b];
      const std::uint32_t right = newest_block_[below + b + half];
      newest_block_.push_back(block_minimum_[left] <= block_minimum_[right] ? left : right);
    }
    below = next;
  }
}

std::uint32_t Segment::newest_in_blocks(std::size_t first, std::size_t last) const {
  const auto level = static_cast<std::size_t>(std::bit_width(last - first) - 1);
  const std::size_t blocks = block_minimum_.size();
  // Levels below have blocks - 2^k + 1 entries each.
  const std::size_t offset = level * (blocks + 1) - ((std::size_t{1} << level) - 1);
  const std::uint32_t left = newest_block_[offset + first];
  const std::uint32_t right = newest_block_[offset + last - (std::size_t{1} << level)];
  return block_minimum_[left] <= block_minimum_[right] ? left : right;
}

void Segment::newest_positions(const Match& match, std::vector<std::uint32_t>& out) const {
  if (match.end - match.begin <= kScan) {
    out.assign(order_.begin() + static_cast<std::ptrdiff_t>(match.begin),
               order_.begin() + static_cast<std::ptrdiff_t>(match.end));
    keep_newest(out);
    return;
  }
  const std::size_t first = (match.begin + kBlock - 1) / kBlock;
  const std::size_t last = match.end / kBlock;
  // Each of the kMaxOccurrences blocks with the smallest minima holds a position that is not above the largest of
  // these minima: no position above that one is wanted.
  struct Range {
    std::size_t first;
    std::size_t last;
    std::uint32_t block;
    std::uint32_t minimum;
    bool operator<(const Range& other) const { return minimum > other.minimum; }
  };
  std::priority_queue<Range> ranges;
  const auto push = [&](std::size_t from, std::size_t to) {
    if (from >= to) return;
    const std::uint32_t block = newest_in_blocks(from, to);
    ranges.push({from, to, block, block_minimum_[block]});
  };
  push(first, last);
  std::array<std::uint32_t, kMaxOccurrences> blocks;
  std::size_t taken = 0;
  std::uint32_t bound = std::numeric_limits<std::uint32_t>::max();
  while (taken < kMaxOccurrences && !ranges.empty()) {
    const Range range = ranges.top();
    ranges.pop();
    blocks[taken++] = range.block;
    if (taken == kMaxOccurrences) bound = range.minimum;
    push(range.first, range.block);
    push(range.block + 1, range.last);
  }
  out.resize((taken + 2) * kBlock);
  std::size_t kept = 0;
  const auto append_up_to_bound = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      out[kept] = order_[i];
      kept += order_[i] <= bound ? 1 : 0;
    }
  };
  append_up_to_bound(match.begin, first * kBlock);
  append_up_to_bound(last * kBlock, match.end);
  for (std::size_t i = 0; i < taken; ++i) append_up_to_bound(blocks[i] * kBlock, (blocks[i] + std::size_t{1}) * kBlock);
  out.resize(kept);
  keep_newest(out);
}

void Segment::append_newest(const Match& match, std::vector<Occurrence>& out) const {
  thread_local std::vector<std::uint32_t> positions;
  newest_positions(match, positions);
  // Both lists ascend, so one walk over the documents names them all.
  auto entry = documents_.begin();
  for (const std::uint32_t q : positions) {
    entry = std::prev(std::upper_bound(entry, documents_.end(), q,
                                       [](std::uint32_t position, const Entry& e) { return position < e.begin; }));
    out.push_back({entry->generation, entry->sequence, reversed_.data() + q - 1});
  }
}

}  // namespace das

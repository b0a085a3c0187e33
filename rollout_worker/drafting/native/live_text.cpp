#include "live_text.hpp"

#include <algorithm>
#include <bit>
#include <new>

namespace das {

namespace {

template <class T>
T* allocate(std::pmr::memory_resource* memory, std::size_t count) {
  return static_cast<T*>(memory->allocate(count * sizeof(T), alignof(T)));
}

// Text i is in block bit_width(i + 1) - 1, which holds so many.
std::size_t block_of(std::uint32_t text) { return static_cast<std::size_t>(std::bit_width(text + 1)) - 1; }
std::size_t block_size(std::size_t block) { return std::size_t{1} << block; }

}  // namespace

LiveText::LiveText(std::pmr::memory_resource* memory) : memory_(memory) {}

LiveText::~LiveText() {
  for (std::size_t block = 0; block < blocks_.size(); ++block) {
    Body* const bodies = blocks_[block].load();
    if (bodies == nullptr) break;
    for (std::size_t i = 0; i < block_size(block); ++i) {
      for (std::size_t k = 0; k < bodies[i].buffers; ++k) {
        memory_->deallocate(bodies[i].buffer[k], (kFirstBuffer << k) * sizeof(Token), alignof(Token));
      }
      bodies[i].~Body();
    }
    memory_->deallocate(bodies, block_size(block) * sizeof(Body), alignof(Body));
  }
  for (std::size_t i = 0; i < table_count_.load(); ++i) {
    const Table& table = tables_[i];
    memory_->deallocate(table.entries, table.capacity * sizeof(Entry), alignof(Entry));
    memory_->deallocate(table.heads, kOrders.size() * table.capacity * sizeof(std::atomic<std::uint32_t>),
                        alignof(std::atomic<std::uint32_t>));
  }
}

LiveText::Body& LiveText::body(Text text) const {
  const std::size_t block = block_of(text);
  return blocks_[block].load(std::memory_order_acquire)[text + 1 - block_size(block)];
}

LiveText::Text LiveText::begin(std::span<const Token> context) {
  const std::size_t block = block_of(texts_);
  if (blocks_[block].load(std::memory_order_relaxed) == nullptr) {
    Body* const bodies = allocate<Body>(memory_, block_size(block));
    for (std::size_t i = 0; i < block_size(block); ++i) new (bodies + i) Body;
    blocks_[block].store(bodies, std::memory_order_release);
  }
  const Text text = texts_++;
  for (const Token token : context) push(body(text), token);
  return text;
}

void LiveText::push(Body& body, Token token) {
  const std::uint32_t length = body.length.load(std::memory_order_relaxed);
  Token* tokens = body.tokens.load(std::memory_order_relaxed);
  if (body.buffers == 0 || length == kFirstBuffer << (body.buffers - 1)) {
    Token* const larger = allocate<Token>(memory_, kFirstBuffer << body.buffers);
    std::copy_n(tokens, length, larger);
    body.buffer.at(body.buffers++) = larger;  // readers may still be in the smaller ones
    tokens = larger;
    body.tokens.store(larger, std::memory_order_release);
  }
  tokens[length] = token;
  body.length.store(length + 1, std::memory_order_release);
}

void LiveText::append(Text text, std::span<const Token> tokens) {
  Body& mine = body(text);
  for (const Token token : tokens) {
    push(mine, token);
    enter(text, mine, mine.length.load(std::memory_order_relaxed) - 1);
  }
  tokens_.fetch_add(tokens.size(), std::memory_order_relaxed);
}

LiveText::Table& LiveText::writable() {
  const std::size_t count = table_count_.load(std::memory_order_relaxed);
  if (count > 0 && used_ < tables_[count - 1].capacity) return tables_[count - 1];
  Table& table = tables_.at(count);
  table.capacity = kFirstTable << count;
  const auto heads = allocate<std::atomic<std::uint32_t>>(memory_, kOrders.size() * table.capacity);
  try {
    table.entries = allocate<Entry>(memory_, table.capacity);
  } catch (...) {
    memory_->deallocate(heads, kOrders.size() * table.capacity * sizeof *heads, alignof(std::atomic<std::uint32_t>));
    throw;
  }
  table.heads = heads;
  for (std::size_t i = 0; i < kOrders.size() * table.capacity; ++i) {
    new (table.heads + i) std::atomic<std::uint32_t>(kNone);
  }
  used_ = 0;
  table_count_.store(count + 1, std::memory_order_release);
  return table;
}

void LiveText::enter(Text text, const Body& body, std::uint32_t position) {
  if (position < kOrders.front()) return;
  Table& table = writable();
  const std::uint32_t number = used_++;
  Entry& entry = table.entries[number];
  entry.text = text;
  entry.position = position;
  const Hashes hashes = hash(body.tokens.load(std::memory_order_relaxed) + position, position);
  std::array<std::atomic<std::uint32_t>*, kOrders.size()> heads{};
  for (std::size_t k = 0; k < kOrders.size(); ++k) {
    entry.previous[k] = kNone;
    if (position < kOrders[k]) continue;
    heads[k] = table.heads + k * table.capacity + (hashes[k] & (table.capacity - 1));
    entry.previous[k] = heads[k]->load(std::memory_order_relaxed);
  }
  for (std::atomic<std::uint32_t>* const head : heads) {
    if (head != nullptr) head->store(number, std::memory_order_release);
  }
}

LiveText::Hashes LiveText::hash(const Token* end, std::size_t length) {
  // Each order's is made of two of the order before, all of which can be computed at the same time.
  static_assert(kOrders == std::array<std::size_t, 3>{2, 4, 8});
  const auto mixed = [](std::uint64_t a, std::uint64_t b) {
    const std::uint64_t sum = a * 0x9E3779B97F4A7C15U + b;
    return (sum ^ sum >> 32) * 0xD1B54A32D192ED03U;
  };
  Hashes hashes{};
  std::array<std::uint64_t, kOrders.back()> part{};
  const std::size_t count = std::bit_floor(std::min(length, part.size()));
  for (std::size_t i = 0; i < count; ++i) part[i] = end[-1 - static_cast<std::ptrdiff_t>(i)];
  for (std::size_t k = 0; k < kOrders.size() && kOrders[k] <= count; ++k) {
    for (std::size_t i = 0; i < count / kOrders[k]; ++i) part[i] = mixed(part[2 * i], part[2 * i + 1]);
    hashes[k] = part[0] ^ part[0] >> 32;
  }
  return hashes;
}

void LiveText::find_longest(std::span<const Token> context, std::size_t depth, Text mine, std::size_t own,
                            std::size_t others, std::vector<Occurrence>& found) const {
  const std::size_t tables = table_count_.load(std::memory_order_acquire);
  if (tables == 0) return;
  const Token* const end = context.data() + context.size();
  const Hashes hashes = hash(end, context.size());
  std::size_t longer = depth + 1;  // such matches were found in the chains of an order before
  for (std::size_t k = kOrders.size(); k-- > 0 && own + others > 0;) {
    const std::size_t order = kOrders[k];
    if (context.size() < order) continue;
    const std::uint64_t wanted = hashes[k];
    std::size_t walked = 0;
    for (std::size_t t = tables; t-- > 0 && walked < kWalk;) {
      const Table& table = tables_[t];
      std::uint32_t number =
          table.heads[k * table.capacity + (wanted & (table.capacity - 1))].load(std::memory_order_acquire);
      for (; number != kNone && walked < kWalk && own + others > 0; ++walked) {
        const Entry& entry = table.entries[number];
        number = entry.previous[k];
        std::size_t& left = entry.text == mine ? own : others;
        if (left == 0) continue;
        const Body& other = body(entry.text);
        // In this order: every later buffer holds as many tokens.
        const std::size_t length = other.length.load(std::memory_order_acquire);
        const Token* const there = other.tokens.load(std::memory_order_acquire) + entry.position;
        const std::size_t most = std::min({depth, context.size(), std::size_t{entry.position}});
        std::size_t match = 0;
        while (match < most &&
               there[-1 - static_cast<std::ptrdiff_t>(match)] == end[-1 - static_cast<std::ptrdiff_t>(match)])
          ++match;
        // another text with the same hash, or seen before
        if (match < order || match >= longer) continue;
        --left;
        found.push_back({Continuation(there, length - entry.position), 0, kNoReward, static_cast<std::uint8_t>(match),
                         entry.text == mine ? Source::self : Source::siblings});
      }
    }
    longer = order;
  }
}

}  // namespace das

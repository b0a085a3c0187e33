#include "live_texts.hpp"

#include <algorithm>
#include <bit>
#include <new>

namespace das {

namespace {

template <class T>
T* allocate(std::pmr::memory_resource* memory, std::size_t count) {
  return static_cast<T*>(memory->allocate(count * sizeof(T), alignof(T)));
}

// Text i is in block bit_width(i + 1) - 1.
std::size_t block_of(std::uint32_t text) { return static_cast<std::size_t>(std::bit_width(text + 1)) - 1; }
std::size_t block_size(std::size_t block) { return std::size_t{1} << block; }

}  // namespace

LiveTexts::LiveTexts(std::pmr::memory_resource* memory) : memory_(memory) {}

LiveTexts::~LiveTexts() {
  for (std::size_t block = 0; block < blocks_.size(); ++block) {
    Body* const bodies = blocks_[block].load();
    if (bodies == nullptr) break;
    for (std::size_t i = 0; i < block_size(block); ++i) {
      for (std::size_t k = 0; k < bodies[i].buffer_count; ++k) {
        memory_->deallocate(bodies[i].buffers[k], (kFirstBuffer << k) * sizeof(Token), alignof(Token));
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

LiveTexts::Body& LiveTexts::body(TextId text) const {
  const std::size_t block = block_of(text);
  return blocks_[block].load(std::memory_order_acquire)[text + 1 - block_size(block)];
}

LiveTexts::TextId LiveTexts::begin(std::span<const Token> context) {
  const std::size_t block = block_of(text_count_);
  if (blocks_[block].load(std::memory_order_relaxed) == nullptr) {
    Body* const bodies = allocate<Body>(memory_, block_size(block));
    for (std::size_t i = 0; i < block_size(block); ++i) new (bodies + i) Body;
    blocks_[block].store(bodies, std::memory_order_release);
  }
  const TextId text = text_count_++;
  for (const Token token : context) push(body(text), token);
  return text;
}

void LiveTexts::push(Body& body, Token token) {
  const std::uint32_t length = body.length.load(std::memory_order_relaxed);
  Token* tokens = body.tokens.load(std::memory_order_relaxed);
  if (body.buffer_count == 0 || length == kFirstBuffer << (body.buffer_count - 1)) {
    Token* const larger = allocate<Token>(memory_, kFirstBuffer << body.buffer_count);
    std::copy_n(tokens, length, larger);
    body.buffers.at(body.buffer_count++) = larger;  // readers may still use the smaller ones
    tokens = larger;
    body.tokens.store(larger, std::memory_order_release);
  }
  tokens[length] = token;
  body.length.store(length + 1, std::memory_order_release);
}

void LiveTexts::append(TextId text, std::span<const Token> tokens) {
  Body& target = body(text);
  for (const Token token : tokens) {
    push(target, token);
    link(text, target, target.length.load(std::memory_order_relaxed) - 1);
  }
  tokens_.fetch_add(tokens.size(), std::memory_order_relaxed);
}

LiveTexts::Table& LiveTexts::writable_table() {
  const std::size_t count = table_count_.load(std::memory_order_relaxed);
  if (count > 0 && used_entries_ < tables_[count - 1].capacity) return tables_[count - 1];
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
  used_entries_ = 0;
  table_count_.store(count + 1, std::memory_order_release);
  return table;
}

void LiveTexts::link(TextId text, const Body& body, std::uint32_t position) {
  if (position < kOrders.front()) return;
  Table& table = writable_table();
  const std::uint32_t number = used_entries_++;
  Entry& entry = table.entries[number];
  entry.text = text;
  entry.position = position;
  const Hashes hashes = hashes_before(body.tokens.load(std::memory_order_relaxed) + position, position);
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

LiveTexts::Hashes LiveTexts::hashes_before(const Token* end, std::size_t length) {
  // Each hash combines two hashes of the previous order; those of one order can be computed in parallel.
  static_assert(kOrders == std::array<std::size_t, 3>{2, 4, 8});
  const auto combine = [](std::uint64_t a, std::uint64_t b) {
    const std::uint64_t sum = a * 0x9E3779B97F4A7C15U + b;
    return (sum ^ sum >> 32) * 0xD1B54A32D192ED03U;
  };
  Hashes hashes{};
  std::array<std::uint64_t, kOrders.back()> part{};
  const std::size_t count = std::bit_floor(std::min(length, part.size()));
  for (std::size_t i = 0; i < count; ++i) part[i] = end[-1 - static_cast<std::ptrdiff_t>(i)];
  for (std::size_t k = 0; k < kOrders.size() && kOrders[k] <= count; ++k) {
    for (std::size_t i = 0; i < count / kOrders[k]; ++i) part[i] = combine(part[2 * i], part[2 * i + 1]);
    hashes[k] = part[0] ^ part[0] >> 32;
  }
  return hashes;
}

void LiveTexts::find_longest(std::span<const Token> context, std::size_t depth, TextId own, std::size_t max_own,
                             std::size_t max_others, std::vector<Occurrence>& found) const {
  const std::size_t tables = table_count_.load(std::memory_order_acquire);
  if (tables == 0) return;
  const Token* const end = context.data() + context.size();
  const Hashes hashes = hashes_before(end, context.size());
  std::size_t known_from = depth + 1;  // matches of this length or longer were found in chains of a higher order
  for (std::size_t k = kOrders.size(); k-- > 0 && max_own + max_others > 0;) {
    const std::size_t order = kOrders[k];
    if (context.size() < order) continue;
    const std::uint64_t wanted = hashes[k];
    std::size_t visited = 0;
    for (std::size_t t = tables; t-- > 0 && visited < kMaxVisited;) {
      const Table& table = tables_[t];
      // The chain is followed first, so that the processor fetches the texts of many entries at the same time.
      std::array<const Entry*, kMaxVisited> entries;
      std::size_t count = 0;
      std::uint32_t number =
          table.heads[k * table.capacity + (wanted & (table.capacity - 1))].load(std::memory_order_acquire);
      for (; number != kNone && visited < kMaxVisited; ++visited) {
        const Entry& entry = table.entries[number];
        number = entry.previous[k];
        if ((entry.text == own ? max_own : max_others) == 0) continue;
        __builtin_prefetch(body(entry.text).tokens.load(std::memory_order_relaxed) + entry.position - 1);
        entries[count++] = &entry;
      }
      for (std::size_t i = 0; i < count && max_own + max_others > 0; ++i) {
        const Entry& entry = *entries[i];
        std::size_t& remaining = entry.text == own ? max_own : max_others;
        if (remaining == 0) continue;
        const Body& other = body(entry.text);
        // The length is read first, because every later buffer holds at least as many tokens.
        const std::size_t length = other.length.load(std::memory_order_acquire);
        const Token* const position = other.tokens.load(std::memory_order_acquire) + entry.position;
        const std::size_t limit = std::min({depth, context.size(), std::size_t{entry.position}});
        std::size_t match = 0;
        while (match < limit &&
               position[-1 - static_cast<std::ptrdiff_t>(match)] == end[-1 - static_cast<std::ptrdiff_t>(match)])
          ++match;
        // A hash collision, or an occurrence that was found before.
        if (match < order || match >= known_from) continue;
        --remaining;
        found.push_back({Continuation(position, length - entry.position), 0, kNoReward,
                         static_cast<std::uint8_t>(match), entry.text == own ? Source::self : Source::siblings});
      }
    }
    known_from = order;
  }
}

}  // namespace das

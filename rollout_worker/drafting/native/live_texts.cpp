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

// Returns how many tokens before `a` and before `b` are equal, at most `limit`.
std::size_t common(const Token* a, const Token* b, std::size_t limit) {
  constexpr std::size_t kTokens = Words<Token>::kTokens;
  std::size_t known = 0;
  for (; known + kTokens <= limit; known += kTokens) {
    const std::uint64_t x = Words<Token>::before(a - known);
    const std::uint64_t y = Words<Token>::before(b - known);
    if (x != y) return known + Words<Token>::common(x, y);
  }
  while (known < limit && *(a - known - 1) == *(b - known - 1)) ++known;
  return known;
}

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

std::size_t LiveTexts::follow_chains(std::size_t k, std::uint64_t hash, TextId own, bool wants_own, bool wants_others,
                                     Candidates& candidates) const {
  std::size_t count = 0;
  std::size_t cost = 0;
  for (std::size_t t = table_count_.load(std::memory_order_acquire); t-- > 0 && cost < kMaxCost;) {
    const Table& table = tables_[t];
    std::uint32_t number =
        table.heads[k * table.capacity + (hash & (table.capacity - 1))].load(std::memory_order_acquire);
    while (number != kNone && cost < kMaxCost) {
      const Entry& entry = table.entries[number];
      number = entry.previous[k];
      const bool is_own = entry.text == own;
      if (!(is_own ? wants_own : wants_others)) {
        cost += kEntryCost;
        continue;
      }
      const Body& text = body(entry.text);
      // The length is read first, because every later buffer holds at least as many tokens.
      const std::uint32_t following = text.length.load(std::memory_order_acquire) - entry.position;
      const Token* const position = text.tokens.load(std::memory_order_acquire) + entry.position;
      __builtin_prefetch(position - 1);  // it is read when the chain has been followed
      candidates[count++] = {position, entry.position, following, is_own, 0};
      cost += following < kManyFollowing ? kFewFollowingCost : kEntryCost;
    }
  }
  return count;
}

void LiveTexts::find_longest(std::span<const Token> context, std::size_t depth, TextId own, std::size_t max_own,
                             std::size_t max_others, std::vector<Occurrence>& found) const {
  const Token* const end = context.data() + context.size();
  const Hashes hashes = hashes_before(end, context.size());
  std::size_t known_from = depth + 1;  // matches of this length or longer were found in chains of a higher order
  for (std::size_t k = kOrders.size(); k-- > 0 && max_own + max_others > 0;) {
    const std::size_t order = kOrders[k];
    if (context.size() < order) continue;
    Candidates candidates;
    std::size_t count = follow_chains(k, hashes[k], own, max_own > 0, max_others > 0, candidates);
    if (count > kMaxCompared) {
      std::nth_element(candidates.begin(), candidates.begin() + kMaxCompared, candidates.begin() + count,
                       [](const Candidate& a, const Candidate& b) { return a.is_followed_by_more(b); });
      count = kMaxCompared;
    }
    // Those with a match, by whether they are in the own text.
    std::array<std::array<Candidate, kMaxCompared>, 2> matches;
    std::array<std::size_t, 2> num_matches{};
    for (Candidate& candidate : std::span(candidates).first(count)) {
      const std::size_t limit = std::min({depth, context.size(), std::size_t{candidate.num_before}});
      const std::size_t match = common(candidate.position, end, limit);
      // A hash collision, or an occurrence that was found before.
      if (match < order || match >= known_from) continue;
      candidate.match = static_cast<std::uint8_t>(match);
      matches[candidate.is_own][num_matches[candidate.is_own]++] = candidate;
    }
    for (const bool is_own : {true, false}) {
      std::size_t& remaining = is_own ? max_own : max_others;
      const std::span<Candidate> all = std::span(matches[is_own]).first(num_matches[is_own]);
      const std::span<Candidate> kept = all.first(std::min(remaining, all.size()));
      if (kept.size() < all.size()) {
        std::nth_element(all.begin(), kept.end(), all.end(),
                         [](const Candidate& a, const Candidate& b) { return a.is_better(b); });
      }
      remaining -= kept.size();
      for (const Candidate& one : kept) {
        found.push_back({Continuation(one.position, one.num_following), 0, kNoReward, one.match,
                         is_own ? Source::self : Source::siblings});
      }
    }
    known_from = order;
  }
}

}  // namespace das

#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

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

std::shared_ptr<const Segments> sorted_by_size(const std::shared_ptr<ByteCounter>& counter, SegmentList segments,
                                               std::span<const std::int64_t> generations) {
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a->tokens() < b->tokens(); });
  return std::make_shared<const Segments>(counter, segments, generations);
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

namespace {

// Indexing this many tokens takes about as long as passing them to another thread.
constexpr std::size_t kMaxInlinePrompt = 256;

}  // namespace

IndexedPrompt::Key IndexedPrompt::key_of(std::span<const Token> prompt) {
  std::array<std::uint64_t, 2> hash{prompt.size(), ~prompt.size()};
  const auto add = [&](std::uint64_t word) {
    hash[0] = (hash[0] ^ word) * 0x9E3779B97F4A7C15U;
    hash[0] ^= hash[0] >> 29;
    hash[1] = (hash[1] + word) * 0xD1B54A32D192ED03U;
    hash[1] ^= hash[1] >> 32;
  };
  constexpr std::size_t kTokens = Words<Token>::kTokens;
  std::size_t i = kTokens;
  for (; i <= prompt.size(); i += kTokens) add(Words<Token>::before(prompt.data() + i));
  for (i -= kTokens; i < prompt.size(); ++i) add(prompt[i]);
  return {prompt.size(), hash};
}

IndexedPrompt::IndexedPrompt(const std::shared_ptr<ByteCounter>& counter, const Key& key)
    : charge_(counter, sizeof(IndexedPrompt)), key_(key), waiting_(counter.get()) {}

std::shared_ptr<const IndexedPrompt> IndexedPrompt::create(const std::shared_ptr<ByteCounter>& counter, const Key& key,
                                                           std::span<const Token> prompt, std::size_t depth,
                                                           BackgroundThread* background) {
  auto indexed = std::make_shared<IndexedPrompt>(counter, key);
  if (background == nullptr || prompt.size() <= kMaxInlinePrompt) {
    indexed->build(prompt, depth);
    return indexed;
  }
  indexed->waiting_.assign(prompt.begin(), prompt.end());
  const auto task = [waiting = std::weak_ptr(indexed), depth] {
    const auto prompt = waiting.lock();
    if (!prompt) return;  // all its requests were closed
    const auto tokens = std::move(prompt->waiting_);
    prompt->build(tokens, depth);
  };
  if (!background->submit(task)) task();
  return indexed;
}

void IndexedPrompt::build(std::span<const Token> prompt, std::size_t depth) {
  const Document document{.tokens = prompt};
  segment_.store(Segment::build(charge_.counter(), {&document, 1}, depth));
}

Problem::Problem(const IndexBytes& bytes)
    : charge(std::make_shared<ByteCounter>(bytes.all), sizeof(Problem)),
      live_bytes(std::make_shared<ByteCounter>(charge.counter(), bytes.in_use)),
      rollouts(charge.counter().get()) {
  history.store(std::make_shared<const Segments>(charge.counter()));
}

std::vector<std::string> Problem::rollout_ids() const {
  std::vector<std::pair<std::uint64_t, std::string_view>> order;
  for (const auto& [id, record] : rollouts) order.emplace_back(record.document_id, id);
  std::sort(order.begin(), order.end());
  std::vector<std::string> ids;
  ids.reserve(order.size());
  for (const auto& [document_id, id] : order) ids.emplace_back(id);
  return ids;
}

void Problem::count_reward(float reward, int count) {
  if (std::isnan(reward)) return;
  reward_count += count;
  reward_sum = reward_count == 0 ? 0.0 : reward_sum + count * static_cast<double>(reward);
  mean_reward.store(reward_count == 0 ? 0.0F : static_cast<float>(reward_sum / static_cast<double>(reward_count)));
}

void Problem::clear() {
  history.store(std::make_shared<const Segments>(charge.counter()));
  rollouts.clear();
  reward_sum = 0.0;
  reward_count = 0;
  mean_reward.store(0.0F);
  is_empty.store(true);
}

std::shared_ptr<const IndexedPrompt> Problem::index_prompt(std::span<const Token> prompt, std::size_t depth,
                                                           BackgroundThread* background) {
  const IndexedPrompt::Key key = IndexedPrompt::key_of(prompt);
  {
    const std::lock_guard lock(live);
    auto last = last_prompt.lock();
    if (last && last->key() == key) return last;
  }
  auto indexed = IndexedPrompt::create(live_bytes, key, prompt, depth, background);
  const std::lock_guard lock(live);
  last_prompt = indexed;
  return indexed;
}

ProblemPin::~ProblemPin() {
  if (registry_ == nullptr) return;
  const std::lock_guard lock(registry_->mutex_);
  Problem& problem = *entry_->second;
  if (--problem.pins > 0 || !problem.is_empty.load()) return;
  registry_->by_use_.erase(problem.lru_position);
  registry_->problems_.erase(entry_);
}

ProblemPin ProblemRegistry::find(std::string_view problem) {
  const std::lock_guard lock(mutex_);
  const auto entry = problems_.find(problem);
  if (entry == problems_.end()) return {};
  ++entry->second->pins;
  return {*this, entry};
}

ProblemPin ProblemRegistry::use(std::string_view problem) {
  const std::lock_guard lock(mutex_);
  auto entry = problems_.find(problem);
  if (entry == problems_.end()) {
    entry = problems_.emplace(problem, std::make_unique<Problem>(bytes_)).first;
    try {
      entry->second->lru_position = by_use_.insert(by_use_.end(), entry);
    } catch (...) {
      problems_.erase(entry);
      throw;
    }
  } else {
    by_use_.splice(by_use_.end(), by_use_, entry->second->lru_position);
  }
  ++entry->second->pins;
  return {*this, entry};
}

ProblemPin ProblemRegistry::least_recently_used() {
  const std::lock_guard lock(mutex_);
  for (const bool allow_pinned : {false, true}) {
    for (const ProblemMap::iterator entry : by_use_) {
      Problem& problem = *entry->second;
      if (problem.is_empty.load() || (problem.pins > 0 && !allow_pinned)) continue;
      ++problem.pins;
      return {*this, entry};
    }
  }
  return {};
}

std::vector<std::string> ProblemRegistry::ids() {
  std::vector<std::string> ids;
  const std::lock_guard lock(mutex_);
  for (const auto& [id, problem] : problems_) {
    if (!problem->is_empty.load()) ids.emplace_back(id);
  }
  return ids;
}

void ProblemRegistry::raise_newest_generation(std::int64_t generation) {
  for (std::int64_t known = newest_generation_.load();
       known < generation && !newest_generation_.compare_exchange_weak(known, generation);) {
  }
}

}  // namespace das

#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

namespace das {

namespace {

std::array<std::uint64_t, 2> hash_of(std::span<const Token> tokens) {
  std::array<std::uint64_t, 2> hash{tokens.size(), ~tokens.size()};
  for (const Token token : tokens) {
    hash[0] = (hash[0] ^ token) * 0x9E3779B97F4A7C15U;
    hash[0] ^= hash[0] >> 29;
    hash[1] = (hash[1] + token) * 0xD1B54A32D192ED03U;
    hash[1] ^= hash[1] >> 32;
  }
  return hash;
}

}  // namespace

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

std::shared_ptr<const IndexedPrompt> Problem::index_prompt(std::span<const Token> prompt, std::size_t depth) {
  const auto hash = hash_of(prompt);
  {
    const std::lock_guard lock(live);
    auto last = last_prompt.lock();
    if (last && last->length == prompt.size() && last->hash == hash) return last;
  }
  const Document document{.tokens = prompt};
  auto indexed = std::make_shared<const IndexedPrompt>(
      IndexedPrompt{prompt.size(), hash, Segment::build(live_bytes, {&document, 1}, depth)});
  const std::lock_guard lock(live);
  last_prompt = indexed;
  return indexed;
}

}  // namespace das

#include "history_writer.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace das {

void Evictor::schedule() {
  if (is_scheduled_.exchange(true)) return;
  const bool is_queued = background_.submit([this] {
    is_scheduled_.store(false);
    evict();
  });
  if (!is_queued) is_scheduled_.store(false);
}

void Evictor::evict() {
  while (is_over_limit()) {
    const ProblemPin problem = problems_.least_recently_used();
    if (!problem) return pool_.clear();
    const std::lock_guard writing(problem->writer);
    if (!is_over_limit()) return;
    const std::weak_ptr<const Segments> evicted = problem->history.load();
    problem->clear();
    // The bytes are released only when drafts that still read the segments have ended, which takes microseconds.
    while (!evicted.expired()) std::this_thread::yield();
    const std::lock_guard lock(mutex_);
    evicted_.emplace_back(problem.id());
  }
}

std::vector<std::string> Evictor::take_evicted() {
  const std::lock_guard lock(mutex_);
  return std::exchange(evicted_, {});
}

namespace {

// After a removal, a segment is rebuilt if less than this fraction of it is left.
constexpr std::size_t kRebuildFraction = 4;

// A problem with more segments than this is merged by the writer instead of the background thread.
constexpr std::size_t kMaxSegments = 12;

constexpr std::int64_t kNoGeneration = std::numeric_limits<std::int64_t>::min();

// Returns a rollout as it is indexed: preceded by the last `depth` tokens of its context. `text` owns copied tokens.
Document document_of(const Rollout& rollout, std::uint64_t id, std::size_t depth,
                     std::vector<std::unique_ptr<Token[]>>& text) {
  const auto context = rollout.context.last(std::min(depth, rollout.context.size()));
  if (context.empty()) return {rollout.generation, id, 0, rollout.tokens, rollout.reward};
  const std::size_t length = context.size() + rollout.tokens.size();
  text.push_back(std::make_unique<Token[]>(length));
  std::copy(rollout.tokens.begin(), rollout.tokens.end(), std::copy(context.begin(), context.end(), text.back().get()));
  return {rollout.generation, id, context.size(), {text.back().get(), length}, rollout.reward};
}

// Returns the distinct generations of rollouts in ascending order, except those with one of the sorted `removed` ids.
std::vector<std::int64_t> generations_of(const RolloutMap& rollouts, std::span<const std::uint64_t> removed = {}) {
  std::vector<std::int64_t> generations;
  for (const auto& [id, record] : rollouts) {
    if (std::binary_search(removed.begin(), removed.end(), record.document_id)) continue;
    generations.push_back(record.generation);
  }
  std::sort(generations.begin(), generations.end());
  generations.erase(std::unique(generations.begin(), generations.end()), generations.end());
  return generations;
}

}  // namespace

std::size_t HistoryWriter::add(std::string_view problem_id, std::span<const Rollout> rollouts) {
  std::vector<Document> documents;
  std::vector<std::unique_ptr<Token[]>> text;
  std::vector<std::uint64_t> pool_ids;
  const ProblemPin problem = problems_.use(problem_id);
  const std::lock_guard lock(problem->writer);
  // New rollouts are collected aside, so that a failing build leaves the problem unchanged.
  RolloutMap added(problem->rollouts.get_allocator());
  for (const Rollout& rollout : rollouts) {
    if (problem->rollouts.contains(rollout.id)) continue;
    const std::uint64_t id = next_document_id_++;
    if (!added.emplace(rollout.id, RolloutRecord{rollout.generation, id, rollout.reward}).second) continue;
    if (!rollout.tokens.empty()) documents.push_back(document_of(rollout, id, depth_, text));
    if (pool_.is_enabled() && !rollout.tokens.empty()) pool_ids.push_back(pool_document_id(problem_id, rollout.id));
  }
  const std::size_t count = added.size();
  if (count == 0) return 0;
  const std::vector<std::int64_t> new_generations = generations_of(added);
  problems_.raise_newest_generation(new_generations.back());
  const auto history = problem->history.load();
  std::vector<std::int64_t> generations;
  std::set_union(history->generations.begin(), history->generations.end(), new_generations.begin(),
                 new_generations.end(), std::back_inserter(generations));
  SegmentList segments(history->list.begin(), history->list.end());
  if (!documents.empty()) segments.push_back(Segment::build(problem->charge.counter(), documents, depth_));
  auto next = sorted_by_size(problem->charge.counter(), std::move(segments), generations);
  for (const auto& [id, record] : added) problem->count_reward(record.reward, 1);
  problem->rollouts.merge(added);
  problem->is_empty.store(false);
  replace_history(problem_id, *problem, std::move(next));
  if (pool_.is_enabled()) {
    for (std::size_t i = 0; i < documents.size(); ++i) {
      documents[i].id = pool_ids[i];
      documents[i].problem_hash = problem_hash(problem_id);
    }
    pool_.add(documents);
  }
  return count;
}

std::size_t HistoryWriter::set_rewards(std::string_view problem_id,
                                       std::span<const std::pair<std::string_view, float>> rewards) {
  const ProblemPin problem = problems_.find(problem_id);
  if (!problem) return 0;
  const std::lock_guard lock(problem->writer);
  const auto history = problem->history.load();
  std::size_t known = 0;
  for (const auto& [id, reward] : rewards) {
    const auto rollout = problem->rollouts.find(id);
    if (rollout == problem->rollouts.end()) continue;
    ++known;
    if (rollout->second.reward == reward) continue;  // most rewards are reported repeatedly
    problem->count_reward(rollout->second.reward, -1);
    problem->count_reward(reward, 1);
    rollout->second.reward = reward;
    for (const auto& segment : history->list) {
      if (segment->set_reward(rollout->second.document_id, reward)) break;
    }
  }
  return known;
}

void HistoryWriter::replace_history(std::string_view id, Problem& problem,
                                    std::shared_ptr<const Segments> segments) noexcept {
  const bool has_many = segments->list.size() > kMaxSegments;
  const bool is_mergeable = should_merge(*segments);
  problem.history.store(std::move(segments));
  try {
    if (has_many) return merge_history(problem);
    if (problem.merging || !is_mergeable) return;
    problem.merging = background_.submit([this, name = std::string(id)] {
      const ProblemPin pinned = problems_.find(name);
      if (!pinned) return;
      const std::lock_guard lock(pinned->writer);
      pinned->merging = false;
      merge_history(*pinned);
    });
  } catch (const std::exception&) {
    // Out of memory. The segments stay unmerged, and the next change tries again.
  }
}

void HistoryWriter::merge_history(Problem& problem) const {
  const auto history = problem.history.load();
  const SegmentList merged = merge(problem.charge.counter(), *history, depth_);
  if (merged.size() == history->list.size()) return;
  problem.history.store(std::make_shared<const Segments>(problem.charge.counter(), merged, history->generations));
}

void HistoryWriter::drop(std::string_view id, Problem& problem, std::span<const RolloutMap::iterator> rollouts) {
  std::vector<std::uint64_t> document_ids;
  for (const auto& rollout : rollouts) document_ids.push_back(rollout->second.document_id);
  std::sort(document_ids.begin(), document_ids.end());
  const auto history = problem.history.load();
  SegmentList segments;
  for (const auto& segment : history->list) {
    if (!segment->contains_any(document_ids)) {
      segments.push_back(segment);
      continue;
    }
    auto rest = segment->without(document_ids);
    // The copy has look-up tables of the original size, so a small rest is worth rebuilding.
    if (rest->tokens() < segment->tokens() / kRebuildFraction) {
      rest = rebuild(problem.charge.counter(), {&rest, 1}, depth_);
    }
    if (rest->tokens() > 0) segments.push_back(std::move(rest));
  }
  auto next =
      sorted_by_size(problem.charge.counter(), std::move(segments), generations_of(problem.rollouts, document_ids));
  for (const auto& rollout : rollouts) {
    problem.count_reward(rollout->second.reward, -1);
    problem.rollouts.erase(rollout);
  }
  problem.is_empty.store(problem.rollouts.empty());
  replace_history(id, problem, std::move(next));
}

// The next three remove rollouts from the pool even if the problem is unknown, since it may have been evicted.

bool HistoryWriter::drop_rollout(std::string_view problem_id, std::string_view rollout_id) {
  const ProblemPin problem = problems_.find(problem_id);
  const auto lock = problem ? std::unique_lock(problem->writer) : std::unique_lock<std::mutex>();
  const std::uint64_t pool_id = pool_document_id(problem_id, rollout_id);
  pool_.remove(problem_hash(problem_id), kNoGeneration, {&pool_id, 1});
  if (!problem) return false;
  const auto rollout = problem->rollouts.find(rollout_id);
  if (rollout == problem->rollouts.end()) return false;
  drop(problem_id, *problem, {&rollout, 1});
  return true;
}

std::size_t HistoryWriter::drop_before(std::string_view problem_id, std::int64_t generation) {
  const ProblemPin problem = problems_.find(problem_id);
  const auto lock = problem ? std::unique_lock(problem->writer) : std::unique_lock<std::mutex>();
  pool_.remove(problem_hash(problem_id), generation, {});
  if (!problem) return 0;
  std::vector<RolloutMap::iterator> rollouts;
  for (auto rollout = problem->rollouts.begin(); rollout != problem->rollouts.end(); ++rollout) {
    if (rollout->second.generation < generation) rollouts.push_back(rollout);
  }
  if (!rollouts.empty()) drop(problem_id, *problem, rollouts);
  return rollouts.size();
}

bool HistoryWriter::drop_problem(std::string_view problem_id) {
  const ProblemPin problem = problems_.find(problem_id);
  const auto lock = problem ? std::unique_lock(problem->writer) : std::unique_lock<std::mutex>();
  pool_.remove(problem_hash(problem_id), std::nullopt, {});
  if (!problem || problem->rollouts.empty()) return false;
  problem->clear();
  return true;
}

}  // namespace das

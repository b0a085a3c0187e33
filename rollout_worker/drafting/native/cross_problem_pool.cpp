#include "cross_problem_pool.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

namespace das {

namespace {

// A segment holds at most one such part of the pool.
constexpr std::size_t kSegmentParts = 4;

// One call of add() contributes at most one such part of the pool.
constexpr std::size_t kCallParts = 16;

std::uint64_t hash_of(std::string_view text, std::uint64_t seed) {
  std::uint64_t hash = seed ^ text.size();
  for (const char character : text) {
    hash = (hash ^ static_cast<unsigned char>(character)) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

std::uint32_t problem_hash(std::string_view problem) { return static_cast<std::uint32_t>(hash_of(problem, 0)); }

std::uint64_t pool_document_id(std::string_view problem, std::string_view rollout) {
  return hash_of(rollout, hash_of(problem, 0));
}

CrossProblemPool::CrossProblemPool(const std::shared_ptr<ByteCounter>& total, std::size_t depth, std::size_t max_tokens,
                                   BackgroundThread& background)
    : counter_(total), depth_(depth), max_tokens_(max_tokens), background_(background), document_ids_(total.get()) {}

std::size_t CrossProblemPool::tokens() const {
  const auto segments = segments_.load();
  return segments ? segments->tokens() : 0;
}

SegmentList CrossProblemPool::list() const {
  const auto segments = segments_.load();
  return segments ? SegmentList(segments->list.begin(), segments->list.end()) : SegmentList();
}

std::span<const Document> CrossProblemPool::last_of(std::span<const Document> documents) const {
  std::size_t tokens = 0;
  std::size_t first = documents.size();
  while (first > 0 && (tokens += documents[first - 1].tokens.size()) <= max_tokens_ / kCallParts) --first;
  return documents.subspan(std::min(first, documents.size() - std::min<std::size_t>(1, documents.size())));
}

void CrossProblemPool::add(std::span<const Document> documents) {
  if (!is_enabled()) return;
  documents = last_of(documents);
  const std::size_t limit = max_tokens_ / kSegmentParts;
  const std::lock_guard lock(writer_);
  SegmentList list = this->list();
  std::vector<Document> part;
  std::vector<std::uint64_t> ids;
  std::size_t tokens = 0;
  const auto finish_part = [&] {
    if (!part.empty()) list.push_back(Segment::build(counter_, part, depth_));
    part.clear();
    tokens = 0;
  };
  for (const Document& document : documents) {
    if (document.tokens.size() > limit || document_ids_.contains(document.id)) continue;
    if (tokens + document.tokens.size() > limit) finish_part();
    part.push_back(document);
    ids.push_back(document.id);
    tokens += document.tokens.size();
  }
  finish_part();
  publish(std::move(list));
  document_ids_.insert(ids.begin(), ids.end());
}

void CrossProblemPool::publish(SegmentList list) {
  remove_oldest(list);
  const bool should_merge = !merging_ && first_to_merge(list) < list.size();
  segments_.store(list.empty() ? nullptr : std::make_shared<const Segments>(counter_, list));
  if (should_merge) merging_ = background_.submit([this] { merge(); });
}

void CrossProblemPool::remove_oldest(SegmentList& list) {
  std::size_t tokens = 0;
  for (const auto& segment : list) tokens += segment->tokens();
  while (tokens > max_tokens_) {
    std::vector<Document> documents;
    std::vector<std::unique_ptr<Token[]>> text;
    list.front()->copy_documents(documents, text);
    for (const Document& document : documents) document_ids_.erase(document.id);
    tokens -= list.front()->tokens();
    list.erase(list.begin());
  }
}

std::size_t CrossProblemPool::first_to_merge(const SegmentList& list) const {
  if (list.size() < 2) return list.size();
  const std::size_t limit = max_tokens_ / kSegmentParts;
  std::size_t first = list.size() - 1;
  std::size_t tokens = list[first]->tokens();
  for (; first > 0; --first) {
    const std::size_t before = list[first - 1]->tokens();
    if (before >= kSegmentGrowth * tokens || tokens + before > limit) break;
    tokens += before;
  }
  return first + 1 < list.size() ? first : list.size();
}

void CrossProblemPool::merge() {
  std::unique_lock lock(writer_);
  SegmentList chosen = list();
  chosen.erase(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(first_to_merge(chosen)));
  removed_meanwhile_.clear();
  // Build without the lock, so that no writer waits.
  lock.unlock();
  std::vector<Document> documents;
  std::vector<std::unique_ptr<Token[]>> text;
  std::shared_ptr<const Segment> merged;
  try {
    for (const auto& segment : chosen) segment->copy_documents(documents, text);
    if (!documents.empty()) merged = Segment::build(counter_, documents, depth_);
  } catch (const std::exception&) {
    lock.lock();
    merging_ = false;
    throw;
  }
  lock.lock();
  merging_ = false;
  SegmentList now = list();
  const auto first = chosen.empty() ? now.end() : std::find(now.begin(), now.end(), chosen.front());
  if (first == now.end()) return;  // the pool was cleared, or the segments were the oldest and were removed
  if (merged) {
    for (const Document& document : documents) {
      const bool was_removed =
          std::find(removed_meanwhile_.begin(), removed_meanwhile_.end(), document.id) != removed_meanwhile_.end();
      std::vector<std::uint64_t> removed;
      if (was_removed) {
        merged->remove(document.problem_hash, std::numeric_limits<std::int64_t>::min(), {&document.id, 1}, removed);
      }
    }
    *first = merged;
  }
  now.erase(merged ? first + 1 : first, first + static_cast<std::ptrdiff_t>(chosen.size()));
  publish(std::move(now));
}

void CrossProblemPool::remove(std::uint32_t problem_hash, std::optional<std::int64_t> before,
                              std::span<const std::uint64_t> ids) {
  if (!is_enabled()) return;
  const std::lock_guard lock(writer_);
  std::vector<std::uint64_t> removed;
  for (const auto& segment : list()) segment->remove(problem_hash, before, ids, removed);
  for (const std::uint64_t id : removed) document_ids_.erase(id);
  if (merging_) removed_meanwhile_.insert(removed_meanwhile_.end(), removed.begin(), removed.end());
}

void CrossProblemPool::clear() {
  const std::lock_guard lock(writer_);
  decltype(document_ids_)(counter_.get()).swap(document_ids_);
  segments_.store(nullptr);
}

}  // namespace das

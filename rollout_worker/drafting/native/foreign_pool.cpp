#include "foreign_pool.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

namespace das {

namespace {

constexpr std::size_t kParts = 4;
constexpr std::size_t kShare = 16;  // of a pool, that one call may bring

}  // namespace

ForeignPool::ForeignPool(const std::shared_ptr<ByteCounter>& total, std::size_t depth, std::size_t most_tokens,
                         Background& background)
    : counter_(total), depth_(depth), most_tokens_(most_tokens), background_(background), members_(total.get()) {}

std::size_t ForeignPool::tokens() const {
  const auto segments = segments_.load();
  return segments ? segments->tokens() : 0;
}

SegmentList ForeignPool::list() const {
  const auto segments = segments_.load();
  return segments ? SegmentList(segments->list.begin(), segments->list.end()) : SegmentList();
}

std::span<const Document> ForeignPool::last_of(std::span<const Document> documents) const {
  std::size_t tokens = 0;
  std::size_t first = documents.size();
  while (first > 0 && (tokens += documents[first - 1].tokens.size()) <= most_tokens_ / kShare) --first;
  return documents.subspan(std::min(first, documents.size() - std::min<std::size_t>(1, documents.size())));
}

void ForeignPool::add(std::span<const Document> documents) {
  if (!exists()) return;
  documents = last_of(documents);
  const std::size_t most = most_tokens_ / kParts;
  const std::lock_guard lock(writer_);
  SegmentList list = this->list();
  std::vector<Document> part;
  std::vector<std::uint64_t> numbers;
  std::size_t tokens = 0;
  const auto finish = [&] {
    if (!part.empty()) list.push_back(Segment::build(counter_, part, depth_));
    part.clear();
    tokens = 0;
  };
  for (const Document& document : documents) {
    if (document.tokens.size() > most || members_.contains(document.number)) continue;
    if (tokens + document.tokens.size() > most) finish();
    part.push_back(document);
    numbers.push_back(document.number);
    tokens += document.tokens.size();
  }
  finish();
  publish(std::move(list));
  members_.insert(numbers.begin(), numbers.end());
}

void ForeignPool::publish(SegmentList list) {
  remove_oldest(list);
  const bool should_merge = !merging_ && mergeable(list) < list.size();
  segments_.store(list.empty() ? nullptr : std::make_shared<const Segments>(counter_, list));
  if (should_merge) merging_ = background_.later([this] { merge(); });
}

void ForeignPool::remove_oldest(SegmentList& list) {
  std::size_t tokens = 0;
  for (const auto& segment : list) tokens += segment->tokens();
  while (tokens > most_tokens_) {
    std::vector<Document> documents;
    std::vector<std::unique_ptr<Token[]>> text;
    list.front()->copy_documents(documents, text);
    for (const Document& document : documents) members_.erase(document.number);
    tokens -= list.front()->tokens();
    list.erase(list.begin());
  }
}

std::size_t ForeignPool::mergeable(const SegmentList& list) const {
  if (list.size() < 2) return list.size();
  const std::size_t most = most_tokens_ / kParts;
  std::size_t first = list.size() - 1;
  std::size_t tokens = list[first]->tokens();
  for (; first > 0; --first) {
    const std::size_t before = list[first - 1]->tokens();
    if (before >= kSegmentGrowth * tokens || tokens + before > most) break;
    tokens += before;
  }
  return first + 1 < list.size() ? first : list.size();
}

void ForeignPool::merge() {
  std::unique_lock lock(writer_);
  SegmentList chosen = list();
  chosen.erase(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(mergeable(chosen)));
  forgotten_.clear();
  // Nobody who adds or drops waits while it is built.
  lock.unlock();
  std::vector<Document> documents;
  std::vector<std::unique_ptr<Token[]>> text;
  std::shared_ptr<const Segment> one;
  try {
    for (const auto& segment : chosen) segment->copy_documents(documents, text);
    if (!documents.empty()) one = Segment::build(counter_, documents, depth_);
  } catch (const std::exception&) {
    lock.lock();
    merging_ = false;
    throw;
  }
  lock.lock();
  merging_ = false;
  SegmentList now = list();
  const auto first = chosen.empty() ? now.end() : std::find(now.begin(), now.end(), chosen.front());
  if (first == now.end()) return;  // cleared, or so much was added that it has left
  if (one) {
    for (const Document& document : documents) {
      const bool gone = std::find(forgotten_.begin(), forgotten_.end(), document.number) != forgotten_.end();
      std::vector<std::uint64_t> told;
      if (gone) one->forget(document.origin, std::numeric_limits<std::int64_t>::min(), {&document.number, 1}, told);
    }
    *first = one;
  }
  now.erase(one ? first + 1 : first, first + static_cast<std::ptrdiff_t>(chosen.size()));
  publish(std::move(now));
}

void ForeignPool::forget(std::uint32_t origin, std::optional<std::int64_t> before,
                         std::span<const std::uint64_t> numbers) {
  if (!exists()) return;
  const std::lock_guard lock(writer_);
  std::vector<std::uint64_t> forgotten;
  for (const auto& segment : list()) segment->forget(origin, before, numbers, forgotten);
  for (const std::uint64_t number : forgotten) members_.erase(number);
  if (merging_) forgotten_.insert(forgotten_.end(), forgotten.begin(), forgotten.end());
}

void ForeignPool::clear() {
  const std::lock_guard lock(writer_);
  decltype(members_)(counter_.get()).swap(members_);
  segments_.store(nullptr);
}

}  // namespace das

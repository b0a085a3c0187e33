#include "request.hpp"

#include <string>
#include <utility>

#include "cross_problem_pool.hpp"

namespace das {

namespace {

// When the live texts of a problem exceed this number of tokens, new requests share new ones. Rollouts that ended
// before are in the history by then, or will soon be.
constexpr std::size_t kMaxLiveTokens = std::size_t{1} << 20;

}  // namespace

Request::Request(const IndexBytes& bytes, ProblemPin pin, std::size_t depth, const RequestOptions& options,
                 BackgroundThread* background)
    : charge(std::make_shared<ByteCounter>(bytes.all, bytes.in_use), sizeof(Request)),
      prompt_tokens(static_cast<std::int64_t>(options.prompt.size())),
      limits(options.limits),
      pending(charge.counter().get()),
      prepared(charge.counter().get()),
      drafts{DraftRecord(charge.counter().get()), DraftRecord(charge.counter().get())},
      problem(std::move(pin)),
      sources(options.sources),
      problem_hash(das::problem_hash(problem.id())),
      stop_tokens(options.stop_tokens.begin(), options.stop_tokens.end(), charge.counter().get()),
      response(depth, charge.counter().get()),
      own_text(depth, charge.counter().get()),
      live_backlog(charge.counter().get()),
      anchors(charge.counter().get()),
      token_sources(charge.counter().get()) {
  const auto all = options.prompt;
  const auto context = all.last(std::min({options.context_length, depth, all.size()}));
  if (context.empty()) response.push(kBoundary);
  for (const Token token : context) response.push(token);
  if (sources.self && !all.empty()) {
    for (const Token token : all.last(std::min(depth, all.size()))) own_text.push(token);
    prompt = problem->index_prompt(all, depth, background);
  }
  if (sources.siblings) {
    const std::lock_guard lock(problem->live);
    if (!problem->live_texts || problem->live_texts->texts.tokens() > kMaxLiveTokens) {
      problem->live_texts = std::make_shared<SharedLiveTexts>(problem->live_bytes);
    }
    live_texts = problem->live_texts;
    text_id = live_texts->texts.begin(response.tokens());
  } else if (sources.self) {
    live_texts = std::make_shared<SharedLiveTexts>(charge.counter());
    text_id = live_texts->texts.begin(response.tokens());
  }
}

void Request::append_own(std::span<const Token> tokens, std::span<const Anchor> new_anchors) {
  if (!new_anchors.empty()) anchors.assign(new_anchors.begin(), new_anchors.end());
  response.push(tokens);
  if (prompt) own_text.push(tokens);
}

void Request::append_live(std::span<const Token> tokens, bool is_urgent) {
  if (!live_texts) return;
  std::unique_lock writing(problem->live, std::defer_lock);
  if (sources.siblings && !is_urgent) writing.lock();
  if (sources.siblings && is_urgent && !writing.try_lock()) {
    live_backlog.insert(live_backlog.end(), tokens.begin(), tokens.end());
    return;
  }
  live_texts->texts.append(text_id, live_backlog);
  live_backlog.clear();
  live_texts->texts.append(text_id, tokens);
}

Request::Verification Request::take_verification(std::int64_t new_num_tokens, std::uint64_t newly_verified) {
  if (left_out.num_tokens.load(std::memory_order_relaxed) > 0) {
    const std::int32_t earlier = left_out.verified_at.load(std::memory_order_relaxed);
    if (earlier > num_tokens()) {
      new_num_tokens = std::min<std::int64_t>(new_num_tokens, earlier);
      newly_verified = left_out.verified.load(std::memory_order_relaxed);
    }
    left_out.num_tokens.store(0, std::memory_order_relaxed);
    left_out.verified.store(0, std::memory_order_relaxed);
  }
  const auto verified = std::min<std::uint64_t>(newly_verified, received().length);
  // The step has also sampled a token after those that it has accepted.
  return {verified, std::min(verified, static_cast<std::uint64_t>(new_num_tokens - num_tokens() - 1))};
}

void Request::close() {
  is_closed = true;
  if (sources.siblings) {
    const std::lock_guard writing(problem->live);
    live_texts.reset();
    // If only the problem still holds the texts, no open request searches them any more.
    if (problem->live_texts.use_count() == 1) problem->live_texts.reset();
  }
}

RequestTable::Handle RequestTable::insert(std::shared_ptr<Request> request) {
  const std::lock_guard lock(mutex_);
  if (free_indices_.empty()) {
    if (static_cast<Handle>(entries_.size()) == kMaxEntries)
      throw std::length_error("more than 2^24 requests are open");
    free_indices_.reserve(entries_.size() + 1);  // so that neither this call nor remove() can fail halfway
    entries_.emplace_back();
    free_indices_.push_back(static_cast<Handle>(entries_.size()) - 1);
  }
  const Handle index = free_indices_.back();
  free_indices_.pop_back();
  const Handle handle = next_serial_++ * kMaxEntries + index;
  entries_[static_cast<std::size_t>(index)] = {handle, std::move(request)};
  return handle;
}

const std::shared_ptr<Request>& RequestTable::at(Handle handle) const {
  const auto index = static_cast<std::size_t>(handle % kMaxEntries);
  if (handle < 0 || index >= entries_.size() || entries_[index].handle != handle) {
    throw UnknownRequest("no open request has the handle " + std::to_string(handle) +
                         "; it was closed, or open() of this index did not return it");
  }
  return entries_[index].request;
}

std::shared_ptr<Request> RequestTable::find(Handle handle) const {
  const std::lock_guard lock(mutex_);
  return at(handle);
}

std::vector<std::shared_ptr<Request>> RequestTable::find(std::span<const Handle> handles) const {
  std::vector<std::shared_ptr<Request>> requests;
  requests.reserve(handles.size());
  const std::lock_guard lock(mutex_);
  for (const Handle handle : handles) requests.push_back(at(handle));
  return requests;
}

std::shared_ptr<Request> RequestTable::remove(Handle handle) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Request> request = at(handle);
  entries_[static_cast<std::size_t>(handle % kMaxEntries)] = {};
  free_indices_.push_back(handle % kMaxEntries);
  return request;
}

}  // namespace das

#include "suffix_index.hpp"

#include <algorithm>
#include <cmath>
#include <thread>

namespace das {

namespace {

// Whoever knows a place where so many tokens are the same asks no foreign rollouts.
constexpr std::size_t kEnoughMatch = 16;

// Matches so long tell which rollouts of the history a request goes along with; for so many tokens behind them they are
// looked at wherever they match at all.
constexpr std::size_t kAnchorMatch = 4;
constexpr std::size_t kAnchorHolds = 64;

// What is left of a segment is built anew if it is less than its so manieth part.
constexpr std::size_t kSmallRest = 4;

constexpr std::int64_t kNoGeneration = std::numeric_limits<std::int64_t>::min();

// As many segments of a problem wait for the background to merge them.
constexpr std::size_t kMostSegments = 12;

// Live texts of a problem are begun anew beyond so many tokens; what is finished by then is in the history, or soon is.
constexpr std::size_t kMostLive = std::size_t{1} << 20;

// A rollout as it is indexed: behind as much of its context as is compared.
Document document_of(const Rollout& rollout, std::uint64_t number, std::size_t depth,
                     std::vector<std::unique_ptr<Token[]>>& text) {
  const auto context = rollout.context.last(std::min(depth, rollout.context.size()));
  if (context.empty()) return {rollout.generation, number, 0, rollout.tokens, rollout.reward};
  const std::size_t length = context.size() + rollout.tokens.size();
  text.push_back(std::make_unique<Token[]>(length));
  std::copy(rollout.tokens.begin(), rollout.tokens.end(), std::copy(context.begin(), context.end(), text.back().get()));
  return {rollout.generation, number, context.size(), {text.back().get(), length}, rollout.reward};
}

std::uint64_t hash_of(std::string_view text, std::uint64_t seed) {
  std::uint64_t hash = seed ^ text.size();
  for (const char one : text) {
    hash = (hash ^ static_cast<unsigned char>(one)) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 29;
  }
  return hash;
}

// How the pool knows a problem, and a rollout of it; the same after the problem was evicted and rebuilt.
std::uint32_t origin_of(std::string_view problem) { return static_cast<std::uint32_t>(hash_of(problem, 0)); }
std::uint64_t pool_number(std::string_view problem, std::string_view rollout) {
  return hash_of(rollout, hash_of(problem, 0));
}

// One segment of all documents of some, the oldest first: where contexts are the same, newer ones are found first.
std::shared_ptr<const Segment> rebuilt(const std::shared_ptr<ByteCounter>& counter,
                                       std::span<const std::shared_ptr<const Segment>> segments, std::size_t depth) {
  std::vector<Document> documents;
  std::vector<std::unique_ptr<Token[]>> text;
  for (const auto& segment : segments) segment->copy_documents(documents, text);
  std::sort(documents.begin(), documents.end(),
            [](const Document& a, const Document& b) { return a.number < b.number; });
  return Segment::build(counter, documents, depth);
}

bool should_merge(const Segments& segments) {
  for (std::size_t i = 1; i < segments.list.size(); ++i) {
    if (segments.list[i]->tokens() < kSegmentGrowth * segments.list[i - 1]->tokens()) return true;
  }
  return false;
}

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

SuffixIndex::Problem::Problem(const std::shared_ptr<ByteCounter>& total)
    : charge(std::make_shared<ByteCounter>(total), sizeof(Problem)), rollouts(charge.counter().get()) {
  history.store(std::make_shared<const Segments>(charge.counter()));
}

void SuffixIndex::Problem::rewarded(float reward, int count) {
  if (std::isnan(reward)) return;
  with_reward += count;
  rewards = with_reward == 0 ? 0.0 : rewards + count * static_cast<double>(reward);
  mean_reward.store(with_reward == 0 ? 0.0F : static_cast<float>(rewards / static_cast<double>(with_reward)));
}

SuffixIndex::Request::Request(const std::shared_ptr<ByteCounter>& total, Pin pinned, std::size_t depth,
                              const Opening& opening)
    : charge(std::make_shared<ByteCounter>(total), sizeof(Request)),
      problem(std::move(pinned)),
      sources(opening.sources),
      origin(origin_of(problem.id())),
      ends(opening.ends.begin(), opening.ends.end(), charge.counter().get()),
      response(depth, charge.counter().get()),
      own(depth, charge.counter().get()),
      anchors(charge.counter().get()),
      next_anchors(charge.counter().get()),
      positions(charge.counter().get()) {}

SuffixIndex::Pin::~Pin() {
  if (index_ == nullptr) return;
  const std::lock_guard lock(index_->problems_mutex_);
  Problem& problem = *place_->second;
  if (--problem.pins > 0 || !problem.empty.load()) return;
  index_->by_use_.erase(problem.use);
  index_->problems_.erase(place_);
}

SuffixIndex::SuffixIndex(std::size_t depth, std::size_t threads, Limits limits)
    : depth_(depth),
      limits_(limits),
      bytes_(std::make_shared<ByteCounter>()),
      pool_(bytes_, depth, limits.pool_tokens, background_),
      workers_(threads),
      problems_(bytes_.get()) {}

SuffixIndex::Pin SuffixIndex::pin(std::string_view problem, bool use) {
  const std::lock_guard lock(problems_mutex_);
  auto place = problems_.find(problem);
  if (place == problems_.end()) {
    if (!use) return {};
    place = problems_.emplace(problem, std::make_unique<Problem>(bytes_)).first;
    try {
      place->second->use = by_use_.insert(by_use_.end(), place);
    } catch (...) {
      problems_.erase(place);
      throw;
    }
  } else if (use) {
    by_use_.splice(by_use_.end(), by_use_, place->second->use);
  }
  ++place->second->pins;
  return {*this, place};
}

std::size_t SuffixIndex::add(std::string_view problem_id, std::span<const Rollout> rollouts) {
  std::vector<Document> documents;
  std::vector<std::unique_ptr<Token[]>> text;
  std::vector<std::uint64_t> pooled;
  std::size_t added = 0;
  {
    const Pin problem = pin(problem_id, true);
    const std::lock_guard lock(problem->writer);
    // Collected aside, so that a failing build leaves the problem as it was.
    Rollouts fresh(problem->rollouts.get_allocator());
    std::int64_t newest = std::numeric_limits<std::int64_t>::min();
    for (const Rollout& rollout : rollouts) {
      if (problem->rollouts.contains(rollout.id)) continue;
      const std::uint64_t number = next_number_++;
      if (!fresh.emplace(rollout.id, RolloutRecord{rollout.generation, number, rollout.reward}).second) continue;
      newest = std::max(newest, rollout.generation);
      if (!rollout.tokens.empty()) documents.push_back(document_of(rollout, number, depth_, text));
      if (pool_.exists() && !rollout.tokens.empty()) pooled.push_back(pool_number(problem_id, rollout.id));
    }
    added = fresh.size();
    if (added == 0) return 0;
    for (std::int64_t known = newest_.load(); known < newest && !newest_.compare_exchange_weak(known, newest);) {
    }
    std::shared_ptr<const Segments> next;
    if (!documents.empty()) {
      const auto history = problem->history.load();
      SegmentList segments(history->list.begin(), history->list.end());
      segments.push_back(Segment::build(problem->charge.counter(), documents, depth_));
      next = arranged(*problem, std::move(segments));
    }
    for (const auto& [id, record] : fresh) problem->rewarded(record.reward, 1);
    problem->rollouts.merge(fresh);
    problem->empty.store(false);
    if (next) install(problem_id, *problem, std::move(next));
    if (pool_.exists()) {
      for (std::size_t i = 0; i < documents.size(); ++i) {
        documents[i].number = pooled[i];
        documents[i].origin = origin_of(problem_id);
      }
      pool_.add(documents);
    }
  }
  if (over()) {
    evict_later();
    settle();
  }
  return added;
}

std::size_t SuffixIndex::set_rewards(std::string_view problem_id,
                                     std::span<const std::pair<std::string_view, float>> rewards) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return 0;
  const std::lock_guard lock(problem->writer);
  const auto history = problem->history.load();
  std::size_t known = 0;
  for (const auto& [id, reward] : rewards) {
    const auto place = problem->rollouts.find(id);
    if (place == problem->rollouts.end()) continue;
    ++known;
    if (place->second.reward == reward) continue;  // most are told again and again
    problem->rewarded(place->second.reward, -1);
    problem->rewarded(reward, 1);
    place->second.reward = reward;
    for (const auto& segment : history->list) {
      if (segment->set_reward(place->second.number, reward)) break;
    }
  }
  return known;
}

std::shared_ptr<const Segments> SuffixIndex::arranged(const Problem& problem, SegmentList segments) const {
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a->tokens() < b->tokens(); });
  return std::make_shared<const Segments>(problem.charge.counter(), segments);
}

void SuffixIndex::install(std::string_view id, Problem& problem, std::shared_ptr<const Segments> segments) noexcept {
  const bool many = segments->list.size() > kMostSegments;
  const bool should = should_merge(*segments);
  problem.history.store(std::move(segments));
  try {
    if (many) return merge(problem);
    if (problem.merging || !should) return;
    problem.merging = background_.later([this, name = std::string(id)] {
      const Pin pinned = pin(name, false);
      if (!pinned) return;
      const std::lock_guard lock(pinned->writer);
      pinned->merging = false;
      merge(*pinned);
    });
  } catch (const std::exception&) {
    // Out of memory: they stay as they are, and the next change tries again.
  }
}

void SuffixIndex::merge(Problem& problem) const {
  const auto before = problem.history.load();
  SegmentList list;
  SegmentList group;
  std::size_t tokens = 0;
  const auto finish_group = [&] {
    if (group.size() > 1) {
      list.push_back(rebuilt(problem.charge.counter(), group, depth_));
    } else if (!group.empty()) {
      list.push_back(group.front());
    }
    group.clear();
    tokens = 0;
  };
  for (const auto& segment : before->list) {  // the smallest first
    if (tokens > 0 && segment->tokens() >= kSegmentGrowth * tokens) finish_group();
    tokens += segment->tokens();
    group.push_back(segment);
  }
  finish_group();
  if (list.size() == before->list.size()) return;
  problem.history.store(std::make_shared<const Segments>(problem.charge.counter(), list));
}

void SuffixIndex::drop(std::string_view id, Problem& problem, std::span<const Rollouts::iterator> rollouts) {
  std::vector<std::uint64_t> numbers;
  for (const auto& rollout : rollouts) numbers.push_back(rollout->second.number);
  std::sort(numbers.begin(), numbers.end());
  const auto history = problem.history.load();
  SegmentList segments;
  for (const auto& segment : history->list) {
    if (!segment->contains_any(numbers)) {
      segments.push_back(segment);
      continue;
    }
    auto rest = segment->without(numbers);
    // Its look-up tables are still those of all.
    if (rest->tokens() < segment->tokens() / kSmallRest) rest = rebuilt(problem.charge.counter(), {&rest, 1}, depth_);
    if (rest->tokens() > 0) segments.push_back(std::move(rest));
  }
  auto next = arranged(problem, std::move(segments));
  for (const auto& rollout : rollouts) {
    problem.rewarded(rollout->second.reward, -1);
    problem.rollouts.erase(rollout);
  }
  problem.empty.store(problem.rollouts.empty());
  install(id, problem, std::move(next));
}

bool SuffixIndex::drop_rollout(std::string_view problem_id, std::string_view rollout_id) {
  const Pin problem = pin(problem_id, false);
  const auto lock = problem ? std::unique_lock(problem->writer) : std::unique_lock<std::mutex>();
  const std::uint64_t pooled = pool_number(problem_id, rollout_id);
  pool_.forget(origin_of(problem_id), kNoGeneration, {&pooled, 1});  // where it is even after an eviction
  if (!problem) return false;
  const auto rollout = problem->rollouts.find(rollout_id);
  if (rollout == problem->rollouts.end()) return false;
  drop(problem_id, *problem, {&rollout, 1});
  return true;
}

std::size_t SuffixIndex::drop_before(std::string_view problem_id, std::int64_t generation) {
  const Pin problem = pin(problem_id, false);
  const auto lock = problem ? std::unique_lock(problem->writer) : std::unique_lock<std::mutex>();
  pool_.forget(origin_of(problem_id), generation, {});
  if (!problem) return 0;
  std::vector<Rollouts::iterator> rollouts;
  for (auto rollout = problem->rollouts.begin(); rollout != problem->rollouts.end(); ++rollout) {
    if (rollout->second.generation < generation) rollouts.push_back(rollout);
  }
  if (!rollouts.empty()) drop(problem_id, *problem, rollouts);
  return rollouts.size();
}

bool SuffixIndex::drop_problem(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  const auto lock = problem ? std::unique_lock(problem->writer) : std::unique_lock<std::mutex>();
  pool_.forget(origin_of(problem_id), std::nullopt, {});
  if (!problem || problem->rollouts.empty()) return false;
  clear(*problem);
  return true;
}

void SuffixIndex::clear(Problem& problem) {
  problem.history.store(std::make_shared<const Segments>(problem.charge.counter()));
  problem.rollouts.clear();
  problem.rewards = 0.0;
  problem.with_reward = 0;
  problem.mean_reward.store(0.0F);
  problem.empty.store(true);
}

void SuffixIndex::evict_later() {
  if (evicting_.exchange(true)) return;
  const bool will = background_.later([this] {
    evicting_.store(false);
    evict();
  });
  if (!will) evicting_.store(false);
}

void SuffixIndex::evict() {
  while (over()) {
    const Pin problem = least_recently_used();
    if (!problem) return pool_.clear();
    const std::lock_guard writing(problem->writer);
    if (!over()) return;
    const std::weak_ptr<const Segments> before = problem->history.load();
    clear(*problem);
    // A draft that reads it is over within microseconds, and it counts until then.
    while (!before.expired()) std::this_thread::yield();
    const std::lock_guard lock(evicted_mutex_);
    evicted_.emplace_back(problem.id());
  }
}

SuffixIndex::Pin SuffixIndex::least_recently_used() {
  const std::lock_guard lock(problems_mutex_);
  for (const bool in_use : {false, true}) {
    for (const Problems::iterator place : by_use_) {
      Problem& problem = *place->second;
      if (problem.empty.load() || (problem.pins > 0 && !in_use)) continue;
      ++problem.pins;
      return {*this, place};
    }
  }
  return {};
}

std::vector<std::string> SuffixIndex::take_evicted() {
  const std::lock_guard lock(evicted_mutex_);
  return std::exchange(evicted_, {});
}

std::vector<std::string> SuffixIndex::problems() {
  std::vector<std::string> ids;
  const std::lock_guard lock(problems_mutex_);
  for (const auto& [id, problem] : problems_) {
    if (!problem->empty.load()) ids.emplace_back(id);
  }
  return ids;
}

std::vector<std::string> SuffixIndex::rollouts(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return {};
  const std::lock_guard lock(problem->writer);
  std::vector<std::pair<std::uint64_t, std::string_view>> order;
  for (const auto& [id, record] : problem->rollouts) order.emplace_back(record.number, id);
  std::sort(order.begin(), order.end());
  std::vector<std::string> ids;
  ids.reserve(order.size());
  for (const auto& [number, id] : order) ids.emplace_back(id);
  return ids;
}

std::size_t SuffixIndex::tokens(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return 0;
  return problem->history.load()->tokens();
}

std::size_t SuffixIndex::bytes(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  return problem ? problem->charge.counter()->bytes() : 0;
}

SuffixIndex::Handle SuffixIndex::open(std::string_view problem_id, const Opening& opening) {
  const auto prompt = opening.prompt;
  auto request = std::make_shared<Request>(bytes_, pin(problem_id, true), depth_, opening);
  const auto before = prompt.last(std::min({opening.context, depth_, prompt.size()}));
  if (before.empty()) request->response.push(kStart);
  for (const Token token : before) request->response.push(token);
  if (opening.sources.self && !prompt.empty()) {
    for (const Token token : prompt.last(std::min(depth_, prompt.size()))) request->own.push(token);
    request->prompt = prompt_of(*request->problem, prompt);
  }
  if (opening.sources.siblings) {
    Problem& problem = *request->problem;
    const std::lock_guard lock(problem.live);
    if (!problem.siblings || problem.siblings->text.tokens() > kMostLive) {
      problem.siblings = std::make_shared<Siblings>(problem.charge.counter());
    }
    request->siblings = problem.siblings;
    request->number = request->siblings->text.begin(request->response.tokens());
  } else if (opening.sources.self) {
    request->siblings = std::make_shared<Siblings>(request->charge.counter());
    request->number = request->siblings->text.begin(request->response.tokens());
  }
  const std::lock_guard lock(requests_mutex_);
  if (free_places_.empty()) {
    if (static_cast<Handle>(requests_.size()) == kPlaces) throw std::length_error("more than 2^24 requests are open");
    free_places_.reserve(requests_.size() + 1);  // so that neither this nor close() fails half-way
    requests_.emplace_back();
    free_places_.push_back(static_cast<Handle>(requests_.size()) - 1);
  }
  const Handle place = free_places_.back();
  free_places_.pop_back();
  const Handle handle = serial_++ * kPlaces + place;
  requests_[static_cast<std::size_t>(place)] = {handle, std::move(request)};
  return handle;
}

std::shared_ptr<const SuffixIndex::Prompt> SuffixIndex::prompt_of(Problem& problem,
                                                                  std::span<const Token> tokens) const {
  const auto hash = hash_of(tokens);
  {
    const std::lock_guard lock(problem.live);
    auto last = problem.prompt.lock();
    if (last && last->length == tokens.size() && last->hash == hash) return last;
  }
  const Document document{.tokens = tokens};
  auto made = std::make_shared<const Prompt>(
      Prompt{tokens.size(), hash, Segment::build(problem.charge.counter(), {&document, 1}, depth_)});
  const std::lock_guard lock(problem.live);
  problem.prompt = made;
  return made;
}

const std::shared_ptr<SuffixIndex::Request>& SuffixIndex::find(Handle handle) const {
  const auto place = static_cast<std::size_t>(handle % kPlaces);
  if (handle < 0 || place >= requests_.size() || requests_[place].handle != handle) {
    throw UnknownRequest("no open request has the handle " + std::to_string(handle) +
                         "; it was closed, or is not one that open() of this index returned");
  }
  return requests_[place].request;
}

std::vector<std::shared_ptr<SuffixIndex::Request>> SuffixIndex::find(std::span<const Handle> handles) const {
  std::vector<std::shared_ptr<Request>> requests;
  requests.reserve(handles.size());
  const std::lock_guard lock(requests_mutex_);
  for (const Handle handle : handles) requests.push_back(find(handle));
  return requests;
}

void SuffixIndex::close(Handle handle) {
  std::shared_ptr<Request> request;  // destroyed after the lock is released
  {
    const std::lock_guard lock(requests_mutex_);
    request = find(handle);
    requests_[static_cast<std::size_t>(handle % kPlaces)] = {};
    free_places_.push_back(handle % kPlaces);
  }
  const std::lock_guard drafting(request->mutex);
  request->closed = true;
  if (!request->sources.siblings) return;
  const std::lock_guard lock(request->problem->live);
  request->siblings.reset();
  // Only the problem has it still: nobody is left who would look for a match.
  if (request->problem->siblings.use_count() == 1) request->problem->siblings.reset();
}

void SuffixIndex::extend(std::span<const Handle> handles, std::span<const std::span<const Token>> tokens) {
  const auto requests = find(handles);
  for (std::size_t i = 0; i < requests.size(); ++i) extend_one(*requests[i], tokens[i]);
  if (over()) evict_later();
}

void SuffixIndex::extend_one(Request& request, std::span<const Token> tokens) {
  const std::lock_guard lock(request.mutex);
  if (request.closed) return;  // meanwhile
  for (const Token token : tokens) {
    if (request.observed == request.positions.size()) break;
    const std::size_t place = request.observed++;
    const DraftPosition& position = request.positions[place];
    mixture_.learn(position, token);
    const bool accepted = position.token == token;
    if (place < request.drafted) {
      Counters& counters = counters_[static_cast<std::size_t>(position.source())];
      counters.verified.fetch_add(1, std::memory_order_relaxed);
      if (accepted) counters.accepted.fetch_add(1, std::memory_order_relaxed);
      if (position.source() == Source::history) ages_.observe(position.ages, accepted);
    }
    if (!accepted) request.observed = request.positions.size();
  }
  if (request.sources.siblings) {
    const std::lock_guard writing(request.problem->live);
    request.siblings->text.append(request.number, tokens);
  } else if (request.sources.self) {
    request.siblings->text.append(request.number, tokens);
  }
  request.length += tokens.size();
  // Where nothing matched for long, the old ones hold.
  if (!request.next_anchors.empty()) request.anchors.swap(request.next_anchors);
  request.next_anchors.clear();
  request.response.push(tokens);
  if (request.prompt) request.own.push(tokens);
}

void SuffixIndex::find_anchored(const Request& request, const Segments& history, std::vector<Occurrence>& found) const {
  for (const Anchor& anchor : request.anchors) {
    const std::size_t since = request.length - anchor.length;
    if (since > kAnchorHolds) continue;
    const auto segment = std::find_if(history.list.begin(), history.list.end(),
                                      [&](const auto& one) { return one->serial() == anchor.segment; });
    if (segment == history.list.end()) continue;
    const auto near = (*segment)->find_near(anchor.position, since, request.response.tokens());
    if (!near) continue;
    const auto known = std::find_if(found.begin(), found.end(),
                                    [&](const Occurrence& one) { return one.text.place() == near->text.place(); });
    if (known == found.end()) {
      found.push_back(*near);
    } else {
      known->anchored = true;
    }
  }
}

void SuffixIndex::anchor(Request& request, const Segments& history, std::span<const Occurrence> found) const {
  request.next_anchors.clear();
  for (const Occurrence& one : found) {
    if (request.next_anchors.size() == Mixture::kAnchors) return;
    if (one.source != Source::history || one.match < kAnchorMatch) continue;
    for (const auto& segment : history.list) {
      const auto position = segment->position_of(one);
      if (!position) continue;
      request.next_anchors.push_back({segment->serial(), *position, request.length});
      break;
    }
  }
}

void SuffixIndex::find_occurrences(const Request& request, const Segments& history, const Segments* pool,
                                   std::vector<Occurrence>& found) const {
  found.clear();
  // The longest; of equals the newest.
  const auto keep_longest = [&found](std::size_t first, std::size_t limit) {
    if (found.size() <= first + limit) return;
    const auto begin = found.begin() + static_cast<std::ptrdiff_t>(first);
    std::stable_sort(begin, found.end(), [](const Occurrence& a, const Occurrence& b) {
      return a.match != b.match ? a.match > b.match : a.generation > b.generation;
    });
    found.resize(first + limit);
  };
  const std::span<const Token> response = request.response.tokens();
  if (request.sources.history) {
    for (const auto& segment : history.list) segment->find_longest(response, Mixture::kHistoryOccurrences, found);
    keep_longest(0, Mixture::kHistoryOccurrences);
    find_anchored(request, history, found);
  }
  if (request.siblings) {
    request.siblings->text.find_longest(response, depth_, request.number,
                                        request.sources.self ? Mixture::kLiveOccurrences : 0,
                                        request.sources.siblings ? Mixture::kLiveOccurrences : 0, found);
  }
  if (request.prompt) {
    const std::size_t first = found.size();
    request.prompt->text->find_longest(request.own.tokens(), Mixture::kLiveOccurrences, found);
    for (std::size_t i = first; i < found.size(); ++i) found[i].source = Source::self;
  }
  if (!request.sources.foreign || pool == nullptr) return;
  const auto shorter = [](const Occurrence& a, const Occurrence& b) { return a.match < b.match; };
  const auto longest = std::max_element(found.begin(), found.end(), shorter);
  if (longest != found.end() && longest->match >= kEnoughMatch) return;
  const std::size_t first = found.size();
  for (const auto& segment : pool->list) {
    segment->find_foreign(response, request.origin, Mixture::kForeignOccurrences, found);
  }
  keep_longest(first, Mixture::kForeignOccurrences);
}

Draft SuffixIndex::draft_one(Request& request, std::size_t budget, double min_survival) {
  thread_local std::vector<Occurrence> occurrences;
  if (budget == 0) return {};
  const std::lock_guard lock(request.mutex);
  // Keep the segments while their text is read.
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const std::shared_ptr<const Segments> pool = pool_.segments();
  const Standpoint standpoint{newest_.load(std::memory_order_relaxed),
                              request.problem->mean_reward.load(std::memory_order_relaxed)};
  request.observed = 0;
  find_occurrences(request, *history, pool.get(), occurrences);
  anchor(request, *history, occurrences);
  request.drafted = mixture_.draft(occurrences, request.response.tokens().back(), standpoint, request.ends, budget,
                                   min_survival, request.positions);
  Draft draft;
  draft.tokens.reserve(request.drafted);
  for (std::size_t i = 0; i < request.drafted; ++i) {
    const DraftPosition& position = request.positions[i];
    const bool finished = position.source() == Source::history || position.source() == Source::foreign;
    draft.tokens.push_back(
        {position.token, position.source(), position.probability, finished ? standpoint.age(position.generation) : -1});
    counters_[static_cast<std::size_t>(position.source())].drafted.fetch_add(1, std::memory_order_relaxed);
  }
  if (request.drafted > 0) draft.match_length = request.positions.front().match;
  return draft;
}

std::vector<Draft> SuffixIndex::draft(std::span<const Handle> handles, std::span<const std::size_t> budgets,
                                      std::span<const double> min_survivals) {
  const auto requests = find(handles);
  std::vector<Draft> drafts(requests.size());
  workers_.run(requests.size(),
               [&](std::size_t i) { drafts[i] = draft_one(*requests[i], budgets[i], min_survivals[i]); });
  return drafts;
}

std::vector<FoundText> SuffixIndex::occurrences(Handle handle, std::size_t length) {
  std::shared_ptr<Request> request;
  {
    const std::lock_guard lock(requests_mutex_);
    request = find(handle);
  }
  const std::lock_guard lock(request->mutex);
  const std::shared_ptr<const Segments> history = request->problem->history.load();
  const std::shared_ptr<const Segments> pool = pool_.segments();
  std::vector<Occurrence> found;
  find_occurrences(*request, *history, pool.get(), found);
  std::vector<FoundText> texts;
  for (const Occurrence& one : found) {
    FoundText& text =
        texts.emplace_back(FoundText{one.source, one.match, one.generation, one.reward, {}, one.anchored});
    for (std::size_t i = 0; i < length && one.text.at(i) != kStart; ++i) text.tokens.push_back(one.text.at(i));
  }
  return texts;
}

SourceCounts SuffixIndex::counts(Source source) const {
  const Counters& counters = counters_[static_cast<std::size_t>(source)];
  return {counters.drafted.load(std::memory_order_relaxed), counters.verified.load(std::memory_order_relaxed),
          counters.accepted.load(std::memory_order_relaxed)};
}

}  // namespace das

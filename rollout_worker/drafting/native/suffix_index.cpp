#include "suffix_index.hpp"

#include <algorithm>

namespace das {

namespace {

constexpr std::size_t kGrowth = 4;

}  // namespace

SuffixIndex::Problem::Problem(const std::shared_ptr<ByteCounter>& total)
    : charge(std::make_shared<ByteCounter>(total), sizeof(Problem)), rollouts(charge.counter().get()) {
  history.store(std::make_shared<const History>(charge.counter()));
}

SuffixIndex::Request::Request(const std::shared_ptr<ByteCounter>& total, Pin pinned, std::size_t depth, bool history,
                              bool self)
    : charge(std::make_shared<ByteCounter>(total), sizeof(Request)),
      problem(std::move(pinned)),
      from_history(history),
      from_self(self),
      text(charge.counter().get()),
      own(depth, charge.counter().get()),
      candidates{Candidate(charge.counter().get()), Candidate(charge.counter().get())} {}

SuffixIndex::Pin::~Pin() {
  if (index_ == nullptr) return;
  const std::lock_guard lock(index_->problems_mutex_);
  Problem& problem = *place_->second;
  if (--problem.pins == 0 && problem.empty.load()) index_->problems_.erase(place_);
}

SuffixIndex::SuffixIndex(std::size_t max_match, std::size_t min_match)
    : max_match_(max_match),
      min_match_(min_match),
      bytes_(std::make_shared<ByteCounter>()),
      problems_(bytes_.get()),
      requests_(bytes_.get()) {
  if (min_match_ < 1 || max_match_ < min_match_) {
    throw std::invalid_argument("match lengths must satisfy 1 <= min_match <= max_match, got min_match=" +
                                std::to_string(min_match_) + " and max_match=" + std::to_string(max_match_));
  }
}

SuffixIndex::Pin SuffixIndex::pin(std::string_view problem, bool create) {
  const std::lock_guard lock(problems_mutex_);
  auto place = problems_.find(problem);
  if (place == problems_.end()) {
    if (!create) return {};
    place = problems_.emplace(problem, std::make_unique<Problem>(bytes_)).first;
  }
  ++place->second->pins;
  return {*this, place};
}

std::size_t SuffixIndex::add(std::string_view problem_id, std::span<const Rollout> rollouts) {
  const Pin problem = pin(problem_id, true);
  const std::lock_guard lock(problem->writer);
  // Collected aside, so that a failing build leaves the problem as it was.
  decltype(problem->rollouts) fresh(problem->rollouts.get_allocator());
  std::vector<Document> documents;
  std::uint64_t sequence = problem->next_sequence;
  for (const Rollout& rollout : rollouts) {
    if (problem->rollouts.contains(rollout.id)) continue;
    if (!fresh.emplace(rollout.id, RolloutRecord{rollout.generation, sequence}).second) continue;
    if (!rollout.tokens.empty()) documents.push_back({rollout.generation, sequence, rollout.tokens, false});
    ++sequence;
  }
  const std::size_t added = fresh.size();
  if (added == 0) return 0;
  if (!documents.empty()) {
    const auto history = problem->history.load();
    publish(*problem, {history->segments.begin(), history->segments.end()}, std::move(documents));
  }
  problem->rollouts.merge(fresh);
  problem->next_sequence = sequence;
  problem->empty.store(false);
  return added;
}

void SuffixIndex::publish(Problem& problem, std::vector<std::shared_ptr<const Segment>> segments,
                          std::vector<Document> documents) const {
  const auto& counter = problem.charge.counter();
  std::sort(segments.begin(), segments.end(),
            [](const auto& a, const auto& b) { return a->tokens() < b->tokens(); });
  auto next = std::make_shared<History>(counter);
  std::vector<std::shared_ptr<const Segment>> group;
  std::size_t tokens = 0;
  for (const Document& document : documents) tokens += document.tokens.size();
  const auto finish_group = [&] {
    if (documents.empty() && group.size() == 1) {
      next->segments.push_back(std::move(group.front()));
    } else if (tokens > 0) {
      for (const auto& segment : group) segment->append_documents(documents);
      next->segments.push_back(std::make_shared<const Segment>(counter, std::move(documents), max_match_));
    }
    documents.clear();
    group.clear();
    tokens = 0;
  };
  for (auto& segment : segments) {
    if (tokens > 0 && segment->tokens() >= kGrowth * tokens) finish_group();
    tokens += segment->tokens();
    group.push_back(std::move(segment));
  }
  finish_group();
  next->segments.shrink_to_fit();
  problem.history.store(std::move(next));
}

void SuffixIndex::drop(Problem& problem, std::vector<std::uint64_t> sequences) const {
  std::sort(sequences.begin(), sequences.end());
  const auto history = problem.history.load();
  std::vector<std::shared_ptr<const Segment>> segments;
  for (const auto& segment : history->segments) {
    if (!segment->contains_any(sequences)) {
      segments.push_back(segment);
      continue;
    }
    auto rest = std::make_shared<const Segment>(problem.charge.counter(), *segment, sequences);
    if (rest->tokens() > 0) segments.push_back(std::move(rest));
  }
  publish(problem, std::move(segments), {});
}

bool SuffixIndex::drop_rollout(std::string_view problem_id, std::string_view rollout_id) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return false;
  const std::lock_guard lock(problem->writer);
  const auto place = problem->rollouts.find(rollout_id);
  if (place == problem->rollouts.end()) return false;
  drop(*problem, {place->second.sequence});
  problem->rollouts.erase(place);
  problem->empty.store(problem->rollouts.empty());
  return true;
}

std::size_t SuffixIndex::drop_before(std::string_view problem_id, std::int64_t generation) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return 0;
  const std::lock_guard lock(problem->writer);
  std::vector<std::uint64_t> sequences;
  for (const auto& [id, record] : problem->rollouts) {
    if (record.generation < generation) sequences.push_back(record.sequence);
  }
  const std::size_t dropped = sequences.size();
  if (dropped == 0) return 0;
  drop(*problem, std::move(sequences));
  std::erase_if(problem->rollouts, [&](const auto& item) { return item.second.generation < generation; });
  problem->empty.store(problem->rollouts.empty());
  return dropped;
}

bool SuffixIndex::drop_problem(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return false;
  const std::lock_guard lock(problem->writer);
  if (problem->rollouts.empty()) return false;
  publish(*problem, {}, {});
  problem->rollouts.clear();
  problem->empty.store(true);
  return true;
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
  for (const auto& [id, record] : problem->rollouts) order.emplace_back(record.sequence, id);
  std::sort(order.begin(), order.end());
  std::vector<std::string> ids;
  ids.reserve(order.size());
  for (const auto& [sequence, id] : order) ids.emplace_back(id);
  return ids;
}

std::size_t SuffixIndex::tokens(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  if (!problem) return 0;
  const auto history = problem->history.load();
  std::size_t tokens = 0;
  for (const auto& segment : history->segments) tokens += segment->tokens();
  return tokens;
}

std::size_t SuffixIndex::bytes(std::string_view problem_id) {
  const Pin problem = pin(problem_id, false);
  return problem ? problem->charge.counter()->bytes() : 0;
}

SuffixIndex::Handle SuffixIndex::open(std::string_view problem, std::span<const Token> prompt, bool history,
                                      bool self) {
  auto request = std::make_shared<Request>(bytes_, pin(problem, true), max_match_, history, self);
  if (self) {
    request->text.reserve(prompt.size());
    for (const Token token : prompt) request->text.append(token);
    request->own.build(request->text);
  }
  const std::lock_guard lock(requests_mutex_);
  const Handle handle = next_handle_++;
  requests_.emplace(handle, std::move(request));
  return handle;
}

std::shared_ptr<SuffixIndex::Request> SuffixIndex::find(Handle handle) const {
  const auto place = requests_.find(handle);
  if (place == requests_.end()) {
    throw UnknownRequest("no open request has the handle " + std::to_string(handle) +
                         "; it was closed, or is not one that open() of this index returned");
  }
  return place->second;
}

void SuffixIndex::close(Handle handle) {
  std::shared_ptr<Request> request;  // destroyed after the lock is released
  const std::lock_guard lock(requests_mutex_);
  request = find(handle);
  requests_.erase(handle);
}

void SuffixIndex::extend(Handle handle, std::span<const Token> tokens) {
  std::shared_ptr<Request> request;
  {
    const std::lock_guard lock(requests_mutex_);
    request = find(handle);
  }
  const std::lock_guard lock(request->mutex);
  for (std::size_t s = 0; s < kSources; ++s) {
    Candidate& candidate = request->candidates[s];
    const bool chosen = request->chosen == static_cast<Source>(s);
    for (std::size_t i = 0; i < tokens.size() && candidate.alive; ++i) {
      const DraftPosition& position = candidate.positions[candidate.observed];
      const bool accepted = position.token == tokens[i];
      calibration_.observe(position.cell, accepted);
      if (chosen && candidate.observed < candidate.drafted) {
        counters_[s].verified.fetch_add(1, std::memory_order_relaxed);
        if (accepted) counters_[s].accepted.fetch_add(1, std::memory_order_relaxed);
      }
      ++candidate.observed;
      candidate.alive = accepted && candidate.observed < candidate.positions.size();
    }
  }
  for (const Token token : tokens) {
    if (request->from_self) request->own.add(request->text);
    request->text.append(token);
  }
  request->response_length += tokens.size();
}

void SuffixIndex::draft_from_history(Request& request, std::size_t budget, double min_survival) const {
  thread_local std::vector<Token> context;
  thread_local std::vector<Match> matches;
  thread_local std::vector<Occurrence> occurrences;
  thread_local std::vector<const Token*> next;
  // Keeps the segments while their text is read.
  const std::shared_ptr<const History> history = request.problem->history.load();

  const std::size_t length = std::min(request.response_length, max_match_);
  context.clear();
  if (length > 0) context.assign(request.text.newest(), request.text.newest() + length);
  if (length < max_match_) context.push_back(kStart);
  matches.clear();
  std::size_t longest = 0;
  for (const auto& segment : history->segments) {
    matches.push_back(segment->longest_match(context));
    longest = std::max(longest, matches.back().length);
  }
  if (longest < min_match_) return;
  occurrences.clear();
  std::size_t segments = 0;
  for (std::size_t i = 0; i < matches.size(); ++i) {
    if (matches[i].length < longest) continue;
    history->segments[i]->append_newest(matches[i], occurrences);
    ++segments;
  }
  if (segments > 1) {
    // Each segment's are in order; together they may not be, or may be too many. A document is in one segment only,
    // so a stable sort keeps its positions in order.
    std::stable_sort(occurrences.begin(), occurrences.end(), [](const Occurrence& a, const Occurrence& b) {
      return a.generation != b.generation ? a.generation > b.generation : a.sequence > b.sequence;
    });
    if (occurrences.size() > kMaxOccurrences) occurrences.resize(kMaxOccurrences);
  }
  next.clear();
  for (const Occurrence& occurrence : occurrences) next.push_back(occurrence.next);
  vote(next, Source::history, longest, budget, min_survival, calibration_,
       request.candidates[static_cast<std::size_t>(Source::history)]);
}

void SuffixIndex::draft_from_self(Request& request, std::size_t budget, double min_survival) const {
  thread_local std::vector<std::uint32_t> positions;
  thread_local std::vector<const Token*> next;
  const std::size_t length = request.own.longest_match(request.text, min_match_, positions);
  if (length == 0) return;
  next.clear();
  for (const std::uint32_t position : positions) next.push_back(request.text.context(position) - 1);
  vote(next, Source::self, length, budget, min_survival, calibration_,
       request.candidates[static_cast<std::size_t>(Source::self)]);
}

Draft SuffixIndex::draft_one(Request& request, std::size_t budget, double min_survival) {
  const std::lock_guard lock(request.mutex);
  for (Candidate& candidate : request.candidates) candidate.clear();
  request.chosen.reset();
  Draft draft;
  if (budget == 0) return draft;
  if (request.from_history) draft_from_history(request, budget, min_survival);
  if (request.from_self) draft_from_self(request, budget, min_survival);
  for (std::size_t s = 0; s < kSources; ++s) {
    const Candidate& candidate = request.candidates[s];
    if (candidate.drafted == 0) continue;
    if (!request.chosen ||
        candidate.expected > request.candidates[static_cast<std::size_t>(*request.chosen)].expected) {
      request.chosen = static_cast<Source>(s);
    }
  }
  if (!request.chosen) return draft;
  const auto chosen = static_cast<std::size_t>(*request.chosen);
  const Candidate& candidate = request.candidates[chosen];
  draft.source = request.chosen;
  draft.match_length = candidate.match_length;
  draft.tokens.reserve(candidate.drafted);
  draft.probabilities.reserve(candidate.drafted);
  for (std::size_t i = 0; i < candidate.drafted; ++i) {
    draft.tokens.push_back(candidate.positions[i].token);
    draft.probabilities.push_back(candidate.positions[i].probability);
  }
  counters_[chosen].drafts.fetch_add(1, std::memory_order_relaxed);
  counters_[chosen].drafted.fetch_add(candidate.drafted, std::memory_order_relaxed);
  return draft;
}

std::vector<Draft> SuffixIndex::draft(std::span<const Handle> handles, std::span<const std::size_t> budgets,
                                      double min_survival) {
  std::vector<std::shared_ptr<Request>> requests;
  requests.reserve(handles.size());
  {
    const std::lock_guard lock(requests_mutex_);
    for (const Handle handle : handles) requests.push_back(find(handle));
  }
  std::vector<Draft> drafts;
  drafts.reserve(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    drafts.push_back(draft_one(*requests[i], budgets[i], min_survival));
  }
  return drafts;
}

SourceCounts SuffixIndex::counts(Source source) const {
  const Counters& counters = counters_[static_cast<std::size_t>(source)];
  return {counters.drafts.load(std::memory_order_relaxed), counters.drafted.load(std::memory_order_relaxed),
          counters.verified.load(std::memory_order_relaxed), counters.accepted.load(std::memory_order_relaxed)};
}

}  // namespace das

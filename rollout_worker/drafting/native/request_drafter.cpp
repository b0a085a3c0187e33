#include "request_drafter.hpp"

#include <algorithm>
#include <memory>
#include <mutex>

namespace das {

namespace {

// The cross-problem pool is searched only if no other match is this long.
constexpr std::size_t kSufficientMatch = 16;

// Matches of the history at least this long become anchors.
constexpr std::size_t kMinAnchorMatch = 4;
// An anchor is followed for this many tokens.
constexpr std::size_t kAnchorLifetime = 64;

}  // namespace

void RequestDrafter::find_anchored(const Request& request, const Segments& history,
                                   std::vector<Occurrence>& found) const {
  for (const Anchor& anchor : request.anchors) {
    const std::size_t distance = request.response_length - anchor.response_length;
    if (distance > kAnchorLifetime) continue;
    const auto segment = std::find_if(history.list.begin(), history.list.end(),
                                      [&](const auto& segment) { return segment->serial() == anchor.segment; });
    if (segment == history.list.end()) continue;
    const auto near = (*segment)->find_near(anchor.position, distance, request.response.tokens());
    if (!near) continue;
    const auto known = std::find_if(found.begin(), found.end(), [&](const Occurrence& occurrence) {
      return occurrence.text.address() == near->text.address();
    });
    if (known == found.end()) {
      found.push_back(*near);
    } else {
      known->anchored = true;
    }
  }
}

void RequestDrafter::set_anchors(Request& request, const Segments& history, std::span<const Occurrence> found) const {
  request.next_anchors.clear();
  for (const Occurrence& occurrence : found) {
    if (request.next_anchors.size() == Mixture::kAnchors) return;
    if (occurrence.source != Source::history || occurrence.match < kMinAnchorMatch) continue;
    for (const auto& segment : history.list) {
      const auto position = segment->position_of(occurrence);
      if (!position) continue;
      request.next_anchors.push_back({segment->serial(), *position, request.response_length});
      break;
    }
  }
}

void RequestDrafter::find_occurrences(const Request& request, const Segments& history, const Segments* pool,
                                      std::vector<Occurrence>& found) const {
  found.clear();
  // Keeps the `limit` longest matches from `first` on; of equally long ones, the newest.
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
  if (request.live_texts) {
    request.live_texts->texts.find_longest(response, depth_, request.text_id,
                                           request.sources.self ? Mixture::kLiveOccurrences : 0,
                                           request.sources.siblings ? Mixture::kLiveOccurrences : 0, found);
  }
  if (request.prompt) {
    const std::size_t first = found.size();
    request.prompt->segment->find_longest(request.own_text.tokens(), Mixture::kLiveOccurrences, found);
    for (std::size_t i = first; i < found.size(); ++i) found[i].source = Source::self;
  }
  if (!request.sources.cross_problem || pool == nullptr) return;
  const auto is_shorter = [](const Occurrence& a, const Occurrence& b) { return a.match < b.match; };
  const auto longest = std::max_element(found.begin(), found.end(), is_shorter);
  if (longest != found.end() && longest->match >= kSufficientMatch) return;
  const std::size_t first = found.size();
  for (const auto& segment : pool->list) {
    segment->find_cross_problem(response, request.problem_hash, Mixture::kCrossProblemOccurrences, found);
  }
  keep_longest(first, Mixture::kCrossProblemOccurrences);
}

Draft RequestDrafter::draft(Request& request, std::size_t budget, double min_survival) {
  thread_local std::vector<Occurrence> occurrences;
  if (budget == 0) return {};
  const std::lock_guard lock(request.mutex);
  // These keep the segments alive while their text is read.
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const std::shared_ptr<const Segments> pool = pool_.segments();
  const Baseline baseline{problems_.newest_generation(), request.problem->mean_reward.load(std::memory_order_relaxed)};
  request.num_observed = 0;
  find_occurrences(request, *history, pool.get(), occurrences);
  set_anchors(request, *history, occurrences);
  request.num_drafted = mixture_.draft(occurrences, request.response.tokens().back(), baseline, request.stop_tokens,
                                       budget, min_survival, request.positions);
  Draft draft;
  draft.tokens.reserve(request.num_drafted);
  for (std::size_t i = 0; i < request.num_drafted; ++i) {
    const DraftPosition& position = request.positions[i];
    const bool is_finished = position.source() == Source::history || position.source() == Source::cross_problem;
    draft.tokens.push_back({position.token, position.source(), position.probability,
                            is_finished ? baseline.age(position.generation) : -1});
    counters_[static_cast<std::size_t>(position.source())].drafted.fetch_add(1, std::memory_order_relaxed);
  }
  if (request.num_drafted > 0) draft.match_length = request.positions.front().match_length;
  return draft;
}

void RequestDrafter::extend(Request& request, std::span<const Token> tokens) {
  const std::lock_guard lock(request.mutex);
  if (request.is_closed) return;  // another thread has closed it in the meantime
  observe(request, tokens);
  request.append(tokens);
}

void RequestDrafter::observe(Request& request, std::span<const Token> tokens) {
  for (const Token token : tokens) {
    if (request.num_observed == request.positions.size()) break;
    const std::size_t index = request.num_observed++;
    const DraftPosition& position = request.positions[index];
    mixture_.learn(position, token);
    const bool is_accepted = position.token == token;
    if (index < request.num_drafted) {
      Counters& counters = counters_[static_cast<std::size_t>(position.source())];
      counters.verified.fetch_add(1, std::memory_order_relaxed);
      if (is_accepted) counters.accepted.fetch_add(1, std::memory_order_relaxed);
      if (position.source() == Source::history) age_counts_.observe(position.age_bits, is_accepted);
    }
    if (!is_accepted) request.num_observed = request.positions.size();
  }
}

std::vector<OccurrenceText> RequestDrafter::occurrences(Request& request, std::size_t length) const {
  const std::lock_guard lock(request.mutex);
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const std::shared_ptr<const Segments> pool = pool_.segments();
  std::vector<Occurrence> found;
  find_occurrences(request, *history, pool.get(), found);
  std::vector<OccurrenceText> texts;
  for (const Occurrence& occurrence : found) {
    OccurrenceText& text = texts.emplace_back(OccurrenceText{
        occurrence.source, occurrence.match, occurrence.generation, occurrence.reward, {}, occurrence.anchored});
    for (std::size_t i = 0; i < length && occurrence.text.at(i) != kBoundary; ++i)
      text.tokens.push_back(occurrence.text.at(i));
  }
  return texts;
}

SourceCounts RequestDrafter::counts(Source source) const {
  const Counters& counters = counters_[static_cast<std::size_t>(source)];
  return {counters.drafted.load(std::memory_order_relaxed), counters.verified.load(std::memory_order_relaxed),
          counters.accepted.load(std::memory_order_relaxed)};
}

}  // namespace das

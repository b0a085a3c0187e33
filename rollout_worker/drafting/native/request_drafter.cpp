#include "request_drafter.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace das {

namespace {

// The cross-problem pool is searched only if no other match is this long, and if there are fewer other matches of a few
// tokens than it may add.
constexpr std::size_t kSufficientMatch = 16;
constexpr std::size_t kFewTokens = 2;

// Returns whether the pool need not be searched. If the draft is urgent, a history with as many occurrences as are used
// is sufficient, however short the matches are.
bool are_sufficient(std::span<const Occurrence> found, bool is_urgent) {
  std::size_t count = 0;
  std::size_t in_history = 0;
  for (const Occurrence& occurrence : found) {
    if (occurrence.match >= kSufficientMatch) return true;
    count += occurrence.match >= kFewTokens;
    in_history += occurrence.source == Source::history;
  }
  return count >= Mixture::kCrossProblemOccurrences || (is_urgent && in_history >= Mixture::kHistoryOccurrences);
}

using MatchCounts = std::array<std::uint16_t, kMaxDepth + 1>;

// Searches segments for the `limit` longest matches: calls find(segment, min_match) for each, which appends to `found`.
// Matches that are shorter than `limit` known ones are not searched for.
template <class Find>
void search(const Segments& segments, std::size_t limit, std::vector<Occurrence>& found, Find find) {
  const std::size_t first = found.size();
  std::size_t min_match = 1;
  std::size_t remaining = segments.list.size();
  // The last segments are the largest ones of a history and the newest ones of the pool.
  for (auto segment = segments.list.rbegin(); segment != segments.list.rend(); ++segment) {
    find(**segment, min_match);
    if (--remaining == 0 || found.size() < first + limit) continue;
    MatchCounts counts{};
    for (std::size_t i = first; i < found.size(); ++i) ++counts[found[i].match];
    min_match = kMaxDepth;
    for (std::size_t longer = counts[min_match]; longer < limit; longer += counts[min_match]) --min_match;
  }
}

// Keeps the `limit` longest matches from `first` on, in their order; of equally long ones, the newest.
void keep_longest(std::vector<Occurrence>& found, std::size_t first, std::size_t limit) {
  if (found.size() <= first + limit) return;
  MatchCounts counts{};
  for (std::size_t i = first; i < found.size(); ++i) ++counts[found[i].match];
  std::size_t shortest = kMaxDepth;
  std::size_t remaining = limit;
  while (counts[shortest] <= remaining) remaining -= counts[shortest--];
  // Of the shortest matches, `remaining` are kept: those from `oldest` on.
  thread_local std::vector<std::int64_t> generations;
  generations.clear();
  for (std::size_t i = first; i < found.size(); ++i) {
    if (found[i].match == shortest) generations.push_back(found[i].generation);
  }
  const auto last_kept = generations.begin() + static_cast<std::ptrdiff_t>(remaining);
  std::nth_element(generations.begin(), last_kept, generations.end(), std::greater<>());
  const std::int64_t oldest = *last_kept;
  std::size_t newer = 0;
  for (const std::int64_t generation : generations) newer += generation > oldest;
  std::size_t equal = remaining - newer;
  std::size_t kept = first;
  for (std::size_t i = first; i < found.size(); ++i) {
    const Occurrence& occurrence = found[i];
    if (occurrence.match < shortest) continue;
    if (occurrence.match == shortest) {
      if (occurrence.generation < oldest) continue;
      if (occurrence.generation == oldest && equal-- == 0) {
        equal = 0;
        continue;
      }
    }
    if (kept < i) found[kept] = occurrence;
    ++kept;
  }
  found.resize(kept);
}

// Sorts by match length, longest first; equally long matches keep their order.
void sort_by_match(std::vector<Occurrence>& found) {
  thread_local std::vector<Occurrence> sorted;
  MatchCounts ends{};
  for (const Occurrence& occurrence : found) ++ends[occurrence.match];
  std::uint16_t end = 0;
  for (std::size_t match = kMaxDepth + 1; match-- > 0;) {
    end = static_cast<std::uint16_t>(end + ends[match]);
    ends[match] = static_cast<std::uint16_t>(end - ends[match]);
  }
  sorted.resize(found.size());
  for (const Occurrence& occurrence : found) sorted[ends[occurrence.match]++] = occurrence;
  found.swap(sorted);
}

// Matches of the history at least this long become anchors.
constexpr std::size_t kMinAnchorMatch = 4;
// An anchor is followed for this many tokens.
constexpr std::size_t kAnchorLifetime = 64;

// Memory for at most this many positions is allocated before they are computed, so that none is in excess.
constexpr std::size_t kReservedPositions = 64;

}  // namespace

void RequestDrafter::find_anchored(const TextEnd& end, const Segments& history, std::vector<Occurrence>& found) const {
  for (const Anchor& anchor : end.anchors) {
    const std::size_t distance = end.response_length - anchor.response_length;
    if (distance > kAnchorLifetime) continue;
    const auto segment = std::find_if(history.list.begin(), history.list.end(),
                                      [&](const auto& segment) { return segment->serial() == anchor.segment; });
    if (segment == history.list.end()) continue;
    const auto near = (*segment)->find_near(anchor.position, distance, end.response);
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

std::size_t RequestDrafter::find_anchors(std::size_t response_length, const Segments& history,
                                         std::span<const Occurrence> found,
                                         std::array<Anchor, Mixture::kAnchors>& anchors) {
  std::size_t count = 0;
  for (const Occurrence& occurrence : found) {
    if (count == anchors.size()) break;
    if (occurrence.source != Source::history || occurrence.match < kMinAnchorMatch) continue;
    for (const auto& segment : history.list) {
      const auto position = segment->position_of(occurrence);
      if (!position) continue;
      anchors[count++] = {segment->serial(), *position, response_length};
      break;
    }
  }
  return count;
}

void RequestDrafter::find_occurrences(const Request& request, const TextEnd& end, const Segments& history,
                                      const Segments* pool, bool is_urgent, std::vector<Occurrence>& found) const {
  found.clear();
  found.reserve(2 * Mixture::kMaxOccurrences);
  const std::span<const Token> response = end.response;
  if (request.sources.history) {
    search(history, Mixture::kHistoryOccurrences, found, [&](const Segment& segment, std::size_t min_match) {
      segment.find_longest(response, Mixture::kHistoryOccurrences, min_match, found);
    });
    keep_longest(found, 0, Mixture::kHistoryOccurrences);
    find_anchored(end, history, found);
  }
  if (request.live_texts) {
    request.live_texts->texts.find_longest(response, depth_, request.text_id,
                                           request.sources.self ? Mixture::kLiveOccurrences : 0,
                                           request.sources.siblings ? Mixture::kLiveOccurrences : 0, found);
  }
  if (const auto prompt = request.prompt ? request.prompt->segment() : nullptr) {  // the request keeps it alive
    const std::size_t first = found.size();
    prompt->find_longest(end.own_text, Mixture::kLiveOccurrences, 1, found);
    for (std::size_t i = first; i < found.size(); ++i) found[i].source = Source::self;
  }
  if (!request.sources.cross_problem || pool == nullptr || are_sufficient(found, is_urgent)) return;
  const std::size_t first = found.size();
  search(*pool, Mixture::kCrossProblemOccurrences, found, [&](const Segment& segment, std::size_t min_match) {
    segment.find_cross_problem(response, request.problem_hash, Mixture::kCrossProblemOccurrences, min_match, found);
  });
  keep_longest(found, first, Mixture::kCrossProblemOccurrences);
}

Baseline RequestDrafter::baseline_of(const Request& request, const Segments& history) const {
  return {problems_.newest_generation(), history.generations,
          request.problem->mean_reward.load(std::memory_order_relaxed)};
}

void RequestDrafter::add_positions(const Request& request, const TextEnd& end, const DraftOptions& options,
                                   std::pmr::vector<DraftPosition>& positions, DraftRecord* record) const {
  thread_local std::vector<Occurrence> occurrences;
  // These keep the segments alive while their text is read.
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const std::shared_ptr<const Segments> pool = pool_.segments();
  find_occurrences(request, end, *history, pool.get(), options.is_urgent, occurrences);
  sort_by_match(occurrences);
  if (record != nullptr) {
    record->num_anchors = find_anchors(end.response_length, *history, occurrences, record->anchor_list);
  }
  mixture_.draft(occurrences, end.response.back(), baseline_of(request, *history), request.stop_tokens, options.budget,
                 options.min_survival, options.given, positions);
}

void RequestDrafter::compute(Request& request, std::size_t budget, double min_survival, bool is_urgent) const {
  const auto other = static_cast<std::uint8_t>(1 - request.last.set);
  DraftRecord& record = request.drafts[other];
  record.clear();
  record.positions.reserve(std::min(budget, kReservedPositions));
  request.is_prepared = false;
  add_positions(request, end_of(request), {budget, min_survival, is_urgent}, record.positions, &record);
  append_tokens(record.positions, record.tokens);
  request.last = {.set = other, .exists = true, .has_positions = true};
}

void RequestDrafter::compute_missing(Request& request, bool is_urgent) const {
  const std::size_t limit = request.max_length();
  if (limit == 0 || request.last.exists) return;
  try {
    append_pending(request);
    compute(request, limit + 1, request.min_survival, is_urgent);
  } catch (const std::bad_alloc&) {
  }
}

void RequestDrafter::recompute_positions(Request& request, Request::Drafted& drafted, const TextEnd& end) const {
  thread_local std::vector<Token> given;
  given.clear();
  for (const DraftedToken& token : request.tokens(drafted)) given.push_back(token.token);
  DraftRecord& record = request.drafts[drafted.set];
  record.positions.clear();
  record.positions.reserve(std::min(given.size(), kReservedPositions));
  drafted.has_positions = true;
  add_positions(request, end, {.budget = given.size(), .min_survival = 0.0, .given = given}, record.positions, &record);
}

void RequestDrafter::complete(Request& request) const {
  Request::Drafted& last = request.last;
  if (!last.exists) return;
  if (!last.has_positions) recompute_positions(request, last, end_of(request));
  if (last.prepared == PreparedDrafts::kNone) return;
  const auto tokens = request.tokens(last);
  request.drafts[last.set].tokens.assign(tokens.begin(), tokens.end());
  last.prepared = PreparedDrafts::kNone;
}

void RequestDrafter::complete_pending(Request& request) const {
  Request::Drafted& drafted = request.pending_draft;
  if (!drafted.exists || drafted.has_positions) return;
  const std::size_t appended = request.is_own_pending ? 0 : request.pending.size();
  const auto response = request.response.tokens_before(appended);
  const auto own_text = request.own_text.tokens_before(request.prompt ? appended : 0);
  if (!response || !own_text) return;
  recompute_positions(request, drafted,
                      {*response, *own_text, request.counts.generated - request.pending.size(), request.anchors});
}

std::span<const Token> RequestDrafter::extended(const RecentTokens& text, const Request& request, std::size_t accepted,
                                                Token next, std::vector<Token>& buffer) const {
  const auto tokens = text.tokens();
  buffer.assign(tokens.begin(), tokens.end());
  for (const DraftedToken& token : request.tokens(request.last).first(accepted)) buffer.push_back(token.token);
  if (next != kBoundary) buffer.push_back(next);
  return std::span<const Token>(buffer).last(std::min(buffer.size(), depth_));
}

void RequestDrafter::prepare(Request& request, Outcome outcome, std::size_t budget, double min_survival) const {
  thread_local std::vector<Token> response;
  thread_local std::vector<Token> own_text;
  thread_local std::pmr::vector<DraftPosition> positions;
  thread_local std::pmr::vector<DraftedToken> tokens;
  const auto anchors = request.drafts[request.last.set].anchors();
  TextEnd end{extended(request.response, request, outcome.accepted, outcome.next, response),
              {},
              request.counts.generated + outcome.accepted + 1,
              anchors.empty() ? std::span<const Anchor>(request.anchors) : anchors};
  if (request.prompt) end.own_text = extended(request.own_text, request, outcome.accepted, outcome.next, own_text);
  positions.clear();
  add_positions(request, end, {budget, min_survival}, positions, nullptr);
  tokens.clear();
  append_tokens(positions, tokens);
  request.prepared.add(outcome, tokens);
}

void RequestDrafter::find_successors(const Request& request, std::size_t accepted, std::size_t limit,
                                     std::vector<Token>& successors) const {
  thread_local std::vector<Token> buffer;
  thread_local std::vector<Occurrence> found;
  successors.clear();
  if (!request.sources.history) return;
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const auto response = extended(request.response, request, accepted, kBoundary, buffer);
  found.clear();
  for (const auto& segment : history->list) segment->find_longest(response, limit, 1, found);
  sort_by_match(found);
  for (const Occurrence& occurrence : found) {
    const Token token = occurrence.text.at(0);
    if (std::find(successors.begin(), successors.end(), token) == successors.end()) successors.push_back(token);
  }
}

Draft RequestDrafter::draft(Request& request, std::size_t budget, double min_survival) {
  if (budget == 0) return {};
  const std::lock_guard lock(request.mutex);
  if (request.is_closed) return {};  // another thread has closed it in the meantime
  budget = std::min(budget, request.limits.max_length(request.counts.generated));
  if (budget == 0) return {};
  settle(request, false);
  compute(request, budget, min_survival, false);
  const DraftRecord& record = request.drafts[request.last.set];
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const Baseline baseline = baseline_of(request, *history);
  Draft draft;
  for (std::size_t i = 0; i < record.tokens.size() && record.tokens[i].survival >= min_survival; ++i) {
    const DraftPosition& position = record.positions[i];
    const bool is_finished = position.source() == Source::history || position.source() == Source::cross_problem;
    draft.tokens.push_back({position.token, position.source(), position.probability,
                            is_finished ? baseline.age(position.generation) : -1});
  }
  request.length.store(static_cast<std::uint32_t>(draft.tokens.size()), std::memory_order_relaxed);
  count_drafted(request, request.received());
  if (!draft.tokens.empty()) draft.match_length = record.positions.front().match_length;
  return draft;
}

void RequestDrafter::extend(Request& request, std::span<const Token> tokens) {
  const std::lock_guard lock(request.mutex);
  if (request.is_closed) return;  // another thread has closed it in the meantime
  settle(request, false);
  complete(request);
  observe(request, request.received(), tokens);
  const auto anchors = request.last.exists ? request.drafts[request.last.set].anchors() : std::span<const Anchor>();
  request.append_own(tokens, anchors);
  request.append_live(tokens, false);
  request.counts.generated += tokens.size();
  request.is_prepared = false;
}

void RequestDrafter::append_pending(Request& request) const {
  if (!request.is_own_pending) return;
  request.is_own_pending = false;
  const Request::Drafted& drafted = request.pending_draft;
  request.append_own(request.pending,
                     drafted.has_positions ? request.drafts[drafted.set].anchors() : std::span<const Anchor>());
}

void RequestDrafter::settle(Request& request, bool is_urgent) {
  if (request.pending.empty() || request.is_closed) return;
  if (!is_urgent) complete_pending(request);
  append_pending(request);
  count_drafted(request, request.pending_draft);
  count_verified(request);
  observe(request, request.pending_draft, request.pending);
  request.append_live(request.pending, is_urgent);
  request.pending.clear();
}

void RequestDrafter::count_verified(Request& request) {
  count_verified(request, request.pending_draft, std::exchange(request.pending_verified, 0), request.pending_accepted,
                 request.counts.generated - request.pending.size());
}

void RequestDrafter::count_verified(Request& request, const Request::Drafted& drafted, std::size_t verified,
                                    std::size_t accepted, std::size_t first) {
  if (verified == 0) return;
  const auto tokens = request.tokens(drafted).first(verified);
  verification_counts_.add(tokens, accepted);
  request.token_sources.add_verified(tokens);
  request.token_sources.add_accepted(tokens.first(accepted), first);
}

std::vector<TokenSources::Code> RequestDrafter::count_step(Request& request, std::size_t verified,
                                                           std::size_t accepted) {
  const std::lock_guard lock(request.mutex);
  std::vector<TokenSources::Code> codes;
  verified = std::min<std::size_t>(verified, request.received().length);
  // After a step that has left the request out, there is no draft to verify.
  if (verified == 0 || request.is_closed || request.num_left_out() > 0) return codes;
  accepted = std::min(accepted, verified);
  const auto tokens = request.tokens(request.last).first(verified);
  request.counts.drafted += verified;
  request.counts.accepted += accepted;
  verification_counts_.add(tokens, accepted);
  request.token_sources.add_verified(tokens);
  for (const DraftedToken& token : tokens.first(accepted)) codes.push_back(TokenSources::code_of(token.source));
  return codes;
}

ClosedRequest RequestDrafter::close(Request& request) {
  const std::lock_guard lock(request.mutex);
  count_verified(request);
  if (const std::int64_t count = request.num_left_out(); count > 0) {
    const auto [verified, accepted] = request.take_verification(request.num_tokens() + count, 0);
    count_verified(request, request.last, verified, accepted, request.counts.generated);
    request.counts.drafted += verified;
    request.counts.accepted += accepted;
    request.counts.generated += static_cast<std::uint64_t>(count);
  }
  request.close();
  const auto codes = request.token_sources.codes();
  return {request.counts, {codes.begin(), codes.end()}, request.token_sources.verified()};
}

void RequestDrafter::count_drafted(const Request& request, Request::Drafted& drafted) {
  if (std::exchange(drafted.is_counted, true)) return;
  for (const DraftedToken& token : request.tokens(drafted).first(drafted.length)) {
    counters_[static_cast<std::size_t>(token.source)].drafted.fetch_add(1, std::memory_order_relaxed);
  }
}

void RequestDrafter::observe(const Request& request, Request::Drafted& drafted, std::span<const Token> tokens) {
  const auto draft = request.tokens(drafted);
  std::span<const DraftPosition> positions;
  if (drafted.has_positions) positions = request.drafts[drafted.set].positions;
  for (const Token token : tokens) {
    if (drafted.num_observed == draft.size()) break;
    const std::size_t index = drafted.num_observed++;
    const bool is_known = index < positions.size();
    if (is_known) mixture_.learn(positions[index], token);
    const bool is_accepted = draft[index].token == token;
    if (index < drafted.length) {
      const Source source = draft[index].source;
      Counters& counters = counters_[static_cast<std::size_t>(source)];
      counters.verified.fetch_add(1, std::memory_order_relaxed);
      if (is_accepted) counters.accepted.fetch_add(1, std::memory_order_relaxed);
    }
    if (!is_accepted) drafted.num_observed = static_cast<std::uint32_t>(draft.size());
  }
}

std::vector<OccurrenceText> RequestDrafter::occurrences(Request& request, std::size_t length) {
  const std::lock_guard lock(request.mutex);
  settle(request, false);
  const std::shared_ptr<const Segments> history = request.problem->history.load();
  const std::shared_ptr<const Segments> pool = pool_.segments();
  std::vector<Occurrence> found;
  find_occurrences(request, end_of(request), *history, pool.get(), false, found);
  std::vector<OccurrenceText> texts;
  for (const Occurrence& occurrence : found) {
    OccurrenceText& text = texts.emplace_back(OccurrenceText{
        occurrence.source, occurrence.match, occurrence.generation, occurrence.reward, {}, occurrence.anchored});
    for (std::size_t i = 0; i < length && occurrence.text.at(i) != kBoundary; ++i)
      text.tokens.push_back(occurrence.text.at(i));
  }
  return texts;
}

TextPosition RequestDrafter::text_position(Request& request) {
  thread_local std::vector<Occurrence> found;
  found.clear();
  const std::shared_ptr<const Segments> history = request.problem->history.load();  // keeps the texts alive
  std::size_t own_match = 0;
  {
    const std::lock_guard lock(request.mutex);
    settle(request, false);
    const std::span<const Token> response = request.response.tokens();
    if (request.live_texts) {
      request.live_texts->texts.find_longest(response, depth_, request.text_id, 1, 0, found);
      for (const Occurrence& occurrence : found) own_match = std::max<std::size_t>(own_match, occurrence.match);
      found.clear();
    }
    if (request.sources.history) {
      search(*history, Mixture::kHistoryOccurrences, found, [&](const Segment& segment, std::size_t min_match) {
        segment.find_longest(response, Mixture::kHistoryOccurrences, min_match, found);
      });
    }
  }
  keep_longest(found, 0, Mixture::kHistoryOccurrences);
  std::size_t longest = 0;
  for (const Occurrence& occurrence : found) longest = std::max<std::size_t>(longest, occurrence.match);
  double logs = 0.0;
  std::size_t count = 0;
  for (const Occurrence& occurrence : found) {
    if (2 * occurrence.match < longest) continue;
    std::size_t rest = 0;
    while (occurrence.text.at(rest) != kBoundary) ++rest;
    logs += std::log(static_cast<double>(rest + 1));
    ++count;
  }
  const double rest =
      count > 0 ? std::exp(logs / static_cast<double>(count)) : std::numeric_limits<double>::quiet_NaN();
  return {rest, longest, own_match};
}

bool RequestDrafter::has_ended(Request& request) {
  const std::lock_guard lock(request.mutex);
  settle(request, false);
  if (static_cast<std::int64_t>(request.counts.generated) >= request.limits.max_tokens) return true;
  const std::span<const Token> response = request.response.tokens();
  return request.counts.generated > 0 &&
         std::ranges::find(request.stop_tokens, response.back()) != request.stop_tokens.end();
}

SourceCounts RequestDrafter::counts(Source source) const {
  const Counters& counters = counters_[static_cast<std::size_t>(source)];
  return {counters.drafted.load(std::memory_order_relaxed), counters.verified.load(std::memory_order_relaxed),
          counters.accepted.load(std::memory_order_relaxed)};
}

}  // namespace das

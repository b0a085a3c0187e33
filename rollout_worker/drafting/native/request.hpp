// Requests, which are rollouts that are being generated: their texts, match states and drafts, and the table of them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "live_texts.hpp"
#include "memory.hpp"
#include "mixture.hpp"
#include "problem.hpp"
#include "text.hpp"

namespace das {

// A token of a draft.
struct DraftedToken {
  double survival;  // the probability that it and all tokens before it are accepted
  Token token;
  Source source;  // the one that gives it the most probability mass
};

class TokenSources {
 public:
  using Code = std::uint8_t;
  // The code of a token that was sampled without an accepted draft token; that of an accepted draft token is 1 plus the
  // number of its source.
  static constexpr Code kSampled = 0;
  static Code code_of(Source source) { return static_cast<Code>(1 + static_cast<Code>(source)); }

  explicit TokenSources(std::pmr::memory_resource* memory) : codes_(memory) {}

  // Adds the tokens of a draft that were verified.
  void add_verified(std::span<const DraftedToken> verified) {
    for (const DraftedToken& token : verified) ++verified_[static_cast<std::size_t>(token.source)];
  }
  // Adds the accepted tokens of a draft. The first one is token number `first` of the response. The tokens between it
  // and those that were added before were sampled.
  void add_accepted(std::span<const DraftedToken> accepted, std::size_t first) {
    if (accepted.empty()) return;
    codes_.resize(first, kSampled);
    for (const DraftedToken& token : accepted) codes_.push_back(code_of(token.source));
  }

  // The codes of the response's tokens up to the last accepted draft token.
  std::span<const Code> codes() const { return codes_; }
  const std::array<std::uint64_t, kSources>& verified() const { return verified_; }

 private:
  std::pmr::vector<Code> codes_;
  std::array<std::uint64_t, kSources> verified_{};
};

// A position in a rollout of the history that a request has followed.
struct Anchor {
  std::uint64_t segment;        // serial number
  std::size_t position;         // in the segment
  std::size_t response_length;  // of the request when it was at this position
};

// A possible outcome of the verification of a draft: the number of accepted tokens, and the token sampled after them.
struct Outcome {
  std::size_t accepted = 0;
  Token next = kBoundary;
};

// Appends the tokens of the positions of one draft.
inline void append_tokens(std::span<const DraftPosition> positions, std::pmr::vector<DraftedToken>& tokens) {
  double survival = 1.0;
  for (const DraftPosition& position : positions) {
    survival *= position.probability;
    tokens.push_back({survival, position.token, position.source()});
  }
}

// A draft, and what the mixture learns from.
struct DraftRecord {
  explicit DraftRecord(std::pmr::memory_resource* memory) : tokens(memory), positions(memory) {}

  std::span<const Anchor> anchors() const { return std::span(anchor_list).first(num_anchors); }
  void clear() {
    tokens.clear();
    positions.clear();
    num_anchors = 0;
  }

  std::pmr::vector<DraftedToken> tokens;
  std::pmr::vector<DraftPosition> positions;  // of the first tokens; mostly of all of them
  std::size_t num_anchors = 0;
  std::array<Anchor, Mixture::kAnchors> anchor_list;
};

// Has the processor fetch objects that are stored together.
template <class T>
void prefetch(std::span<const T> objects) {
  constexpr std::size_t kCacheLine = 64;
  const auto* const bytes = reinterpret_cast<const char*>(objects.data());
  for (std::size_t i = 0; i < objects.size_bytes(); i += kCacheLine) __builtin_prefetch(bytes + i);
}

// Stores drafts by the outcome after which they are used. Only their tokens are stored, since there are many drafts, of
// which one is used. The memory is allocated once, so that its size is known.
class PreparedDrafts {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  explicit PreparedDrafts(std::pmr::memory_resource* memory) : keys_(memory), tokens_(memory) {}

  bool is_full() const { return keys_.size() == kMaxDrafts || tokens_.size() == kMaxTokens; }
  void clear() {
    keys_.clear();
    tokens_.clear();
  }
  // Adds a draft for an outcome. If it does not fit, its last tokens are left out.
  void add(Outcome outcome, std::span<const DraftedToken> draft) {
    if (is_full() || outcome.accepted > kMaxAccepted) return;
    keys_.reserve(kMaxDrafts);
    tokens_.reserve(kMaxTokens);
    keys_.push_back(
        {outcome.next, static_cast<std::uint16_t>(outcome.accepted), static_cast<std::uint16_t>(tokens_.size())});
    draft = draft.first(std::min(draft.size(), kMaxTokens - tokens_.size()));
    tokens_.insert(tokens_.end(), draft.begin(), draft.end());
  }

  // Has the processor fetch the likeliest outcomes, which come first.
  void prefetch_keys() const { prefetch(std::span<const Key>(keys_).first(std::min<std::size_t>(keys_.size(), 32))); }

  // Returns the number of the draft for an outcome, or kNone.
  std::uint32_t find(Outcome outcome) const {
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (keys_[i].next == outcome.next && keys_[i].accepted == outcome.accepted) return static_cast<std::uint32_t>(i);
    }
    return kNone;
  }
  std::span<const DraftedToken> tokens(std::uint32_t draft) const {
    const std::size_t end = draft + 1 < keys_.size() ? keys_[draft + 1].first : tokens_.size();
    return std::span<const DraftedToken>(tokens_).subspan(keys_[draft].first, end - keys_[draft].first);
  }

 private:
  static constexpr std::size_t kMaxDrafts = 512;
  static constexpr std::size_t kMaxTokens = 1024;
  static constexpr std::size_t kMaxAccepted = 0xFFFF;
  struct Key {
    Token next;
    std::uint16_t accepted;
    std::uint16_t first;  // of its tokens in tokens_
  };

  std::pmr::vector<Key> keys_;
  std::pmr::vector<DraftedToken> tokens_;
};

// The sources that a request searches for occurrences.
struct Sources {
  bool history;
  bool self;
  bool siblings;
  bool cross_problem;
};

// Limits for the lengths of a request's drafts, in tokens.
struct DraftLimits {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  std::int64_t undrafted_tokens = 0;      // nothing is drafted before the response has this length
  std::int64_t min_tokens = 0;            // a draft that begins before this length of the response ends before it
  std::int64_t max_tokens = kNone;        // and any draft ends before this one
  std::int64_t max_draft_tokens = kNone;  // the longest draft

  // Returns the longest draft for a response of `generated` tokens. The step also samples the token after the draft, so
  // that one place is left for it.
  std::size_t max_length(std::size_t generated) const {
    const auto length = static_cast<std::int64_t>(generated);
    if (length < undrafted_tokens) return 0;
    const std::int64_t end = length < min_tokens ? min_tokens : max_tokens;
    return static_cast<std::size_t>(std::max<std::int64_t>(0, std::min(max_draft_tokens, end - length - 1)));
  }
};

struct RequestOptions {
  std::span<const Token> prompt;
  std::size_t context_length;  // number of tokens at the end of the prompt that are the response's context
  Sources sources;
  std::span<const Token> stop_tokens;  // no token is sampled after one of these
  DraftLimits limits;
};

// Token counts of one request.
struct RequestCounts {
  std::uint64_t drafted = 0;  // tokens of drafts that were verified
  std::uint64_t accepted = 0;
  std::uint64_t generated = 0;
};

// The figures of a closed request.
struct ClosedRequest {
  RequestCounts counts;
  std::vector<TokenSources::Code> codes;           // see TokenSources
  std::array<std::uint64_t, kSources> verified{};  // draft tokens that were verified, by source
};

// The last tokens of a growing text, as many as are compared.
class RecentTokens {
 public:
  RecentTokens(std::size_t depth, std::pmr::memory_resource* memory) : depth_(depth), tokens_(memory) {}
  void push(Token token) { push({&token, 1}); }
  void push(std::span<const Token> tokens) {
    if (tokens_.size() >= kCapacity * depth_) {
      tokens_.erase(tokens_.begin(), tokens_.end() - static_cast<std::ptrdiff_t>(depth_));
    }
    const auto last = tokens.last(std::min(tokens.size(), depth_));
    tokens_.insert(tokens_.end(), last.begin(), last.end());
  }
  std::span<const Token> tokens() const { return *tokens_before(0); }
  // Returns the same as before the last `count` tokens were pushed at once, unless they were too many.
  std::optional<std::span<const Token>> tokens_before(std::size_t count) const {
    if (count > depth_) return std::nullopt;
    const auto text = std::span<const Token>(tokens_).first(tokens_.size() - std::min(tokens_.size(), count));
    return text.last(std::min(text.size(), depth_));
  }

 private:
  static constexpr std::size_t kCapacity = 4;  // times the depth, so that tokens are moved only occasionally
  std::size_t depth_;
  std::pmr::vector<Token> tokens_;
};

// Steps since the last report that have left a request out, because another thread held its lock.
struct LeftOutSteps {
  std::atomic<std::int32_t> num_tokens{0};  // of prompt and response after them; 0: there were none
  // The first of these steps that has verified tokens of the last draft: the number of tokens after it, and of these.
  std::atomic<std::int32_t> verified_at{0};
  std::atomic<std::uint32_t> verified{0};
};

struct Request {
  // The background thread indexes a long prompt, unless it is null.
  Request(const IndexBytes& bytes, ProblemPin pin, std::size_t depth, const RequestOptions& options,
          BackgroundThread* background);

  // The next four require the lock.
  // Appends sampled tokens to the texts that only this request reads. The anchors of the draft before them replace the
  // current ones, unless there are none, since there may have been no match for some time.
  void append_own(std::span<const Token> tokens, std::span<const Anchor> new_anchors);
  // Appends sampled tokens to the live texts. If another thread writes to these, an urgent call leaves the tokens for
  // the next one.
  void append_live(std::span<const Token> tokens, bool is_urgent);
  // Releases what the request shares with its siblings.
  void close();

  // A draft of the request.
  struct Drafted {
    std::uint8_t set = 0;        // its place in `drafts`
    bool exists = false;         // whether there is a draft
    bool is_counted = false;     // whether its tokens are included in SourceCounts
    bool has_positions = false;  // whether its positions were computed; those of a prepared draft are later
    std::uint32_t prepared = PreparedDrafts::kNone;  // its number in `prepared`, until its tokens are copied from there
    std::uint32_t length = 0;        // number of its tokens that the caller received; for the last draft, see `length`
    std::uint32_t num_observed = 0;  // number of its tokens that were compared with sampled tokens
  };
  std::span<const DraftedToken> tokens(const Drafted& draft) const {
    if (!draft.exists) return {};
    return draft.prepared == PreparedDrafts::kNone ? drafts[draft.set].tokens : prepared.tokens(draft.prepared);
  }
  // Returns the last draft with its length. Requires the lock.
  Drafted& received() {
    last.length = std::min(length.load(std::memory_order_relaxed), static_cast<std::uint32_t>(tokens(last).size()));
    return last;
  }

  // What the engine has verified of the last draft.
  struct Verification {
    std::uint64_t verified;
    std::uint64_t accepted;
  };
  // Returns it for a step after which prompt and response have `new_num_tokens` tokens, or else for an earlier step
  // that has left the request out, and forgets such steps. Requires the lock.
  Verification take_verification(std::int64_t new_num_tokens, std::uint64_t newly_verified);

  Charge charge;
  std::mutex mutex;  // guards all that is neither const nor atomic

  // Number of tokens of prompt and response that were reported. Requires the lock.
  std::int64_t num_tokens() const { return prompt_tokens + static_cast<std::int64_t>(counts.generated); }

  // Number of tokens of the last draft that the engine verifies.
  std::size_t verified_length() const {
    return is_dropped.load(std::memory_order_relaxed) ? 0 : length.load(std::memory_order_relaxed);
  }
  // Returns the longest draft that the request may have now. Requires the lock, as the next does.
  std::size_t max_length() const { return is_closed ? 0 : std::min(budget, limits.max_length(counts.generated)); }
  // Number of tokens that were sampled in addition, in steps that have left the request out.
  std::int64_t num_left_out() const {
    return std::max<std::int64_t>(0, left_out.num_tokens.load(std::memory_order_relaxed) - num_tokens());
  }

  // Each step reads the following, which is therefore stored together.
  const std::int64_t prompt_tokens;
  std::size_t budget = 0;  // of the last step, like the next two
  double min_survival = 0.0;
  double token_gain = 0.0;
  RequestCounts counts;  // `generated` is the length of the response
  // The next three are written by steps, without the lock.
  std::atomic<std::uint32_t> length{0};  // number of tokens of the last draft that the caller has received
  std::atomic<bool> is_dropped{false};   // whether they are not verified
  LeftOutSteps left_out;
  Drafted last;
  Drafted pending_draft;               // the draft that `pending` verifies
  std::uint32_t pending_verified = 0;  // number of its tokens that the engine has verified, until they are counted
  std::uint32_t pending_accepted = 0;  // and that it has accepted
  bool is_own_pending = false;         // whether append_own() is missing for `pending`
  bool is_prepared = false;            // whether `prepared` has drafts for outcomes of the last one
  bool is_closed = false;
  const DraftLimits limits;
  // Sampled tokens that have been reported, but were neither learned from nor appended to the live texts yet.
  std::pmr::vector<Token> pending;
  PreparedDrafts prepared;
  // The last draft, and the one before until that has been learned from.
  std::array<DraftRecord, 2> drafts;

  ProblemPin problem;
  const Sources sources;
  const std::uint32_t problem_hash;  // identifies the problem in the cross-problem pool
  const std::pmr::vector<Token> stop_tokens;
  RecentTokens response;  // preceded by its context, or else by kBoundary
  RecentTokens own_text;  // prompt and response
  std::shared_ptr<const IndexedPrompt> prompt;
  // Contains the request's own response. Shared by the requests of the problem, unless this one does not draft from
  // siblings.
  std::shared_ptr<SharedLiveTexts> live_texts;
  LiveTexts::TextId text_id = LiveTexts::kNoText;
  std::pmr::vector<Token> live_backlog;  // tokens that are missing in the live texts
  std::pmr::vector<Anchor> anchors;
  TokenSources token_sources;
};

// The requests of a batch.
using RequestList = std::vector<std::shared_ptr<Request>>;

struct UnknownRequest : std::out_of_range {
  using std::out_of_range::out_of_range;
};

// Maps handles to requests. A handle consists of a serial number and, in its low bits, the index of the request's
// entry. find() and remove() throw UnknownRequest for a handle that is not open.
class RequestTable {
 public:
  using Handle = std::int64_t;
  static constexpr Handle kNone = -1;  // never the handle of a request

  // Throws std::length_error if too many requests are open.
  Handle insert(std::shared_ptr<Request> request);
  std::shared_ptr<Request> find(Handle handle) const;
  std::vector<std::shared_ptr<Request>> find(std::span<const Handle> handles) const;
  std::shared_ptr<Request> remove(Handle handle);

 private:
  struct Entry {
    Handle handle = kNone;
    std::shared_ptr<Request> request;
  };
  static constexpr Handle kMaxEntries = Handle{1} << 24;

  const std::shared_ptr<Request>& at(Handle handle) const;  // mutex_ is held

  mutable std::mutex mutex_;  // guards the next three; it is held for look-ups only
  std::vector<Entry> entries_;
  std::vector<Handle> free_indices_;
  Handle next_serial_ = 0;
};

}  // namespace das

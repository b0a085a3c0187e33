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

class TokenSources {
 public:
  using Code = std::uint8_t;
  // The code of a token that was sampled without an accepted draft token; that of an accepted draft token is 1 plus the
  // number of its source.
  static constexpr Code kSampled = 0;
  static Code code_of(const DraftPosition& position) {
    return static_cast<Code>(1 + static_cast<Code>(position.source()));
  }

  explicit TokenSources(std::pmr::memory_resource* memory) : codes_(memory) {}

  // Adds the tokens of a draft that were verified.
  void add_verified(std::span<const DraftPosition> verified) {
    for (const DraftPosition& position : verified) ++verified_[static_cast<std::size_t>(position.source())];
  }
  // Adds the accepted tokens of a draft. The first one is token number `first` of the response. The tokens between it
  // and those that were added before were sampled.
  void add_accepted(std::span<const DraftPosition> accepted, std::size_t first) {
    if (accepted.empty()) return;
    codes_.resize(first, kSampled);
    for (const DraftPosition& position : accepted) codes_.push_back(code_of(position));
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

// Stores drafts by the outcome after which they are used. What a look-up reads is small and stored together; positions
// and anchors are read only later.
class DraftSet {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  // A token of a draft, with the probability that it and all tokens before it are accepted.
  struct DraftedToken {
    Token token;
    double survival;
  };

  explicit DraftSet(std::pmr::memory_resource* memory)
      : keys_(memory), tokens_(memory), positions_(memory), anchors_(memory) {}

  std::size_t num_positions() const { return positions_.size(); }
  void clear() {
    keys_.clear();
    tokens_.clear();
    positions_.clear();
    anchors_.clear();
  }

  // Has the processor fetch what a look-up reads. Likely outcomes come first.
  void prefetch_keys() const { fetch(keys_.data(), std::min<std::size_t>(keys_.size(), 32)); }
  void prefetch_tokens(std::uint32_t draft) const { fetch(tokens(draft).data(), 4); }

  // Returns the number of the draft for an outcome, or kNone.
  std::uint32_t find(Outcome outcome) const {
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (keys_[i].next == outcome.next && keys_[i].accepted == outcome.accepted) return static_cast<std::uint32_t>(i);
    }
    return kNone;
  }

  // Where Mixture::draft() appends positions; finish() makes those that were added since the last call a draft.
  std::pmr::vector<DraftPosition>& writable_positions() { return positions_; }
  std::uint32_t finish(Outcome outcome, std::span<const Anchor> anchors) {
    const std::size_t first = tokens_.size();
    double survival = 1.0;
    for (std::size_t i = first; i < positions_.size(); ++i) {
      survival *= positions_[i].probability;
      tokens_.push_back({positions_[i].token, survival});
    }
    Anchors& stored = anchors_.emplace_back();
    stored.count = anchors.size();
    std::copy(anchors.begin(), anchors.end(), stored.list.begin());
    keys_.push_back({outcome.next, static_cast<std::uint32_t>(outcome.accepted), static_cast<std::uint32_t>(first),
                     static_cast<std::uint32_t>(tokens_.size() - first)});
    return static_cast<std::uint32_t>(keys_.size() - 1);
  }

  // The next three return what belongs to one draft.
  std::span<const DraftedToken> tokens(std::uint32_t draft) const { return part(tokens_, draft); }
  std::span<const DraftPosition> positions(std::uint32_t draft) const { return part(positions_, draft); }
  std::span<const Anchor> anchors(std::uint32_t draft) const {
    return std::span(anchors_[draft].list).first(anchors_[draft].count);
  }

 private:
  struct Key {
    Token next;
    std::uint32_t accepted;
    std::uint32_t first;
    std::uint32_t count;
  };
  struct Anchors {
    std::size_t count;
    std::array<Anchor, Mixture::kAnchors> list;
  };
  template <class T>
  std::span<const T> part(const std::pmr::vector<T>& all, std::uint32_t draft) const {
    return std::span(all).subspan(keys_[draft].first, keys_[draft].count);
  }
  template <class T>
  static void fetch(const T* first, std::size_t count) {
    constexpr std::size_t kCacheLine = 64;
    const auto* const bytes = reinterpret_cast<const char*>(first);
    for (std::size_t i = 0; i < count * sizeof(T); i += kCacheLine) __builtin_prefetch(bytes + i);
  }

  std::pmr::vector<Key> keys_;
  std::pmr::vector<DraftedToken> tokens_;
  std::pmr::vector<DraftPosition> positions_;
  std::pmr::vector<Anchors> anchors_;
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
  std::span<const Token> tokens() const {
    return std::span<const Token>(tokens_).last(std::min(tokens_.size(), depth_));
  }

 private:
  static constexpr std::size_t kCapacity = 4;  // times the depth, so that tokens are moved only occasionally
  std::size_t depth_;
  std::pmr::vector<Token> tokens_;
};

struct Request {
  // The background thread indexes a long prompt, unless it is null.
  Request(const IndexBytes& bytes, ProblemPin pin, std::size_t depth, const RequestOptions& options,
          BackgroundThread* background);

  // The next three require the lock.
  // Appends sampled tokens to the texts that only this request reads. The anchors of the draft before them replace the
  // current ones, unless there are none, since there may have been no match for some time.
  void append_own(std::span<const Token> tokens, std::span<const Anchor> new_anchors);
  // Appends sampled tokens to the live texts.
  void append_live(std::span<const Token> tokens);
  // Releases what the request shares with its siblings.
  void close();

  // A draft that the caller has received.
  struct Drafted {
    std::uint8_t set = 0;                    // its place in `sets`
    bool is_counted = false;                 // whether its tokens are included in SourceCounts
    std::uint32_t number = DraftSet::kNone;  // in the set; kNone: there is no draft
    std::uint32_t length = 0;                // number of its positions that the caller received
    std::uint32_t num_observed = 0;          // number of its positions that were compared with sampled tokens
  };

  Charge charge;
  std::mutex mutex;  // guards all that is not const

  // Number of tokens of prompt and response. Requires the lock.
  std::int64_t num_tokens() const { return prompt_tokens + static_cast<std::int64_t>(counts.generated); }

  // Each step reads the following, which is therefore stored together.
  const std::int64_t prompt_tokens;
  std::size_t budget = 0;  // of the last step, like the next
  double min_survival = 0.0;
  RequestCounts counts;  // `generated` is the length of the response
  Drafted last;
  Drafted pending_draft;               // the draft that `pending` verifies
  std::uint32_t pending_verified = 0;  // number of its tokens that the engine has verified, until they are counted
  std::uint32_t pending_accepted = 0;  // and that it has accepted
  bool is_own_pending = false;         // whether append_own() is missing for `pending`
  bool is_prepared = false;            // whether the other set has drafts for outcomes of the last one
  bool is_closed = false;
  const DraftLimits limits;
  // Sampled tokens that have been reported, but were neither learned from nor appended to the live texts yet.
  std::pmr::vector<Token> pending;
  // One set has the last draft. The other one has the draft before, until that has been learned from, and then drafts
  // for possible outcomes of the last one.
  std::array<DraftSet, 2> sets;

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

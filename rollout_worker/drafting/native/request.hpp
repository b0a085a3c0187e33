// The state of one open request: a response that is being generated.
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
#include <span>
#include <vector>

#include "draft_set.hpp"
#include "live_texts.hpp"
#include "memory.hpp"
#include "mixture.hpp"
#include "problem_registry.hpp"
#include "token_sources.hpp"

namespace das {

// The sources in which a request searches for occurrences.
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

// What is known about a request when it is closed.
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
  Request(const IndexBytes& bytes, ProblemPin pin, std::size_t depth, const RequestOptions& options);

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
  // Sampled tokens that have been reported, but from which nothing was learned yet and which the live texts lack.
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

}  // namespace das

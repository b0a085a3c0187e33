// Drafting for open requests, and learning from what was sampled and verified.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cross_problem_pool.hpp"
#include "mixture.hpp"
#include "problem.hpp"
#include "request.hpp"
#include "text.hpp"

namespace das {

// Any number of threads may call it.
class VerificationCounts {
 public:
  static constexpr std::size_t kPositions = 16;  // the last one covers all later positions

  struct Counts {
    std::uint64_t verified;
    std::uint64_t accepted;
  };

  // Counts the verified tokens of a draft. The first `accepted` of them were accepted.
  void add(std::span<const DraftedToken> verified, std::size_t accepted) {
    for (std::size_t i = 0; i < verified.size(); ++i) {
      add(sources_[static_cast<std::size_t>(verified[i].source)], i < accepted);
      add(positions_[std::min(i, kPositions - 1)], i < accepted);
    }
  }

  Counts of(Source source) const { return read(sources_[static_cast<std::size_t>(source)]); }
  Counts at(std::size_t position) const { return read(positions_[position]); }

 private:
  // Accepted and rejected tokens are kept apart, so that a concurrent reader never sees more accepted than verified
  // tokens.
  struct Counters {
    std::atomic<std::uint64_t> accepted{0};
    std::atomic<std::uint64_t> rejected{0};
  };
  static void add(Counters& counters, bool is_accepted) {
    (is_accepted ? counters.accepted : counters.rejected).fetch_add(1, std::memory_order_relaxed);
  }
  static Counts read(const Counters& counters) {
    const std::uint64_t accepted = counters.accepted.load(std::memory_order_relaxed);
    return {accepted + counters.rejected.load(std::memory_order_relaxed), accepted};
  }

  std::array<Counters, kSources> sources_;
  std::array<Counters, kPositions> positions_;
};

struct DraftToken {
  Token token;
  Source source;  // the one that gives the token the most probability mass
  double probability;
  std::int64_t age;  // of the newest finished rollout of the source that proposes the token; -1: none
};

struct Draft {
  std::vector<DraftToken> tokens;
  std::size_t match_length = 0;
};

// An occurrence with a copy of the tokens that follow it.
struct OccurrenceText {
  Source source;
  std::size_t match;
  std::int64_t generation;
  float reward;
  std::vector<Token> tokens;
  bool anchored;
};

// Where a response is in comparison with the earlier rollouts of its problem.
struct TextPosition {
  double rest;            // geometric mean of the numbers of tokens that follow in them, and one; NaN without a match
  std::size_t match;      // number of tokens that the best match has in common with the end of the response
  std::size_t own_match;  // number of tokens at its end that occur earlier in the response
};

// Numbers of draft tokens of one source. A draft token is verified when the token that the model sampled at its
// position is known and all draft tokens before it were accepted.
struct SourceCounts {
  std::uint64_t drafted = 0;
  std::uint64_t verified = 0;
  std::uint64_t accepted = 0;
};

// Finds occurrences, drafts by the mixture, and counts and learns which draft tokens are accepted. Any number of
// threads may call it; calls for the same request wait for each other.
class RequestDrafter {
 public:
  RequestDrafter(std::size_t depth, const ProblemRegistry& problems, const CrossProblemPool& pool)
      : depth_(depth), problems_(problems), pool_(pool) {}

  // The next eight take the request's lock.
  Draft draft(Request& request, std::size_t budget, double min_survival);
  // Compares sampled tokens with the request's last draft, learns from them and appends them to the response.
  void extend(Request& request, std::span<const Token> tokens);
  // Returns the occurrences that a draft would use, with up to `length` tokens of each.
  std::vector<OccurrenceText> occurrences(Request& request, std::size_t length);
  // Compares the end of the response with finished rollouts. Of their occurrences, those count whose match is at least
  // half as long as the best.
  TextPosition text_position(Request& request);
  // Returns whether a stop token or the maximum number of tokens has ended the response.
  bool has_ended(Request& request);
  // Counts a step that has verified the first tokens of the request's last draft, but whose tokens are reported later.
  // Returns the codes of the accepted tokens.
  std::vector<TokenSources::Code> count_step(Request& request, std::size_t verified, std::size_t accepted);
  // Closes a request.
  ClosedRequest close(Request& request);

  // The others require that the caller holds the request's lock.
  // Appends the reported tokens to the texts of the request itself, so that a draft can be computed.
  void append_pending(Request& request) const;
  // Does all that is left to do for reported tokens: counts them, learns from them, and appends them to the live texts.
  // An urgent call does not learn from a prepared draft whose positions were not computed yet, and leaves the tokens
  // for the next call if another thread writes to the live texts.
  void settle(Request& request, bool is_urgent);
  // Computes the draft of up to `budget` positions that follows the response. It becomes the last draft; the caller of
  // the index has received nothing of it yet. An urgent draft searches the pool, which takes most of the time, more
  // rarely.
  void compute(Request& request, std::size_t budget, double min_survival, bool is_urgent) const;
  // Computes the draft that follows the reported tokens, if the request may have one and has none yet. If there is no
  // memory, it remains without a draft.
  void compute_missing(Request& request, bool is_urgent) const;
  // If the last draft was a prepared one, computes its positions, as far as its tokens are still proposed. The prepared
  // drafts are not needed any more then.
  void complete(Request& request) const;
  // Prepares a draft for an outcome of the last draft.
  void prepare(Request& request, Outcome outcome, std::size_t budget, double min_survival) const;
  // Finds the tokens that follow `limit` occurrences in the history, longest matches first, if the first `accepted`
  // tokens of the last draft are appended to the response.
  void find_successors(const Request& request, std::size_t accepted, std::size_t limit,
                       std::vector<Token>& successors) const;
  // Returns the probability of a candidate at a position; see Mixture.
  float probability(const DraftPosition& position, std::size_t candidate) const {
    return mixture_.probability(position, candidate);
  }

  Mixture& mixture() { return mixture_; }
  const Mixture& mixture() const { return mixture_; }
  SourceCounts counts(Source source) const;
  const VerificationCounts& verification_counts() const { return verification_counts_; }

 private:
  // The end of a text whose occurrences are searched: that of a request, or one that it may have after the next step.
  struct TextEnd {
    std::span<const Token> response;
    std::span<const Token> own_text;
    std::size_t response_length;
    std::span<const Anchor> anchors;
  };
  static TextEnd end_of(const Request& request) {
    return {request.response.tokens(), request.own_text.tokens(), request.counts.generated, request.anchors};
  }

  Baseline baseline_of(const Request& request, const Segments& history) const;
  // Returns the end of a text that is followed by the first tokens of the request's last draft, and by `next`.
  std::span<const Token> extended(const RecentTokens& text, const Request& request, std::size_t accepted, Token next,
                                  std::vector<Token>& buffer) const;
  void find_occurrences(const Request& request, const TextEnd& end, const Segments& history, const Segments* pool,
                        bool is_urgent, std::vector<Occurrence>& found) const;
  // Adds occurrences near the anchors to `found`, or marks them if they were found already.
  void find_anchored(const TextEnd& end, const Segments& history, std::vector<Occurrence>& found) const;
  // Stores the positions of the longest matches, which become the next anchors, and returns their number.
  static std::size_t find_anchors(std::size_t response_length, const Segments& history,
                                  std::span<const Occurrence> found, std::array<Anchor, Mixture::kAnchors>& anchors);
  // What a draft is computed for.
  struct DraftOptions {
    std::size_t budget;
    double min_survival;
    bool is_urgent = false;
    std::span<const Token> given = {};  // see Mixture::draft
  };
  // Appends the positions of the draft that follows a text. Stores the next anchors in `record`, unless that is null.
  void add_positions(const Request& request, const TextEnd& end, const DraftOptions& options,
                     std::pmr::vector<DraftPosition>& positions, DraftRecord* record) const;
  // Computes the positions of a draft that was prepared, and that follows `end`.
  void recompute_positions(Request& request, Request::Drafted& drafted, const TextEnd& end) const;
  // Does that for the draft that the pending tokens follow. Call it before these are appended to the live texts.
  void complete_pending(Request& request) const;
  // Counts the tokens of a draft that the caller of the index has received, once.
  void count_drafted(const Request& request, Request::Drafted& drafted);
  // Counts the tokens of the pending draft that the engine has verified, once.
  void count_verified(Request& request);
  void count_verified(Request& request, const Request::Drafted& drafted, std::size_t verified, std::size_t accepted,
                      std::size_t first);
  // Compares sampled tokens with those of a draft, and learns from them, as far as its positions are known.
  void observe(const Request& request, Request::Drafted& drafted, std::span<const Token> tokens);

  const std::size_t depth_;
  const ProblemRegistry& problems_;
  const CrossProblemPool& pool_;
  Mixture mixture_;
  struct Counters {
    std::atomic<std::uint64_t> drafted{0};
    std::atomic<std::uint64_t> verified{0};
    std::atomic<std::uint64_t> accepted{0};
  };
  std::array<Counters, kSources> counters_;
  VerificationCounts verification_counts_;
};

}  // namespace das

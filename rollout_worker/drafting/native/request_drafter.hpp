// Drafting for open requests, and learning from what was sampled.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "age_counts.hpp"
#include "cross_problem_pool.hpp"
#include "mixture.hpp"
#include "problem_registry.hpp"
#include "request.hpp"

namespace das {

struct DraftToken {
  Token token;
  Source source;  // the one that gives the token the most probability mass
  double probability;
  std::int64_t age;  // of the newest finished rollout of the source that proposes the token, in generations; -1: none
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

  Draft draft(Request& request, std::size_t budget, double min_survival);
  // Compares sampled tokens with the request's last draft, learns from them and appends them to the response.
  void extend(Request& request, std::span<const Token> tokens);
  // Returns the occurrences that a draft would use, with up to `length` tokens of each.
  std::vector<OccurrenceText> occurrences(Request& request, std::size_t length) const;

  Mixture& mixture() { return mixture_; }
  const Mixture& mixture() const { return mixture_; }
  SourceCounts counts(Source source) const;
  AgeCounts::Counts counts_of_age(std::size_t age) const { return age_counts_.of(age); }

 private:
  // The rest requires the request's lock.
  void find_occurrences(const Request& request, const Segments& history, const Segments* pool,
                        std::vector<Occurrence>& found) const;
  // Marks occurrences in rollouts that the request has recently followed, and adds the missing ones.
  void find_anchored(const Request& request, const Segments& history, std::vector<Occurrence>& found) const;
  // Stores the positions of the longest matches as the request's next anchors.
  void set_anchors(Request& request, const Segments& history, std::span<const Occurrence> found) const;
  void observe(Request& request, std::span<const Token> tokens);

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
  AgeCounts age_counts_;
};

}  // namespace das

// The state of one open request: a response that is being generated.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <span>
#include <vector>

#include "live_texts.hpp"
#include "memory.hpp"
#include "mixture.hpp"
#include "problem_registry.hpp"

namespace das {

// The sources in which a request searches for occurrences.
struct Sources {
  bool history;
  bool self;
  bool siblings;
  bool cross_problem;
};

struct RequestOptions {
  std::span<const Token> prompt;
  std::size_t context_length;  // number of tokens at the end of the prompt that are the response's context
  Sources sources;
  std::span<const Token> stop_tokens;  // no token is sampled after one of these
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

// A position in a rollout of the history that a request has followed.
struct Anchor {
  std::uint64_t segment;        // serial number
  std::size_t position;         // in the segment
  std::size_t response_length;  // of the request when it was at this position
};

struct Request {
  Request(const IndexBytes& bytes, ProblemPin pin, std::size_t depth, const RequestOptions& options);

  // Appends sampled tokens to the response. Requires the lock.
  void append(std::span<const Token> tokens);
  // Releases what the request shares with its siblings. Takes the lock.
  void close();

  Charge charge;
  std::mutex mutex;  // guards all that is not const
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
  std::size_t response_length = 0;
  std::pmr::vector<Anchor> anchors;
  std::pmr::vector<Anchor> next_anchors;  // found by the last draft; they replace `anchors` when tokens are appended
  bool is_closed = false;

  // The last draft.
  std::pmr::vector<DraftPosition> positions;
  std::size_t num_drafted = 0;   // the first positions, which were returned to the caller
  std::size_t num_observed = 0;  // the first positions, which were compared with sampled tokens
};

}  // namespace das

// Drafts of one request that were computed together, and the text to which each of them belongs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <span>
#include <vector>

#include "mixture.hpp"
#include "text.hpp"

namespace das {

// A position in a rollout of the history that a request has followed.
struct Anchor {
  std::uint64_t segment;        // serial number
  std::size_t position;         // in the segment
  std::size_t response_length;  // of the request when it was at this position
};

// How the verification of a draft may end: the number of accepted tokens, and the token that is sampled after them.
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

}  // namespace das

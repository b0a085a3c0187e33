// Drafts of one request that were computed together, and the text to which each of them belongs.
#pragma once

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

// Stores drafts by the outcome after which they are used. The tokens and survivals that a look-up reads are stored
// apart from the positions, which only learning reads.
class DraftSet {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  explicit DraftSet(std::pmr::memory_resource* memory)
      : keys_(memory), entries_(memory), tokens_(memory), survivals_(memory), positions_(memory) {}

  std::size_t size() const { return entries_.size(); }
  std::size_t num_positions() const { return positions_.size(); }
  void clear() {
    keys_.clear();
    entries_.clear();
    tokens_.clear();
    survivals_.clear();
    positions_.clear();
  }

  // Returns the number of the draft for an outcome, or kNone.
  std::uint32_t find(Outcome outcome) const {
    const std::uint64_t wanted = key(outcome);
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (keys_[i] == wanted) return static_cast<std::uint32_t>(i);
    }
    return kNone;
  }

  // Where Mixture::draft() appends positions; finish() makes those that were added since the last call a draft.
  std::pmr::vector<DraftPosition>& writable_positions() { return positions_; }
  std::uint32_t finish(Outcome outcome, std::span<const Anchor> anchors) {
    Entry entry{static_cast<std::uint32_t>(tokens_.size()),
                static_cast<std::uint32_t>(positions_.size()),
                static_cast<std::uint32_t>(anchors.size()),
                {}};
    std::copy(anchors.begin(), anchors.end(), entry.anchors.begin());
    double survival = 1.0;
    for (std::size_t i = entry.first; i < entry.last; ++i) {
      survival *= positions_[i].probability;
      tokens_.push_back(positions_[i].token);
      survivals_.push_back(survival);
    }
    entries_.push_back(entry);
    keys_.push_back(key(outcome));
    return static_cast<std::uint32_t>(entries_.size() - 1);
  }

  // The next four return what belongs to one draft: its tokens, their survivals, positions and anchors.
  std::span<const Token> tokens(std::uint32_t draft) const { return part(tokens_, draft); }
  std::span<const double> survivals(std::uint32_t draft) const { return part(survivals_, draft); }
  std::span<const DraftPosition> positions(std::uint32_t draft) const { return part(positions_, draft); }
  std::span<const Anchor> anchors(std::uint32_t draft) const {
    return std::span(entries_[draft].anchors).first(entries_[draft].num_anchors);
  }

 private:
  struct Entry {
    std::uint32_t first;
    std::uint32_t last;
    std::uint32_t num_anchors;
    std::array<Anchor, Mixture::kAnchors> anchors;
  };
  static std::uint64_t key(Outcome outcome) { return std::uint64_t{outcome.accepted} << 32 | outcome.next; }
  template <class T>
  std::span<const T> part(const std::pmr::vector<T>& all, std::uint32_t draft) const {
    return std::span(all).subspan(entries_[draft].first, entries_[draft].last - entries_[draft].first);
  }

  std::pmr::vector<std::uint64_t> keys_;
  std::pmr::vector<Entry> entries_;
  std::pmr::vector<Token> tokens_;
  std::pmr::vector<double> survivals_;
  std::pmr::vector<DraftPosition> positions_;
};

}  // namespace das

// From which sources the verified draft tokens and the tokens of one response came.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "mixture.hpp"
#include "occurrence.hpp"

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
  // Adds the accepted tokens of a draft, the first of which is token number `first` of the response. The tokens between
  // those that were added before and this one were sampled.
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

}  // namespace das

// One problem: its history, and the live texts that its open requests share.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "atomic_shared_ptr.hpp"
#include "live_texts.hpp"
#include "memory.hpp"
#include "segments.hpp"

namespace das {

// The texts of requests that were open at the same time; freed when the last of them is closed.
struct SharedLiveTexts {
  explicit SharedLiveTexts(const std::shared_ptr<ByteCounter>& counter)
      : charge(counter, sizeof(SharedLiveTexts)), texts(counter.get()) {}
  Charge charge;
  LiveTexts texts;
};

// A prompt as a segment, in which requests find occurrences of their own text. The requests of a group share it.
struct IndexedPrompt {
  std::size_t length;
  std::array<std::uint64_t, 2> hash;
  std::shared_ptr<const Segment> segment;
};

struct RolloutRecord {
  std::int64_t generation;
  std::uint64_t document_id;
  float reward;
};

struct Problem;
using ProblemMap = std::pmr::map<std::pmr::string, std::unique_ptr<Problem>, std::less<>>;
using RolloutMap = std::pmr::map<std::pmr::string, RolloutRecord, std::less<>>;

struct Problem {
  explicit Problem(const IndexBytes& bytes);

  // The next three require the writer lock.
  std::vector<std::string> rollout_ids() const;  // in the order in which they were added
  // Adds `count` rollouts (removes them, if negative) with this reward to the mean.
  void count_reward(float reward, int count);
  // Deletes the history.
  void clear();

  // Returns the prompt's segment, which is shared with the last request if that had the same prompt.
  std::shared_ptr<const IndexedPrompt> index_prompt(std::span<const Token> prompt, std::size_t depth);

  Charge charge;
  const std::shared_ptr<ByteCounter> live_bytes;  // of the live texts and the prompt; they also count in `charge`

  std::mutex writer;  // guards the next four, and replacing `history`
  RolloutMap rollouts;
  double reward_sum = 0.0;
  std::int64_t reward_count = 0;
  bool merging = false;  // whether the background thread has a task to merge the segments

  // These are read without a lock.
  AtomicSharedPtr<Segments> history;
  std::atomic<bool> is_empty{true};  // whether there are no rollouts
  std::atomic<float> mean_reward{0.0F};

  // These belong to the ProblemRegistry, whose lock guards them.
  std::size_t pins = 0;
  std::list<ProblemMap::iterator>::iterator lru_position;

  std::mutex live;  // guards the next two, and writing to the live texts
  std::shared_ptr<SharedLiveTexts> live_texts;
  std::weak_ptr<const IndexedPrompt> last_prompt;
};

}  // namespace das

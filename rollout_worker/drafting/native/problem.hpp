// Problems: the segments of a problem's history, the texts that are running, and the registry of all problems.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "live_texts.hpp"
#include "memory.hpp"
#include "segment.hpp"
#include "threads.hpp"

namespace das {

using SegmentList = std::vector<std::shared_ptr<const Segment>>;

// Neighbors in a list are merged unless the larger one is at least this many times as large as the smaller one.
inline constexpr std::size_t kSegmentGrowth = 4;

// An immutable list of segments. That of a problem's history also has the distinct generations of the problem's
// rollouts, in ascending order.
struct Segments {
  explicit Segments(const std::shared_ptr<ByteCounter>& counter,
                    std::span<const std::shared_ptr<const Segment>> all = {},
                    std::span<const std::int64_t> all_generations = {})
      : charge(counter, sizeof(Segments)),
        list(all.begin(), all.end(), counter.get()),
        generations(all_generations.begin(), all_generations.end(), counter.get()) {}

  std::size_t tokens() const {
    std::size_t tokens = 0;
    for (const auto& segment : list) tokens += segment->tokens();
    return tokens;
  }

  Charge charge;
  std::pmr::vector<std::shared_ptr<const Segment>> list;
  std::pmr::vector<std::int64_t> generations;
};

// Builds one segment of all documents of `segments`, in the order of their ids.
std::shared_ptr<const Segment> rebuild(const std::shared_ptr<ByteCounter>& counter,
                                       std::span<const std::shared_ptr<const Segment>> segments, std::size_t depth);

// Returns the list sorted by size, smallest segment first, as the next two functions expect it.
std::shared_ptr<const Segments> sorted_by_size(const std::shared_ptr<ByteCounter>& counter, SegmentList segments,
                                               std::span<const std::int64_t> generations);

// Returns whether merge() would change the list.
bool should_merge(const Segments& segments);

// Merges segments of similar size, so that sizes grow geometrically.
SegmentList merge(const std::shared_ptr<ByteCounter>& counter, const Segments& segments, std::size_t depth);

// The texts of requests that were open at the same time; freed when the last of them is closed.
struct SharedLiveTexts {
  explicit SharedLiveTexts(const std::shared_ptr<ByteCounter>& counter)
      : charge(counter, sizeof(SharedLiveTexts)), texts(counter.get()) {}
  Charge charge;
  LiveTexts texts;
};

// A prompt as a segment, where requests find occurrences of their own text. The requests of a group share it.
class IndexedPrompt {
 public:
  // Identifies a prompt.
  struct Key {
    std::size_t length;
    std::array<std::uint64_t, 2> hash;
    bool operator==(const Key&) const = default;
  };
  static Key key_of(std::span<const Token> prompt);

  // Indexes the prompt at once, unless it is long and there is a background thread, which does it then. Allocates
  // through `counter`.
  static std::shared_ptr<const IndexedPrompt> create(const std::shared_ptr<ByteCounter>& counter, const Key& key,
                                                     std::span<const Token> prompt, std::size_t depth,
                                                     BackgroundThread* background);
  IndexedPrompt(const std::shared_ptr<ByteCounter>& counter, const Key& key);

  const Key& key() const { return key_; }
  // Returns null if the prompt is not indexed yet. Later calls return the same segment.
  std::shared_ptr<const Segment> segment() const { return segment_.load(); }

 private:
  void build(std::span<const Token> prompt, std::size_t depth);

  Charge charge_;
  Key key_;
  std::pmr::vector<Token> waiting_;  // the prompt, until the background thread has indexed it
  AtomicSharedPtr<Segment> segment_;
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
  std::vector<std::string> rollout_ids() const;  // in the order of their addition
  // Adds `count` rollouts (removes them, if negative) with this reward to the mean.
  void count_reward(float reward, int count);
  // Deletes the history.
  void clear();

  // Indexes a prompt, see IndexedPrompt, unless the last request had the same one.
  std::shared_ptr<const IndexedPrompt> index_prompt(std::span<const Token> prompt, std::size_t depth,
                                                    BackgroundThread* background);

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

class ProblemRegistry;

// Keeps a problem in the registry. A problem without rollouts is removed together with its last pin.
class ProblemPin {
 public:
  ProblemPin() = default;
  ProblemPin(ProblemRegistry& registry, ProblemMap::iterator entry) : registry_(&registry), entry_(entry) {}
  ProblemPin(ProblemPin&& other) noexcept : registry_(std::exchange(other.registry_, nullptr)), entry_(other.entry_) {}
  ProblemPin& operator=(ProblemPin&&) = delete;
  ~ProblemPin();
  explicit operator bool() const { return registry_ != nullptr; }
  std::string_view id() const { return entry_->first; }
  Problem& operator*() const { return *entry_->second; }
  Problem* operator->() const { return entry_->second.get(); }

 private:
  ProblemRegistry* registry_ = nullptr;
  ProblemMap::iterator entry_;
};

class ProblemRegistry {
 public:
  explicit ProblemRegistry(const IndexBytes& bytes) : bytes_(bytes), problems_(bytes.all.get()) {}

  // Returns an empty pin if there is no such problem.
  ProblemPin find(std::string_view problem);
  // Creates the problem if it does not exist, and marks it as the most recently used one.
  ProblemPin use(std::string_view problem);
  // Returns the least recently used problem with rollouts, preferring those without pins; an empty pin if there is
  // none.
  ProblemPin least_recently_used();

  // Returns the ids of all problems that have rollouts, sorted.
  std::vector<std::string> ids();

  // The newest generation of all rollouts that were ever added.
  std::int64_t newest_generation() const { return newest_generation_.load(std::memory_order_relaxed); }
  void raise_newest_generation(std::int64_t generation);

 private:
  friend class ProblemPin;

  const IndexBytes bytes_;
  std::mutex mutex_;  // guards the next two; it is held for look-ups only
  ProblemMap problems_;
  std::list<ProblemMap::iterator> by_use_;  // least recently used first
  std::atomic<std::int64_t> newest_generation_{std::numeric_limits<std::int64_t>::min()};
};

}  // namespace das

// The index over all problems, and the open requests that draft from it.
#pragma once

#include <algorithm>
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
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "background.hpp"
#include "foreign_pool.hpp"
#include "live_text.hpp"
#include "memory.hpp"
#include "mixture.hpp"
#include "published.hpp"
#include "segments.hpp"
#include "worker_pool.hpp"

namespace das {

struct UnknownRequest : std::out_of_range {
  using std::out_of_range::out_of_range;
};

struct Rollout {
  std::string_view id;
  std::int64_t generation;
  std::span<const Token> context;  // what stood before the response, in later turns of a trajectory
  std::span<const Token> tokens;
  float reward;
};

struct DraftToken {
  Token token;
  Source source;  // that speaks most for it
  double probability;
  std::int64_t age;  // in weight versions, of the newest finished rollout that speaks for it; -1: none is finished
};

struct Draft {
  std::vector<DraftToken> tokens;
  std::size_t match_length = 0;
};

// An occurrence with the text that goes on from it.
struct FoundText {
  Source source;
  std::size_t match;
  std::int64_t generation;
  float reward;
  std::vector<Token> tokens;
  bool anchored;
};

// What was drafted, by the source that spoke most for a token. A drafted token is verified when the token the model
// really produced there is known and all drafted tokens before it were accepted; accepted when it is that token.
struct SourceCounts {
  std::uint64_t drafted = 0;
  std::uint64_t verified = 0;
  std::uint64_t accepted = 0;
};

// What a request drafts from.
struct Sources {
  bool history;
  bool self;
  bool siblings;
  bool foreign;
};

struct Opening {
  std::span<const Token> prompt;
  std::size_t context;  // so many tokens at the end of the prompt came behind that of the trajectory
  Sources sources;
  std::span<const Token> ends;  // tokens behind which nothing is sampled
};

struct Limits {
  std::size_t bytes;        // of everything; 0: none
  std::size_t pool_tokens;  // of the foreign pool; 0: there is none
};

// The last tokens of a text that grows, as many as are compared.
class Recent {
 public:
  Recent(std::size_t depth, std::pmr::memory_resource* memory) : depth_(depth), tokens_(memory) {}
  void push(Token token) { push({&token, 1}); }
  void push(std::span<const Token> tokens) {
    if (tokens_.size() >= kSpare * depth_)
      tokens_.erase(tokens_.begin(), tokens_.end() - static_cast<std::ptrdiff_t>(depth_));
    const auto last = tokens.last(std::min(tokens.size(), depth_));
    tokens_.insert(tokens_.end(), last.begin(), last.end());
  }
  std::span<const Token> tokens() const {
    return std::span<const Token>(tokens_).last(std::min(tokens_.size(), depth_));
  }

 private:
  static constexpr std::size_t kSpare = 4;  // times the depth, so that tokens are moved now and then only
  std::size_t depth_;
  std::pmr::vector<Token> tokens_;
};

// Writers (add, drop) of one problem take turns; they build aside and swap the result in, and leave merging to the
// background. Drafting never waits for them. The mutexes that open and close share with writers are held for a look-up
// only.
class SuffixIndex {
 public:
  using Handle = std::int64_t;

  // Batches are drafted by `threads` threads, one of them the caller's.
  SuffixIndex(std::size_t depth, std::size_t threads, Limits limits);

  std::size_t add(std::string_view problem, std::span<const Rollout> rollouts);
  std::size_t set_rewards(std::string_view problem, std::span<const std::pair<std::string_view, float>> rewards);
  bool drop_rollout(std::string_view problem, std::string_view rollout_id);
  std::size_t drop_before(std::string_view problem, std::int64_t generation);
  bool drop_problem(std::string_view problem);
  // Problems whose history was thrown out to stay within the limit, since the last call.
  std::vector<std::string> take_evicted();
  // Returns when nothing is left to merge.
  void settle() { background_.settle(); }

  std::vector<std::string> problems();
  std::vector<std::string> rollouts(std::string_view problem);  // in the order they were added
  std::size_t tokens(std::string_view problem);
  std::size_t pool_tokens() const { return pool_.tokens(); }
  std::size_t bytes() const { return bytes_->bytes(); }
  std::size_t bytes(std::string_view problem);

  Handle open(std::string_view problem, const Opening& opening);
  void extend(std::span<const Handle> handles, std::span<const std::span<const Token>> tokens);
  void close(Handle handle);
  std::vector<Draft> draft(std::span<const Handle> handles, std::span<const std::size_t> budgets,
                           std::span<const double> min_survivals);

  // What a draft is made of; `length` tokens of each at most.
  std::vector<FoundText> occurrences(Handle handle, std::size_t length);

  // What was learned of drafts, to go on from in another index; see Mixture.
  std::vector<Learned> learned() const { return mixture_.learned(); }
  bool take(std::span<const Learned> others) { return mixture_.take(others); }

  SourceCounts counts(Source source) const;
  // Of tokens for which the history spoke most, those that were verified: as `drafted` here.
  AgeCounts::Counts counts_of_age(std::size_t age) const { return ages_.of(age); }

 private:
  // The texts of requests that were open at the same time, until the last of them is closed.
  struct Siblings {
    explicit Siblings(const std::shared_ptr<ByteCounter>& counter)
        : charge(counter, sizeof(Siblings)), text(counter.get()) {}
    Charge charge;
    LiveText text;
  };

  // A prompt, to be matched as a request's own text; the requests of a group share it.
  struct Prompt {
    std::size_t length;
    std::array<std::uint64_t, 2> hash;
    std::shared_ptr<const Segment> text;
  };

  struct RolloutRecord {
    std::int64_t generation;
    std::uint64_t number;
    float reward;
  };

  struct Problem;
  using Problems = std::pmr::map<std::pmr::string, std::unique_ptr<Problem>, std::less<>>;
  using Rollouts = std::pmr::map<std::pmr::string, RolloutRecord, std::less<>>;

  struct Problem {
    explicit Problem(const std::shared_ptr<ByteCounter>& total);
    void rewarded(float reward, int count);  // `count` more rollouts have this reward
    Charge charge;
    std::mutex writer;  // for what follows, and replacing history
    Rollouts rollouts;
    double rewards = 0.0;  // the sum of those known
    std::int64_t with_reward = 0;
    bool merging = false;  // the background will
    Published<Segments> history;
    std::atomic<bool> empty{true};  // as rollouts.empty(), to be read without a lock, as the next
    std::atomic<float> mean_reward{0.0F};
    std::size_t pins = 0;  // how many rely on this object; guarded by problems_mutex_, as the next
    std::list<Problems::iterator>::iterator use;  // its place among the problems by their last use
    std::mutex live;                              // for writing to live texts, and for the next
    std::shared_ptr<Siblings> siblings;
    std::weak_ptr<const Prompt> prompt;  // the last one
  };

  // Keeps a problem in place while it is written to or drafted from; one without rollouts goes with its last pin.
  class Pin {
   public:
    Pin() = default;
    Pin(SuffixIndex& index, Problems::iterator place) : index_(&index), place_(place) {}
    Pin(Pin&& other) noexcept : index_(std::exchange(other.index_, nullptr)), place_(other.place_) {}
    Pin& operator=(Pin&&) = delete;
    ~Pin();
    explicit operator bool() const { return index_ != nullptr; }
    std::string_view id() const { return place_->first; }
    Problem& operator*() const { return *place_->second; }
    Problem* operator->() const { return place_->second.get(); }

   private:
    SuffixIndex* index_ = nullptr;
    Problems::iterator place_;
  };

  // Where a request stood in a rollout of the history.
  struct Anchor {
    std::uint64_t segment;
    std::size_t position;
    std::size_t length;  // of the response there
  };

  struct Request {
    Request(const std::shared_ptr<ByteCounter>& total, Pin pinned, std::size_t depth, const Opening& opening);
    Charge charge;
    std::mutex mutex;
    Pin problem;
    const Sources sources;
    const std::uint32_t origin;  // of its problem in the foreign pool
    const std::pmr::vector<Token> ends;
    Recent response;  // behind kStart, or what stood before it
    std::shared_ptr<const Prompt> prompt;
    Recent own;  // prompt and response
    // Its own response is among these: those of its problem if it drafts from siblings, else a list of its own.
    std::shared_ptr<Siblings> siblings;
    LiveText::Text number = LiveText::kNoText;
    std::size_t length = 0;  // of the response
    std::pmr::vector<Anchor> anchors;
    std::pmr::vector<Anchor> next_anchors;  // once what follows them is known
    bool closed = false;
    std::pmr::vector<DraftPosition> positions;
    std::size_t drafted = 0;
    std::size_t observed = 0;  // of the positions
  };

  // An empty pin if there is no such problem and it is not to be created. A use makes it the last to be evicted.
  Pin pin(std::string_view problem, bool use);
  std::shared_ptr<const Segments> arranged(const Problem& problem, SegmentList segments) const;
  // Swaps a problem's segments, and has the background merge them where some should be. The writer's lock is held, as
  // for the next ones.
  void install(std::string_view id, Problem& problem, std::shared_ptr<const Segments> segments) noexcept;
  void merge(Problem& problem) const;
  void drop(std::string_view id, Problem& problem, std::span<const Rollouts::iterator> rollouts);
  void clear(Problem& problem);
  // Has the background throw out the least recently used histories until everything fits.
  bool over() const { return limits_.bytes > 0 && bytes() > limits_.bytes; }
  void evict_later();
  void evict();
  Pin least_recently_used();
  const std::shared_ptr<Request>& find(Handle handle) const;  // requests_mutex_ is held
  std::vector<std::shared_ptr<Request>> find(std::span<const Handle> handles) const;
  void extend_one(Request& request, std::span<const Token> tokens);
  std::shared_ptr<const Prompt> prompt_of(Problem& problem, std::span<const Token> tokens) const;
  void find_occurrences(const Request& request, const Segments& history, const Segments* pool,
                        std::vector<Occurrence>& found) const;
  // Flags, and adds, occurrences in rollouts that the request has gone along with.
  void find_anchored(const Request& request, const Segments& history, std::vector<Occurrence>& found) const;
  // Remembers where the longest matches stand.
  void anchor(Request& request, const Segments& history, std::span<const Occurrence> found) const;
  Draft draft_one(Request& request, std::size_t budget, double min_survival);

  const std::size_t depth_;
  const Limits limits_;
  const std::shared_ptr<ByteCounter> bytes_;
  ForeignPool pool_;
  Mixture mixture_;
  WorkerPool workers_;
  struct Counters {
    std::atomic<std::uint64_t> drafted{0};
    std::atomic<std::uint64_t> verified{0};
    std::atomic<std::uint64_t> accepted{0};
  };
  std::array<Counters, kSources> counters_;
  AgeCounts ages_;
  std::atomic<std::uint64_t> next_number_{0};
  std::atomic<std::int64_t> newest_{std::numeric_limits<std::int64_t>::min()};  // generation that was ever added
  std::mutex problems_mutex_;
  Problems problems_;
  std::list<Problems::iterator> by_use_;  // the least recently used first
  std::atomic<bool> evicting_{false};     // the background will, or does
  std::mutex evicted_mutex_;              // for the next
  std::vector<std::string> evicted_;
  // A handle is a serial number and, in its last digits, the place of the request.
  struct Place {
    Handle handle = -1;
    std::shared_ptr<Request> request;
  };
  static constexpr Handle kPlaces = Handle{1} << 24;
  mutable std::mutex requests_mutex_;  // for the next ones
  std::vector<Place> requests_;
  std::vector<Handle> free_places_;
  Handle serial_ = 0;
  Background background_;  // goes first: what it does needs the others
};

}  // namespace das

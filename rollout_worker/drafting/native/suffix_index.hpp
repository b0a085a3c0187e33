// The index over all problems, and the open requests that draft from it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "calibration.hpp"
#include "memory.hpp"
#include "own_text.hpp"
#include "segment.hpp"
#include "vote.hpp"

namespace das {

struct UnknownRequest : std::out_of_range {
  using std::out_of_range::out_of_range;
};

struct Rollout {
  std::string_view id;
  std::int64_t generation;
  std::span<const Token> tokens;
};

struct Draft {
  std::vector<Token> tokens;
  std::vector<double> probabilities;
  std::optional<Source> source;  // none: nothing drafted
  std::size_t match_length = 0;
};

// Writers (add, drop) of one problem take turns; they build aside and swap the result in. Drafting never waits for
// them. The mutexes that open and close share with writers are held for a look-up only.
class SuffixIndex {
 public:
  using Handle = std::int64_t;

  SuffixIndex(std::size_t max_match, std::size_t min_match);

  std::size_t add(std::string_view problem, std::span<const Rollout> rollouts);
  bool drop_rollout(std::string_view problem, std::string_view rollout_id);
  std::size_t drop_before(std::string_view problem, std::int64_t generation);
  bool drop_problem(std::string_view problem);

  std::vector<std::string> problems();
  std::vector<std::string> rollouts(std::string_view problem);  // in the order they were added
  std::size_t tokens(std::string_view problem);
  std::size_t bytes() const { return bytes_->bytes(); }
  std::size_t bytes(std::string_view problem);

  Handle open(std::string_view problem, std::span<const Token> prompt, bool history, bool self);
  void extend(Handle handle, std::span<const Token> tokens);
  void close(Handle handle);
  std::vector<Draft> draft(std::span<const Handle> handles, std::span<const std::size_t> budgets, double min_survival);

  std::vector<CalibrationRow> calibration() const { return calibration_.rows(); }
  SourceCounts counts(Source source) const;

 private:
  // The segments of a problem at one moment; never changed after it is published.
  struct History {
    explicit History(const std::shared_ptr<ByteCounter>& counter)
        : charge(counter, sizeof(History)), segments(counter.get()) {}
    Charge charge;
    std::pmr::vector<std::shared_ptr<const Segment>> segments;
  };

  struct RolloutRecord {
    std::int64_t generation;
    std::uint64_t sequence;
  };

  struct Problem {
    explicit Problem(const std::shared_ptr<ByteCounter>& total);
    Charge charge;
    std::mutex writer;  // for rollouts, next_sequence, and replacing history
    std::pmr::map<std::pmr::string, RolloutRecord, std::less<>> rollouts;
    std::uint64_t next_sequence = 0;
    std::atomic<std::shared_ptr<const History>> history;
    std::atomic<bool> empty{true};  // as rollouts.empty(), to be read without a lock
    std::size_t pins = 0;           // how many rely on this object; guarded by problems_mutex_
  };

  using Problems = std::pmr::map<std::pmr::string, std::unique_ptr<Problem>, std::less<>>;

  // Keeps a problem in place while it is written to or drafted from; one without rollouts goes with its last pin.
  class Pin {
   public:
    Pin() = default;
    Pin(SuffixIndex& index, Problems::iterator place) : index_(&index), place_(place) {}
    Pin(Pin&& other) noexcept : index_(std::exchange(other.index_, nullptr)), place_(other.place_) {}
    Pin& operator=(Pin&&) = delete;
    ~Pin();
    explicit operator bool() const { return index_ != nullptr; }
    Problem& operator*() const { return *place_->second; }
    Problem* operator->() const { return place_->second.get(); }

   private:
    SuffixIndex* index_ = nullptr;
    Problems::iterator place_;
  };

  struct Request {
    Request(const std::shared_ptr<ByteCounter>& total, Pin pinned, std::size_t depth, bool history, bool self);
    Charge charge;
    std::mutex mutex;
    Pin problem;
    bool from_history;
    bool from_self;
    GrowingText text;  // the prompt, if it is a source, and the response
    OwnPositions own;
    std::size_t response_length = 0;
    std::array<Candidate, kSources> candidates;
    std::optional<Source> chosen;
  };

  // An empty pin if there is no such problem and it is not to be created.
  Pin pin(std::string_view problem, bool create);
  // Builds the new documents into a segment, merges segments so that each is at least kGrowth times as large as the
  // next smaller one, and publishes the result.
  void publish(Problem& problem, std::vector<std::shared_ptr<const Segment>> segments,
               std::vector<Document> documents) const;
  void drop(Problem& problem, std::vector<std::uint64_t> sequences) const;
  std::shared_ptr<Request> find(Handle handle) const;  // requests_mutex_ is held
  void draft_from_history(Request& request, std::size_t budget, double min_survival) const;
  void draft_from_self(Request& request, std::size_t budget, double min_survival) const;
  Draft draft_one(Request& request, std::size_t budget, double min_survival);

  const std::size_t max_match_;
  const std::size_t min_match_;
  const std::shared_ptr<ByteCounter> bytes_;
  Calibration calibration_;
  struct Counters {
    std::atomic<std::uint64_t> drafts{0};
    std::atomic<std::uint64_t> drafted{0};
    std::atomic<std::uint64_t> verified{0};
    std::atomic<std::uint64_t> accepted{0};
  };
  std::array<Counters, kSources> counters_;
  std::mutex problems_mutex_;
  Problems problems_;
  mutable std::mutex requests_mutex_;
  std::pmr::map<Handle, std::shared_ptr<Request>> requests_;
  Handle next_handle_ = 0;
};

}  // namespace das

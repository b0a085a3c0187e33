// Computing drafts for the likely outcomes of a verification while the model's forward pass runs.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "request_drafter.hpp"
#include "threads.hpp"

namespace das {

// The drafts that a step lacks. Several threads share them until a deadline; one thread takes each. The step does not
// wait for a thread that is late. Such a thread still has this object, and at most computes a draft that the request
// still lacks.
class MissingDrafts {
 public:
  // The requests are given by their rows in the plan.
  MissingDrafts(const RequestDrafter& drafter, std::shared_ptr<const RequestList> requests,
                std::vector<std::uint32_t> rows, TimePoint deadline)
      : deadline(deadline),
        drafter_(drafter),
        requests_(std::move(requests)),
        rows_(std::move(rows)),
        is_computed_(rows_.size()) {}

  // Returns the number of a draft that no other thread has taken, or nothing after the deadline.
  std::optional<std::size_t> take();
  // Returns how many were taken, the lowest numbers.
  std::size_t taken() const { return std::min(next_.load(std::memory_order_relaxed), rows_.size()); }
  // Computes a draft, which then is the last one of its request. Waits for the request's lock.
  void compute(std::size_t number);
  bool is_computed(std::size_t number) const { return is_computed_[number].load(std::memory_order_acquire); }

  const TimePoint deadline;

 private:
  const RequestDrafter& drafter_;
  const std::shared_ptr<const RequestList> requests_;
  const std::vector<std::uint32_t> rows_;
  std::atomic<std::size_t> next_{0};
  std::vector<std::atomic<bool>> is_computed_;
};

// The order in which the requests of a plan are served.
struct ValueOrder {
  std::vector<std::uint32_t> rows;  // those whose tokens are worth most come first
  double max_gain = 0.0;            // the highest token_gain
};

// Threads that work between two steps. They share the requests, beginning with those whose tokens are worth most. They
// first learn from the tokens that the last step reported, append them to the live texts, and compute the drafts that
// the step had no time for. They then compute drafts for the outcomes of the requests' last drafts, most valuable
// first, until all are done or the next step interrupts them. A thread holds the lock of one request at a time, for the
// duration of one draft. During the step, the threads help to compute the drafts that are missing, as their processors'
// caches hold what they need.
//
// Only the thread that makes the steps may call start(), interrupt() and share(), none of which ever waits.
class DraftAhead {
 public:
  DraftAhead(RequestDrafter& drafter, std::size_t threads);
  ~DraftAhead();
  DraftAhead(const DraftAhead&) = delete;
  DraftAhead& operator=(const DraftAhead&) = delete;

  // Begins to work for the requests of a step.
  void start(std::shared_ptr<const RequestList> requests, std::shared_ptr<const ValueOrder> order);
  // Has the threads stop after the drafts that they are computing.
  void interrupt();
  // Shares the drafts that a step lacks with the threads that are awake, until withdraw() is called.
  void share(const std::shared_ptr<MissingDrafts>& missing);
  void withdraw();
  // Waits until nothing is left to do. Any thread may call it.
  void wait_idle();

 private:
  // An outcome that needs a draft.
  struct Task {
    std::uint32_t number;  // of the request, in the order of the round
    Outcome outcome;
  };
  // Tasks of a lower tier are worth more.
  static constexpr std::size_t kTiers = 32;

  // The work between two steps.
  struct Round {
    Round(std::shared_ptr<const RequestList> requests, std::shared_ptr<const ValueOrder> order, std::uint32_t id)
        : requests(std::move(requests)), order(std::move(order)), id(id) {}
    // Returns null in a row that is not in use.
    Request* request(std::uint32_t number) const { return (*requests)[order->rows[number]].get(); }
    void interrupt() { is_interrupted.store(true, std::memory_order_relaxed); }
    // Must be asked again with a request's lock: the next step, and other threads after it, may have changed the
    // request since then.
    bool is_over() const { return is_interrupted.load(std::memory_order_relaxed); }

    const std::shared_ptr<const RequestList> requests;
    const std::shared_ptr<const ValueOrder> order;
    const std::uint32_t id;
    std::atomic<std::size_t> next{0};  // number of the next request, in this order
    std::atomic<bool> is_interrupted{false};
  };

  struct Helper {
    Mailbox<Round> rounds;
    Mailbox<MissingDrafts> missing;
    std::atomic<std::uint32_t> last_done{0};  // id of the last round that is over
    // The next three belong to the thread.
    std::vector<std::uint32_t> requests;  // numbers of those that it has taken, and that need drafts
    std::array<std::vector<Task>, kTiers> tasks;
    std::vector<Token> successors;
    std::thread thread;
  };

  void serve(Helper& helper);
  static void help(Helper& helper);
  void work(Round& round, Helper& helper);
  // The next four require the request's lock.
  // Appends the outcomes of a request's last draft to the tasks.
  void add_tasks(const Request& request, std::uint32_t number, double value, Helper& helper) const;
  static void add_task(const Request& request, std::uint32_t number, Outcome outcome, double probability, double value,
                       Helper& helper);
  // Appends outcomes that no occurrence of the last draft proposes, and that were not prepared yet: the tokens that
  // follow `limit` occurrences in the history. Returns false if the last draft has fewer than `accepted` tokens, or if
  // they are unlikely to be accepted, so that there is nothing to add for larger numbers either.
  bool add_rare_tasks(const Request& request, std::uint32_t number, double value, std::size_t accepted,
                      std::size_t limit, Helper& helper) const;
  void prepare(Request& request, Outcome outcome) const;
  void run_rare_tasks(const Round& round, std::size_t limit, Helper& helper) const;
  void run_tasks(const Round& round, Helper& helper) const;

  RequestDrafter& drafter_;
  std::weak_ptr<Round> current_;         // the last one
  std::atomic<std::uint32_t> round_{0};  // its id, which is the number of calls of start()
  std::atomic<bool> is_stopping_{false};
  std::vector<std::unique_ptr<Helper>> helpers_;
};

}  // namespace das

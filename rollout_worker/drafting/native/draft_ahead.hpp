// Computing drafts for the likely outcomes of a verification while the model's forward pass runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "request_drafter.hpp"

namespace das {

// A thread that works between two steps. It first learns from the tokens that the last step reported, and appends them
// to the live texts. It then computes drafts for the outcomes of the requests' last drafts, likeliest first, until all
// are done or the next step interrupts it. It holds the lock of one request at a time, for the duration of one draft.
class DraftAhead {
 public:
  explicit DraftAhead(RequestDrafter& drafter) : drafter_(drafter) {}
  ~DraftAhead();
  DraftAhead(const DraftAhead&) = delete;
  DraftAhead& operator=(const DraftAhead&) = delete;

  // Begins to work for the requests of a step. Does not wait.
  void start(std::span<const std::shared_ptr<Request>> requests);
  // Has the thread stop after the draft that it is computing. Does not wait.
  void interrupt() { is_interrupted_.store(true, std::memory_order_relaxed); }
  // Waits until nothing is left to do.
  void wait_idle();

 private:
  // An outcome for which a draft is to be computed.
  struct Task {
    std::uint32_t tier;  // tasks of a lower tier are likelier
    std::uint32_t request;
    Outcome outcome;
  };

  void serve();
  // Returns the number of the next round, or 0 if the thread is to end.
  std::uint32_t wait_for_round(std::uint32_t last) const;
  bool is_over(std::uint32_t round) const {
    return is_interrupted_.load(std::memory_order_relaxed) || round_.load(std::memory_order_relaxed) != round;
  }
  void work(std::uint32_t round);
  // Appends the outcomes of a request's last draft to tasks_. The request's lock is held, also for the next one.
  void add_tasks(const Request& request, std::uint32_t number);
  void prepare(Request& request, Outcome outcome) const;

  RequestDrafter& drafter_;
  std::mutex mutex_;  // guards the next
  std::vector<std::weak_ptr<Request>> next_requests_;
  std::atomic<std::uint32_t> round_{0};  // number of calls of start(); changed by the caller's thread
  std::atomic<std::uint32_t> done_{0};   // the last round that is over
  std::atomic<bool> is_interrupted_{false};
  std::atomic<bool> is_stopping_{false};
  // These belong to the thread.
  std::vector<std::weak_ptr<Request>> requests_;
  std::vector<Task> tasks_;
  std::thread thread_;  // started by the first round
};

}  // namespace das

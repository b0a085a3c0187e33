// Computing drafts for the likely outcomes of a verification while the model's forward pass runs.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "request_drafter.hpp"

namespace das {

// Work that several threads share until a deadline: indices below `count`. One thread takes each of them.
struct SharedWork {
  std::function<void(std::size_t)> run;
  std::size_t count = 0;
  std::chrono::steady_clock::time_point deadline;
  std::atomic<std::size_t> next{0};

  void take_all() {
    while (std::chrono::steady_clock::now() < deadline) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      run(i);
    }
  }
  // Returns how many indices were taken, the lowest ones.
  std::size_t taken() const { return std::min(next.load(std::memory_order_relaxed), count); }
};

// A thread that works between two steps. It first learns from the tokens that the last step reported, appends them to
// the live texts, and computes the drafts that the step had no time for. It then computes drafts for the outcomes of
// the requests' last drafts, most likely first, until all are done or the next step interrupts it. It holds the lock of
// one request at a time, for the duration of one draft. During the step, it helps to compute the drafts that are
// missing, as its processor's caches hold what they need.
class DraftAhead {
 public:
  explicit DraftAhead(RequestDrafter& drafter) : drafter_(drafter) {}
  ~DraftAhead();
  DraftAhead(const DraftAhead&) = delete;
  DraftAhead& operator=(const DraftAhead&) = delete;

  // Begins to work for the requests of a step. Some of them may be null. Does not wait.
  void start(std::shared_ptr<const RequestList> requests);
  // Has the thread stop after the draft that it is computing. Does not wait.
  void interrupt() { is_interrupted_.store(true, std::memory_order_relaxed); }
  // Shares work with the thread, if it is awake, and returns when all of it is done, or when the deadline has passed
  // and nothing is being computed any more. `work` must live as long as this object.
  void share(SharedWork& work);
  // Waits until nothing is left to do.
  void wait_idle();

 private:
  // An outcome that needs a draft.
  struct Task {
    std::uint32_t tier;  // tasks of a lower tier are more likely
    std::uint32_t request;
    Outcome outcome;
  };

  void serve();
  // Returns the number of the next round, or 0 if the thread is to end. Helps with shared work in the meantime.
  std::uint32_t wait_for_round(std::uint32_t last);
  void help();
  bool is_over(std::uint32_t round) const {
    return is_interrupted_.load(std::memory_order_relaxed) || round_.load(std::memory_order_relaxed) != round;
  }
  void work(const RequestList& requests, std::uint32_t round);
  // The next four require the request's lock.
  // Appends the outcomes of a request's last draft to tasks_.
  void add_tasks(const Request& request, std::uint32_t number);
  void add_task(const Request& request, std::uint32_t number, Outcome outcome, double probability);
  // Appends outcomes that no occurrence of the last draft proposes, and that were not prepared yet: the tokens that
  // follow `limit` occurrences in the history. Returns false if the last draft has fewer than `accepted` tokens, or if
  // they are unlikely to be accepted, so that there is nothing to add for larger numbers either.
  bool add_rare_tasks(const Request& request, std::uint32_t number, std::size_t accepted, std::size_t limit);
  void prepare(Request& request, Outcome outcome) const;
  void run_rare_tasks(const RequestList& requests, std::size_t limit, std::uint32_t round);
  void run_tasks(const RequestList& requests, std::uint32_t round);

  RequestDrafter& drafter_;
  std::mutex mutex_;  // guards the next, and is held while round_ changes with it
  std::shared_ptr<const RequestList> next_requests_;
  std::atomic<std::uint32_t> round_{0};  // number of calls of start(); changed by the caller's thread
  std::atomic<std::uint32_t> done_{0};   // the last round that is over
  std::atomic<bool> is_interrupted_{false};
  std::atomic<bool> is_stopping_{false};
  std::atomic<SharedWork*> shared_{nullptr};
  std::atomic<bool> is_helping_{false};
  // These belong to the thread.
  std::vector<Task> tasks_;
  std::vector<Token> successors_;
  std::thread thread_;  // started by the first round
};

}  // namespace das

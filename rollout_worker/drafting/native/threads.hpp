// Threads: waiting without giving up the processor, passing objects without waiting, tasks in the background, and a
// pool that shares one task.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace das {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using TimePoint = std::chrono::steady_clock::time_point;

// Waits until is_done() returns true, or until a deadline, and returns its last result.
template <class IsDone>
bool spin_until(IsDone is_done, TimePoint deadline) {
  if (is_done()) return true;
  constexpr int kPausesPerLook = 16;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      pause_briefly();
      if (is_done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return is_done();
}
template <class IsDone>
bool spin_until(IsDone is_done, std::chrono::microseconds limit) {
  return spin_until(is_done, std::chrono::steady_clock::now() + limit);
}

// The same for longer times: after a while, gives other threads the processor in the meantime.
template <class IsDone>
bool wait_until(IsDone is_done, TimePoint deadline) {
  constexpr std::chrono::milliseconds kSpin{1};
  if (spin_until(is_done, std::min(deadline, std::chrono::steady_clock::now() + kSpin))) return true;
  while (std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
    if (is_done()) return true;
  }
  return false;
}

// Passes objects to another thread. Neither of the two ever waits for the other.
template <class T>
class Mailbox {
 public:
  Mailbox() = default;
  ~Mailbox() { clear(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Replaces an object that was not taken yet.
  void put(std::shared_ptr<T> object) { delete box_.exchange(new std::shared_ptr<T>(std::move(object))); }
  void clear() { delete box_.exchange(nullptr); }
  bool is_empty() const { return box_.load(std::memory_order_relaxed) == nullptr; }
  // Returns null if there is none.
  std::shared_ptr<T> take() {
    const std::unique_ptr<std::shared_ptr<T>> object(box_.exchange(nullptr));
    return object ? std::move(*object) : nullptr;
  }

 private:
  std::atomic<std::shared_ptr<T>*> box_{nullptr};
};

class BackgroundThread {
 public:
  BackgroundThread() : thread_([this] { serve(); }) {}
  ~BackgroundThread();  // discards tasks that have not started
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Queues a task behind the others. A task that throws is abandoned. Returns false if there is no memory to queue it.
  bool submit(std::function<void()> task) noexcept;

  // Waits until no task is queued or running.
  void wait_idle();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;  // declared last, because it uses the other members
};

class WorkerPool {
 public:
  // The calling thread is one of `threads`; the others are started at the first call that needs them.
  explicit WorkerPool(std::size_t threads) : threads_(threads) {}
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls work(i) for every i below `count` and returns when all calls have returned. If calls throw, rethrows one of
  // the exceptions. A call made while another one is running does all its work in the calling thread.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);
  std::size_t size() const { return threads_; }

 private:
  static constexpr std::size_t kMaxChunk = 8;  // the most items that a thread takes at a time

  void serve();
  void run_chunks();

  const std::size_t threads_;
  std::mutex running_;
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  std::vector<std::thread> workers_;
  const std::function<void(std::size_t)>* work_ = nullptr;
  std::size_t count_ = 0;
  std::size_t chunk_ = 1;
  // Changed only under the lock, but read without it by threads that spin.
  std::atomic<std::size_t> round_{0};
  std::atomic<std::size_t> busy_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<std::size_t> next_{0};
  std::exception_ptr error_;
};

}  // namespace das

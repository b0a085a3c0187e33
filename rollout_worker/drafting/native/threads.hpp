// Threads: waiting without giving up the processor, tasks in the background, and a pool that shares one task.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
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

// Waits until is_done() returns true, for a limited time, and returns its last result. Returns at once if there are
// fewer processors than `threads`, those that work at the same time, since one of them could not run in the meantime.
template <class IsDone>
bool spin_until(IsDone is_done, std::chrono::microseconds limit, std::size_t threads = 2) {
  static const std::size_t processors = std::thread::hardware_concurrency();
  if (is_done()) return true;
  if (processors < threads) return false;
  constexpr int kPausesPerLook = 16;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      pause_briefly();
      if (is_done()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

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

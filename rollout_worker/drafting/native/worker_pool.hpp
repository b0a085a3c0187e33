// A small pool of threads that share the work of one call. They spin for a moment before they sleep, because waking a
// thread takes about as long as a call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace das {

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

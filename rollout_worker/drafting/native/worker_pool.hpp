// A small pool of threads that share the work of one call.
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

 private:
  static constexpr std::size_t kChunk = 8;  // items that a thread takes at a time

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
  std::size_t round_ = 0;
  std::size_t busy_ = 0;
  bool stopping_ = false;
  std::atomic<std::size_t> next_{0};
  std::exception_ptr error_;
};

}  // namespace das

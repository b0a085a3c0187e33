// A few threads that share the work of one call.
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
  // The calling thread is one of `threads`; the others are started when they are first needed.
  explicit WorkerPool(std::size_t threads) : threads_(threads) {}
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls work(i) for every i below `count`, and returns when all have returned; throws what one of them threw. A call
  // that comes while another is under way does its work alone.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);

 private:
  static constexpr std::size_t kAtOnce = 8;

  void serve();
  void take();

  const std::size_t threads_;
  std::mutex running_;
  std::mutex mutex_;
  std::condition_variable begun_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
  const std::function<void(std::size_t)>* work_ = nullptr;
  std::size_t count_ = 0;
  std::size_t round_ = 0;
  std::size_t busy_ = 0;
  bool ending_ = false;
  std::atomic<std::size_t> next_{0};
  std::exception_ptr error_;
};

}  // namespace das

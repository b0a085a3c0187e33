#include "worker_pool.hpp"

#include <algorithm>
#include <utility>

namespace das {

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  begun_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  std::unique_lock running(running_, std::try_to_lock);
  if (threads_ < 2 || count <= kAtOnce || !running) {
    for (std::size_t i = 0; i < count; ++i) work(i);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    try {
      while (workers_.size() + 1 < threads_) workers_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {
      // The system gives no more threads: those that there are do the work.
    }
    work_ = &work;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_ = workers_.size();
    ++round_;
  }
  begun_.notify_all();
  take();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void WorkerPool::serve() {
  std::size_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    begun_.wait(lock, [&] { return ending_ || round_ != seen; });
    if (ending_) return;
    seen = round_;
    lock.unlock();
    take();
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

void WorkerPool::take() {
  try {
    while (true) {
      const std::size_t first = next_.fetch_add(kAtOnce, std::memory_order_relaxed);
      if (first >= count_) return;
      for (std::size_t i = first; i < std::min(count_, first + kAtOnce); ++i) (*work_)(i);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    next_.store(count_, std::memory_order_relaxed);
  }
}

}  // namespace das

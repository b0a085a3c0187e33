#include "worker_pool.hpp"

#include <algorithm>
#include <utility>

namespace das {

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  std::unique_lock running(running_, std::try_to_lock);
  if (threads_ < 2 || count <= kChunk || !running) {
    for (std::size_t i = 0; i < count; ++i) work(i);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    try {
      while (workers_.size() + 1 < threads_) workers_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {
      // The system has no more threads. The existing ones do the work.
    }
    work_ = &work;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_ = workers_.size();
    ++round_;
  }
  started_.notify_all();
  run_chunks();
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void WorkerPool::serve() {
  std::size_t last_round = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return stopping_ || round_ != last_round; });
    if (stopping_) return;
    last_round = round_;
    lock.unlock();
    run_chunks();
    lock.lock();
    if (--busy_ == 0) finished_.notify_one();
  }
}

void WorkerPool::run_chunks() {
  try {
    while (true) {
      const std::size_t first = next_.fetch_add(kChunk, std::memory_order_relaxed);
      if (first >= count_) return;
      for (std::size_t i = first; i < std::min(count_, first + kChunk); ++i) (*work_)(i);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    next_.store(count_, std::memory_order_relaxed);
  }
}

}  // namespace das

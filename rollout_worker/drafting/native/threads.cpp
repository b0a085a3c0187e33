#include "threads.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace das {

BackgroundThread::~BackgroundThread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool BackgroundThread::submit(std::function<void()> task) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  } catch (const std::exception&) {
    return false;
  }
  changed_.notify_all();
  return true;
}

void BackgroundThread::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
}

void BackgroundThread::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (stopping_) return;
    busy_ = true;
    {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception&) {
        // Out of memory. Tasks only optimize, so skipping one is safe.
      }
    }
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

namespace {

// A thread spins for this time before it sleeps.
constexpr std::chrono::microseconds kSpin{50};

// Threads take a part of the items at a time. Each should get several parts, so that all end at the same time.
constexpr std::size_t kPartsPerThread = 4;

}  // namespace

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
  if (threads_ < 2 || count < 2 || !running) {
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
    chunk_ = std::clamp<std::size_t>(count / (threads_ * kPartsPerThread), 1, kMaxChunk);
    next_.store(0, std::memory_order_relaxed);
    busy_ = workers_.size();
    ++round_;
  }
  started_.notify_all();
  run_chunks();
  spin_until([this] { return busy_.load(std::memory_order_relaxed) == 0; }, kSpin);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void WorkerPool::serve() {
  std::size_t last_round = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    lock.unlock();
    spin_until([&] { return stopping_ || round_.load(std::memory_order_relaxed) != last_round; }, kSpin);
    lock.lock();
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
      const std::size_t first = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (first >= count_) return;
      for (std::size_t i = first; i < std::min(count_, first + chunk_); ++i) (*work_)(i);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    next_.store(count_, std::memory_order_relaxed);
  }
}

}  // namespace das

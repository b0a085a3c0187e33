#include "background_thread.hpp"

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

}  // namespace das

#include "background.hpp"

#include <exception>
#include <utility>

namespace das {

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Background::later(std::function<void()> work) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  } catch (const std::exception&) {
    return false;
  }
  changed_.notify_all();
  return true;
}

void Background::settle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return work_.empty() && !busy_; });
}

void Background::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !work_.empty(); });
    if (ending_) return;
    busy_ = true;
    {
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      try {
        work();
      } catch (const std::exception&) {
        // Out of memory: what it would have improved stays as it was.
      }
    }
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace das

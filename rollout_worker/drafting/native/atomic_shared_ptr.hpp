// A shared pointer that several threads may read and replace.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace das {

// The lock is held only while the pointer is copied, never while an object is built or destroyed. libstdc++'s
// std::atomic<std::shared_ptr> does the same with a bit of the pointer as its lock, but up to version 13 its load()
// unlocks without release ordering.
template <class T>
class AtomicSharedPtr {
 public:
  std::shared_ptr<const T> load() const {
    const std::lock_guard lock(mutex_);
    return value_;
  }

  void store(std::shared_ptr<const T> value) {
    {
      const std::lock_guard lock(mutex_);
      value_.swap(value);
    }
    // The previous value is released here, without the lock.
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const T> value_;
};

}  // namespace das

// What is swapped in as a whole while others read it.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace das {

// A shared pointer for several threads. The lock is held while the pointer is copied, never while anything is built or
// destroyed. (libstdc++'s std::atomic<std::shared_ptr> does the same with a bit of the pointer as its lock, but up to
// version 13 its load() lets go of it without a release.)
template <class T>
class Published {
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
    // what was published before is released here
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const T> value_;
};

}  // namespace das

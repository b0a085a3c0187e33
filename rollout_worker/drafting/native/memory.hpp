// Exact accounting of the heap memory that the index holds, and pointers that threads share.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <utility>

namespace das {

// A memory resource that counts the bytes allocated through it, also in its parents. All containers of one problem (or
// of one open request) allocate through the same counter, so its value is the sum of their capacities.
class ByteCounter final : public std::pmr::memory_resource {
 public:
  explicit ByteCounter(std::shared_ptr<ByteCounter> parent = nullptr, std::shared_ptr<ByteCounter> other = nullptr)
      : parent_(std::move(parent)), other_(std::move(other)) {}

  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  void add(std::size_t bytes) {
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
    if (parent_) parent_->add(bytes);
    if (other_) other_->add(bytes);
  }

  void subtract(std::size_t bytes) {
    bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    if (parent_) parent_->subtract(bytes);
    if (other_) other_->subtract(bytes);
  }

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* memory = std::pmr::new_delete_resource()->allocate(bytes, alignment);
    add(bytes);
    return memory;
  }

  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    subtract(bytes);
  }

  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

  std::shared_ptr<ByteCounter> parent_;
  std::shared_ptr<ByteCounter> other_;
  std::atomic<std::size_t> bytes_{0};
};

// The counters of the whole index.
struct IndexBytes {
  std::shared_ptr<ByteCounter> all = std::make_shared<ByteCounter>();
  // The part of `all` that eviction cannot release: open requests and what they share.
  std::shared_ptr<ByteCounter> in_use = std::make_shared<ByteCounter>();
};

// Counts a fixed-size object that is not allocated through the counter. It also keeps the counter alive for the
// containers of that object, so it must be declared as the first member.
class Charge {
 public:
  Charge(std::shared_ptr<ByteCounter> counter, std::size_t bytes) : counter_(std::move(counter)), bytes_(bytes) {
    counter_->add(bytes_);
  }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge() { counter_->subtract(bytes_); }

  const std::shared_ptr<ByteCounter>& counter() const { return counter_; }

 private:
  std::shared_ptr<ByteCounter> counter_;
  std::size_t bytes_;
};

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

// Waiting for another thread without giving up the processor.
#pragma once

#include <chrono>
#include <cstddef>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace das {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until is_done() returns true, for a limited time, and returns its last result. Returns at once if there are
// fewer processors than `threads`, those that work at the same time, since one of them could not run in the meantime.
template <class IsDone>
bool spin_until(IsDone is_done, std::chrono::microseconds limit, std::size_t threads = 2) {
  static const std::size_t processors = std::thread::hardware_concurrency();
  if (is_done()) return true;
  if (processors < threads) return false;
  constexpr int kPausesPerLook = 16;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      pause_briefly();
      if (is_done()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

}  // namespace das

// Waiting for another thread without giving up the processor.
#pragma once

#include <chrono>
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

// Waits until is_done() returns true, for a limited time, and returns its last result. Returns at once if there is only
// one processor, since the other thread could not run in the meantime.
template <class IsDone>
bool spin_until(IsDone is_done, std::chrono::microseconds limit) {
  static const bool has_processors = std::thread::hardware_concurrency() > 1;
  if (is_done()) return true;
  if (!has_processors) return false;
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

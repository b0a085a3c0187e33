// A thread for work that nobody waits for.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace das {

class Background {
 public:
  Background() : thread_([this] { serve(); }) {}
  ~Background();  // what has not begun is not done any more
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Has it done after what came before; work that throws is given up. Whether it will be: not if there is no memory.
  bool later(std::function<void()> work) noexcept;

  // Returns when nothing is left to do.
  void settle();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  bool ending_ = false;
  std::thread thread_;  // the last one: it needs the others
};

}  // namespace das

// A thread that runs tasks in the background.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace das {

class BackgroundThread {
 public:
  BackgroundThread() : thread_([this] { serve(); }) {}
  ~BackgroundThread();  // discards tasks that have not started
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Queues a task behind the others. A task that throws is abandoned. Returns false if there is no memory to queue it.
  bool submit(std::function<void()> task) noexcept;

  // Waits until no task is queued or running.
  void wait_idle();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;  // declared last, because it uses the other members
};

}  // namespace das

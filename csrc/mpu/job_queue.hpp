// Jobs that run one after the other: in the caller if it waits for them, otherwise in a thread that starts with the
// first such job. A job that fails ends the queue: later jobs fail with the same message.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace megazero::mpu {

class JobQueue {
 public:
  using Job = std::function<void()>;

  ~JobQueue() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Runs the job at once in this thread, after the jobs given before it.
  void run(const Job& job) {
    std::unique_lock<std::mutex> hold(mutex_);
    const std::uint64_t ticket = ++given_;
    finish(ticket - 1, hold);
    perform(job, hold);
    fail_if_failed(ticket);
  }

  // Hands the job to the thread and returns a ticket; the job is done once wait(ticket) returns.
  std::uint64_t start(Job job) {
    std::unique_lock<std::mutex> hold(mutex_);
    jobs_.push_back({++given_, std::move(job)});
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    const std::uint64_t ticket = given_;
    hold.unlock();
    changed_.notify_all();
    return ticket;
  }

  void wait(std::uint64_t ticket) {
    std::unique_lock<std::mutex> hold(mutex_);
    finish(ticket, hold);
    fail_if_failed(ticket);
  }

  std::uint64_t done() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return done_;
  }

 private:
  struct Entry {
    std::uint64_t ticket;
    Job job;
  };

  bool is_next() const { return !jobs_.empty() && jobs_.front().ticket == done_ + 1 && !busy_; }

  // Returns when the jobs up to `last` are done; jobs that the thread has not reached yet run here, which is sooner.
  void finish(std::uint64_t last, std::unique_lock<std::mutex>& hold) {
    while (done_ < last) {
      if (is_next()) {
        perform_next(hold);
      } else {
        changed_.wait(hold);
      }
    }
  }

  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    while (true) {
      changed_.wait(hold, [&] { return closing_ || is_next(); });
      if (closing_) return;
      perform_next(hold);
    }
  }

  void perform_next(std::unique_lock<std::mutex>& hold) {
    const Job job = std::move(jobs_.front().job);
    jobs_.pop_front();
    perform(job, hold);
  }

  void perform(const Job& job, std::unique_lock<std::mutex>& hold) {
    busy_ = true;
    const bool skip = !failure_.empty();
    hold.unlock();
    std::string failure;
    try {
      if (!skip) job();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    hold.lock();
    busy_ = false;
    ++done_;
    if (!failure.empty()) {
      failure_ = failure;
      failed_ = done_;
    }
    changed_.notify_all();
  }

  void fail_if_failed(std::uint64_t ticket) const {
    if (failure_.empty() || ticket < failed_) return;
    throw std::runtime_error(ticket == failed_ ? failure_ : "an earlier call failed: " + failure_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> jobs_;
  std::thread thread_;
  std::uint64_t given_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t failed_ = 0;
  std::string failure_;
  bool busy_ = false;
  bool closing_ = false;
};

}  // namespace megazero::mpu

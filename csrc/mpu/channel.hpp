// One member's end of a group on one host: its segment and collectives. A failure leaves the group unusable: the other
// members are told, and later calls here fail with the same message.
#pragma once

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mpu/collectives.hpp"
#include "mpu/job_queue.hpp"
#include "mpu/segment.hpp"

namespace megazero::mpu {

class Channel {
 public:
  Channel(int file, int rank, std::vector<int> world_ranks, Sizes sizes, double timeout)
      : segment_(file, rank, std::move(world_ranks), sizes, timeout), collectives_(segment_) {}

  // Runs call(collectives), or, if `later` is set, leaves it to the queue's thread and returns its ticket.
  template <typename Call>
  std::uint64_t collective(bool later, const Call& call) {
    const auto job = [this, call] { guarded([&] { call(collectives_); }); };
    if (later) return queue_.start(job);
    queue_.run(job);
    return 0;
  }

  JobQueue& queue() { return queue_; }
  void close_down() { segment_.close_down(); }

 private:
  template <typename Body>
  auto guarded(const Body& body) -> decltype(body()) {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      if (!failure_.empty()) throw std::runtime_error("an earlier call failed: " + failure_);
    }
    try {
      return body();
    } catch (const std::exception& error) {
      segment_.abandon();
      const std::lock_guard<std::mutex> hold(mutex_);
      failure_ = error.what();
      throw;
    }
  }

  Segment segment_;
  Collectives collectives_;
  std::mutex mutex_;
  std::string failure_;
  JobQueue queue_;  // last, so that it is destroyed before what its thread works on
};

}  // namespace megazero::mpu

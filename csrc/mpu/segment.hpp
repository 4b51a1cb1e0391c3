// The memory that the members of one group share, a file in /dev/shm:
//
//   Control | 2 slots per member, used in turn
//
// Everything starts as zero.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mpu/patience.hpp"

namespace megazero::mpu {

constexpr int kMostRanks = 64;
constexpr std::size_t kTextBytes = 192;

struct Member {
  Word arrived;  // how many rounds of collectives it has reached
  std::atomic<std::int32_t> process;
};

struct Control {
  std::atomic<std::int32_t> abandoned_by;  // 1 + group rank of the first member that gave up; 0 while all is well
  Member members[kMostRanks];
};

// Describes a member's call, shown to the others with the first chunk of its data.
struct alignas(64) Header {
  char text[kTextBytes];
  std::int64_t sends[kMostRanks];  // all_to_all: bytes to each member, and from each
  std::int64_t receives[kMostRanks];
};

struct Sizes {
  int members;
  std::size_t slot;  // bytes of data, multiples of 4096
};

// The size of a segment, in bytes.
std::size_t segment_end(const Sizes& sizes);

// One member's mapping of a segment. While it lives, the kernel holds a lock on byte `rank` of the file for this
// process and releases it however the process ends, which tells the others who is still there.
class Segment {
 public:
  Segment(int file, int rank, std::vector<int> world_ranks, Sizes sizes, double timeout);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int size() const { return sizes_.members; }
  const Sizes& sizes() const { return sizes_; }
  double timeout() const { return timeout_; }
  Member& member(int rank) { return control().members[rank]; }
  Header& header(int rank, std::uint64_t turn);
  char* slot(int rank, std::uint64_t turn);

  std::string name(int rank) const;  // "rank 5", by its rank in the world
  // Throws if one of the `absent()` ranks is no longer there, if some member gave up, or if `waited` exceeds the
  // timeout; `not_done` says what the absent ones have not done. Called again and again during a wait.
  void check(const std::function<std::vector<int>()>& absent, Clock::duration waited, const char* not_done);
  // Tells the others that this member gave up.
  void abandon();
  // Ends this process's own waits soon.
  void close_down() { closing_.store(true); }

 private:
  Control& control() { return *reinterpret_cast<Control*>(memory_); }
  bool is_there(int rank) const;

  int file_;
  int rank_;
  std::vector<int> world_ranks_;
  Sizes sizes_;
  double timeout_;
  char* memory_ = nullptr;
  std::atomic<bool> closing_{false};
};

}  // namespace megazero::mpu

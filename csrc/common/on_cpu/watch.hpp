// What a kernel does to memory, as told by its accesses: counts per kernel, and faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/cuda_on_cpu.h"

namespace megazero::on_cpu {

// Who accesses, and when: a block's epoch ends at its barrier, a warp's at __syncwarp.
struct Moment {
  std::int32_t block = -1;
  std::int32_t thread = -1;
  std::uint32_t block_epoch = 0;
  std::uint32_t warp_epoch = 0;

  bool exists() const { return block >= 0; }
};

// What orders a block after others: each came to a counter by an atomic addition with a fence before it, and this block
// came there later, with a fence after it. Blocks run one after the other, so this is about the one that runs.
class Arrivals {
 public:
  void begin_launch() { released_.clear(); }
  void begin_block();
  // A thread's fence, and its addition to a counter.
  void fence(const Moment& now);
  void add(const void* counter, const Moment& now);
  // Whether an earlier access of another block is before this one of the running block.
  bool order(const Moment& past, const Moment& now) const;

 private:
  using Blocks = std::unordered_map<std::int32_t, Moment>;  // each with its arrival
  std::unordered_map<const void*, Blocks> released_;
  Blocks seen_;
  std::unordered_map<std::int32_t, Moment> fences_;  // by thread
  Moment arrival_;
  bool fenced_ = false;
};

// The last accesses of a byte: two reads of different threads, a write, an atomic operation.
struct History {
  Moment read, other_read, write, atomic;
};

// Memory that may be accessed: a tensor that a launch was given, or a block's shared array.
struct Buffer {
  const char* begin;
  std::size_t bytes;
  std::vector<History> history;
};

struct Counts {
  std::int64_t launches = 0, threads_per_block = 0, shared_bytes = 0;
  std::int64_t bytes_read = 0, bytes_written = 0, cached_bytes = 0;
  std::int64_t sectors = 0, ideal_sectors = 0, shared_accesses = 0, bank_conflicts = 0;
  std::int64_t races = 0, divergent_barriers = 0, out_of_bounds = 0, misaligned = 0, unwritten_reads = 0, bad_launches = 0;
};

// Thrown through a kernel by an access that must not be carried out.
struct OutOfBounds {};

class Watch {
 public:
  void declare(const void* begin, std::size_t bytes);
  void forget_buffers() { buffers_.clear(); }
  void begin_launch(const char* kernel, dim3 threads, std::size_t shared_bytes);
  void begin_block();
  void end_block();
  // A byte range of the block's shared memory, about which nothing is known yet.
  void declare_shared(const void* begin, std::size_t bytes);
  void global(const void* address, std::size_t bytes, Access access, Site site, const Moment& now);
  void shared(const void* address, std::size_t bytes, Access access, Site site, const Moment& now);
  Arrivals& arrivals() { return arrivals_; }
  void fault(std::int64_t Counts::*kind, Site site, const Moment& now, const char* what);
  Counts& counts() { return *counts_; }
  std::string report() const;
  void reset();

 private:
  struct Reach {
    std::uintptr_t address;
    std::uint32_t bytes;
  };
  // One access of a warp: what its lanes reach by the same execution of the same line.
  struct Together {
    std::vector<Reach> lanes;
    Access kind = Access::kRead;
  };
  struct Key {
    Site site;
    int warp;
    std::uint32_t time;
    bool operator==(const Key& o) const {
      return site.line == o.site.line && site.file == o.site.file && warp == o.warp && time == o.time;
    }
  };
  struct Hash {
    std::size_t operator()(const Key& key) const;
  };
  using Accesses = std::unordered_map<Key, Together, Hash>;
  using Times = std::unordered_map<Key, std::uint32_t, Hash>;

  bool races(const Moment& past, const Moment& now) const;
  bool note(std::vector<History>& history, std::size_t first, std::size_t bytes, Access access, const Moment& now);
  void join(bool shared, const void* address, std::size_t bytes, Access kind, Site site, const Moment& now);
  void count_global(const Together& access);
  void count_shared(const Together& access);

  std::string kernel_;
  Counts* counts_ = nullptr;
  std::map<std::string, Counts> by_kernel_;
  std::vector<std::string> faults_;
  std::vector<Buffer> buffers_, shared_;
  Arrivals arrivals_;
  Accesses global_accesses_, shared_accesses_;
  Times global_times_, shared_times_;
};

}  // namespace megazero::on_cpu

// Runs grids: blocks one after the other and a block's threads as fibers, both in a chosen order.
#include <deque>
#include <memory>
#include <numeric>
#include <random>

#include "common/cuda_on_cpu.h"
#include "common/on_cpu/fiber.hpp"
#include "common/on_cpu/watch.hpp"

namespace megazero::on_cpu {

namespace {

constexpr int kInvalidValue = 1, kInvalidConfiguration = 9, kIllegalAccess = 700;
constexpr std::size_t kMostStaticShared = 48 << 10, kMostShared = 227 << 10;

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  Site site;
};

struct Thread {
  Fiber fiber;
  State state = State::kDone;
  Moment now;
  Place place;
  Site site{};
  Warp kind{};
  unsigned mask = 0;
  std::uint64_t value = 0, received = 0;
  int operand = 0;
  std::deque<std::vector<Copy>> batches;  // of copies that have begun
  std::vector<Copy> copies;               // of the batch that is not sealed
};

struct SharedBlock {
  const void* key;
  std::unique_ptr<std::uint64_t[]> data;
};

struct Machine {
  Watch watch;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<SharedBlock> shared;
  std::size_t dynamic_bytes = 0;
  Thread* running = nullptr;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  bool broken = false;  // a thread did what cannot be gone on from
  std::int64_t order = 0, seed = 0;
};

Machine& machine() {
  thread_local Machine one;
  return one;
}

void give_way() { machine().running->fiber.leave(); }

void run_thread() {
  Machine& m = machine();
  try {
    m.body(m.arguments);
  } catch (const OutOfBounds&) {
    m.broken = true;
  }
  for (const std::vector<Copy>& batch : m.running->batches) {
    for (const Copy& copy : batch) m.watch.fault(&Counts::races, copy.site, m.running->now, "a copy that nobody waits for");
  }
  m.running->state = State::kDone;
  give_way();
}

// What a lane of a warp operation receives from the others.
std::uint64_t received_by(const Thread& lane, int own, Thread* const* warp, std::size_t size) {
  if (lane.kind == Warp::kSync) return 0;
  if (lane.kind == Warp::kBallot) {
    std::uint64_t votes = 0;
    for (std::size_t i = 0; i < size; ++i) {
      if (lane.mask >> i & 1u && warp[i]->operand) votes |= std::uint64_t{1} << i;
    }
    return votes;
  }
  int from = lane.operand & 31;
  if (lane.kind == Warp::kShuffleXor) from = own ^ lane.operand;
  if (lane.kind == Warp::kShuffleDown) from = own + lane.operand;
  if (lane.kind == Warp::kShuffleUp) from = own - lane.operand;
  if (from < 0 || from > 31) return lane.value;  // as on the device: nothing to be had from beyond the warp
  if (!(lane.mask >> from & 1u)) {
    machine().watch.fault(&Counts::divergent_barriers, lane.site, lane.now, "a shuffle from a lane outside of its mask");
    return ~std::uint64_t{0};
  }
  return warp[from]->value;
}

// Lets lanes go on whose whole mask has come to the same operation. Returns whether any could.
bool release_warp(Thread* const* warp, std::size_t size) {
  bool any = false;
  for (std::size_t lane = 0; lane < size; ++lane) {
    const Thread& first = *warp[lane];
    if (first.state != State::kInWarp) continue;
    bool complete = size == 32 || first.mask >> size == 0;
    for (std::size_t i = 0; i < size && complete; ++i) {
      if (!(first.mask >> i & 1u)) continue;
      const Thread& other = *warp[i];
      complete = other.state == State::kInWarp && other.mask == first.mask && other.kind == first.kind &&
                 other.site.line == first.site.line && other.site.file == first.site.file;
    }
    if (!complete) continue;
    const unsigned mask = first.mask;
    for (std::size_t i = 0; i < size; ++i) {
      if (mask >> i & 1u) warp[i]->received = received_by(*warp[i], static_cast<int>(i), warp, size);
    }
    for (std::size_t i = 0; i < size; ++i) {
      if (!(mask >> i & 1u)) continue;
      if (warp[i]->kind == Warp::kSync) ++warp[i]->now.warp_epoch;
      warp[i]->state = State::kReady;
    }
    any = true;
  }
  return any;
}

// Lets the block pass its barrier if every thread has come to the same one. Returns whether it could.
bool release_block(const std::vector<Thread*>& threads) {
  for (const Thread* each : threads) {
    const Site site = threads.front()->site;
    if (each->state != State::kAtBarrier || each->site.line != site.line || each->site.file != site.file) return false;
  }
  for (Thread* each : threads) {
    each->state = State::kReady;
    ++each->now.block_epoch;
  }
  return true;
}

// The numbers below `count`, in the order that the caller has chosen.
std::vector<std::size_t> turns(std::size_t count) {
  const Machine& m = machine();
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (m.order == 1) std::reverse(order.begin(), order.end());
  if (m.order == 2) std::shuffle(order.begin(), order.end(), std::mt19937_64(static_cast<std::uint64_t>(m.seed)));
  return order;
}

void run_block(const std::vector<Thread*>& threads) {
  Machine& m = machine();
  const std::vector<std::size_t> order = turns(threads.size());
  while (!m.broken) {
    bool moved = false, done = true;
    for (const std::size_t i : order) {
      Thread& thread = *threads[i];
      if (thread.state == State::kReady) {
        m.running = &thread;
        thread.fiber.enter();
        moved = true;
      }
      done = done && thread.state == State::kDone;
    }
    if (done) return;
    for (std::size_t begin = 0; begin < threads.size(); begin += 32) {
      moved |= release_warp(&threads[begin], std::min<std::size_t>(32, threads.size() - begin));
    }
    if (!moved && !release_block(threads)) {
      for (const Thread* each : threads) {
        if (each->state == State::kDone) continue;
        m.watch.fault(&Counts::divergent_barriers, each->site, each->now, "a barrier that not all threads reach");
        break;
      }
      return;
    }
  }
}

}  // namespace

const Place& place() { return machine().running->place; }

void touch_global(const void* address, std::size_t bytes, Access access, Site site) {
  Machine& m = machine();
  m.watch.global(address, bytes, access, site, m.running->now);
}

void touch_shared(const void* address, std::size_t bytes, Access access, Site site) {
  Machine& m = machine();
  m.watch.shared(address, bytes, access, site, m.running->now);
}

void wait_for_block(Site site) {
  Thread& thread = *machine().running;
  thread.site = site;
  thread.state = State::kAtBarrier;
  give_way();
}

void fence() { machine().watch.arrivals().fence(machine().running->now); }

void arrive(const void* counter) { machine().watch.arrivals().add(counter, machine().running->now); }

std::uint64_t exchange(Warp kind, unsigned mask, std::uint64_t value, int operand, Site site) {
  Thread& thread = *machine().running;
  thread.kind = kind;
  thread.mask = mask;
  thread.value = value;
  thread.operand = operand;
  thread.site = site;
  thread.state = State::kInWarp;
  give_way();
  return thread.received;
}

void begin_copy(void* to, const void* from, std::size_t bytes, Site site) {
  machine().running->copies.push_back({to, from, bytes, site});
}

void seal_copies() {
  Thread& thread = *machine().running;
  thread.batches.push_back(std::move(thread.copies));
  thread.copies.clear();
}

void wait_for_copies(std::size_t last) {
  Thread& thread = *machine().running;
  for (; thread.batches.size() > last; thread.batches.pop_front()) {
    for (const Copy& copy : thread.batches.front()) {
      touch_shared(copy.to, copy.bytes, Access::kWrite, copy.site);
      if (copy.from == nullptr) {
        std::memset(copy.to, 0, copy.bytes);
      } else {
        touch_global(copy.from, copy.bytes, Access::kRead, copy.site);
        std::memcpy(copy.to, copy.from, copy.bytes);
      }
    }
  }
}

void* shared_array(const void* key, std::size_t bytes) {
  Machine& m = machine();
  for (const SharedBlock& each : m.shared) {
    if (each.key == key) return each.data.get();
  }
  const std::size_t words = (bytes + 7) / 8 + 1;
  auto data = std::make_unique<std::uint64_t[]>(words);
  std::fill_n(data.get(), words, ~std::uint64_t{0});
  m.watch.declare_shared(data.get(), bytes);
  m.shared.push_back({key, std::move(data)});
  return m.shared.back().data.get();
}

void* dynamic_shared() {
  static const char key = 0;
  return shared_array(&key, machine().dynamic_bytes);
}

int run(const char* kernel, dim3 blocks, dim3 threads, std::size_t dynamic_bytes, void (*body)(void*), void* arguments) {
  Machine& m = machine();
  const std::size_t size = std::size_t{threads.x} * threads.y * threads.z;
  m.watch.begin_launch(kernel, threads, dynamic_bytes);
  if (size == 0 || size > 1024 || threads.z > 64 || blocks.x == 0 || blocks.y == 0 || blocks.z == 0 ||
      blocks.x > 2147483647u || blocks.y > 65535 || blocks.z > 65535 || dynamic_bytes > kMostShared) {
    ++m.watch.counts().bad_launches;
    return kInvalidConfiguration;
  }
  while (m.threads.size() < size) m.threads.push_back(std::make_unique<Thread>());
  std::vector<Thread*> block_threads;
  for (std::size_t i = 0; i < size; ++i) block_threads.push_back(m.threads[i].get());
  m.body = body;
  m.arguments = arguments;
  m.dynamic_bytes = dynamic_bytes;
  m.broken = false;
  const auto at = [](std::size_t linear, dim3 sizes) {
    const auto i = static_cast<unsigned>(linear);
    return dim3(i % sizes.x, i / sizes.x % sizes.y, i / (sizes.x * sizes.y));
  };
  for (const std::size_t number : turns(std::size_t{blocks.x} * blocks.y * blocks.z)) {
    if (m.broken) break;
    m.shared.clear();
    m.watch.begin_block();
    for (std::size_t i = 0; i < size; ++i) {
      Thread& thread = *block_threads[i];
      thread.place = {at(i, threads), at(number, blocks), threads, blocks};
      thread.now = {static_cast<std::int32_t>(number), static_cast<std::int32_t>(i), 0, 0};
      thread.state = State::kReady;
      thread.batches.clear();
      thread.copies.clear();
      thread.fiber.begin(run_thread);
    }
    run_block(block_threads);
    m.watch.end_block();
  }
  if (m.watch.counts().shared_bytes - static_cast<std::int64_t>(dynamic_bytes) > std::int64_t{kMostStaticShared}) {
    ++m.watch.counts().bad_launches;
    return kInvalidValue;
  }
  return m.broken ? kIllegalAccess : 0;
}

}  // namespace megazero::on_cpu

using megazero::on_cpu::machine;

extern "C" {

// The order of blocks, and of a block's threads: 0 as numbered, 1 backwards, 2 shuffled by the seed.
void megazero_on_cpu_order(std::int64_t order, std::int64_t seed) {
  machine().order = order;
  machine().seed = seed;
}

// The buffers that launches may touch from now on.
void megazero_on_cpu_declare(const void* begin, std::int64_t bytes) {
  machine().watch.declare(begin, static_cast<std::size_t>(bytes));
}

void megazero_on_cpu_forget() { machine().watch.forget_buffers(); }

// Counts and faults since the last reset as JSON, valid until the next call.
const char* megazero_on_cpu_report() {
  thread_local std::string text;
  text = machine().watch.report();
  return text.c_str();
}

void megazero_on_cpu_reset() { machine().watch.reset(); }

int megazero_cuda_driver_error() { return 0; }

const char* megazero_cuda_error_text(std::int64_t code) {
  switch (code) {
    case 1:
      return "invalid argument";
    case 9:
      return "invalid configuration argument";
    case 700:
      return "an illegal memory access was encountered";
    default:
      return "unknown error";
  }
}
}

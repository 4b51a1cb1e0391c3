// Waiting for another process: first a short spin, because the answer is often only a few microseconds away, then
// yielding the core to whoever can use it, then sleeping on a futex until woken.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace megazero::mpu {

using Clock = std::chrono::steady_clock;

// A word of shared memory that others change, and how many threads, in any process, are asleep until it changes.
struct alignas(64) Word {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a word must be shared between processes as it is");

// A thread that changes a word then looks for sleepers; a thread that goes to sleep counts itself first, then the
// kernel looks at the word. All this happens in one total order (seq_cst), so one of the two sees the other.
inline void wake(Word& word) {
  if (word.sleepers.load() > 0) {
    syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

inline void sleep_while(Word& word, std::uint32_t seen, std::chrono::milliseconds longest) {
  const timespec limit{longest.count() / 1000, longest.count() % 1000 * 1000000};
  word.sleepers.fetch_add(1);
  syscall(SYS_futex, &word.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
  word.sleepers.fetch_sub(1);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::microseconds kYield{150};
constexpr std::chrono::milliseconds kSleep{100};

// Returns when ready(), which reads `word` among other things, is true. Before the first sleep and after each one it
// calls check(waited), which throws to end the wait.
template <typename Ready, typename Check>
void wait_until(Word& word, const Ready& ready, const Check& check) {
  if (ready()) return;
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return;
      relax();
    }
    const auto waited = Clock::now() - start;
    if (waited < kSpin) continue;
    if (waited < kYield) {
      sched_yield();
      continue;
    }
    const std::uint32_t seen = word.value.load();
    if (ready()) return;
    check(waited);
    sleep_while(word, seen, kSleep);
  }
}

}  // namespace megazero::mpu

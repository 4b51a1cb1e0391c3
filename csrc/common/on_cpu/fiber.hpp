// A fiber: a function with a stack of its own, which gives way and is gone back to.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace megazero::on_cpu {

#if defined(__x86_64__)
// Saves the registers that a call preserves and the stack's place in *from, and goes on at `to`.
extern "C" void megazero_switch_stacks(void** from, void* to);

asm(R"(
.text
.globl megazero_switch_stacks
.type megazero_switch_stacks, @function
megazero_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size megazero_switch_stacks, .-megazero_switch_stacks
)");
#endif

class Fiber {
 public:
  static constexpr std::size_t kStack = 64 << 10;

  Fiber() {
    stack_ = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack_ == MAP_FAILED) throw std::bad_alloc();
  }
  Fiber(const Fiber&) = delete;
  ~Fiber() { munmap(stack_, kStack); }

  // The next enter() begins `entry`, which must not return. What the fiber did before is forgotten.
  void begin(void (*entry)()) {
#if defined(__x86_64__)
    auto* top = reinterpret_cast<void**>(static_cast<char*>(stack_) + kStack);
    *--top = nullptr;  // as if called: the stack is 8 bytes off a multiple of 16
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    inside_ = top;
#else
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_;
    inside_.uc_stack.ss_size = kStack;
    inside_.uc_link = nullptr;
    makecontext(&inside_, entry, 0);
#endif
  }

#if defined(__x86_64__)
  void enter() { megazero_switch_stacks(&outside_, inside_); }
  void leave() { megazero_switch_stacks(&inside_, outside_); }
#else
  void enter() { swapcontext(&outside_, &inside_); }
  void leave() { swapcontext(&inside_, &outside_); }
#endif

 private:
  void* stack_;
#if defined(__x86_64__)
  void* inside_ = nullptr;
  void* outside_ = nullptr;
#else
  ucontext_t inside_, outside_;
#endif
};

}  // namespace megazero::on_cpu

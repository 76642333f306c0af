// Compiled without sanitizers, like all of the emulator's own bookkeeping.
#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "sanitizers.hpp"

#if defined(__x86_64__)
// swapcontext asks the kernel for the signal mask twice a switch, which takes ten times as long as all else.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
static void switch_to(void** save, void* load) { emulator_switch(save, load); }
static void* fresh_context(char* stack, size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack + bytes - 64);  // 16-byte aligned, as a call finds it
  *--top = nullptr;                                          // the return address of `entry`
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}
#else
#include <ucontext.h>
static void switch_to(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}
static void* fresh_context(char* stack, size_t bytes, void (*entry)()) {
  auto* context = new ucontext_t;  // left at the first switch; some hundred bytes a thread and block
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

namespace emulator {
namespace {
void* scheduler_context = nullptr;
Fiber* entered = nullptr;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
void* scheduler_fiber = nullptr;
}  // namespace

Fiber::Fiber(void (*body)()) : body_(body) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::perror("emulator: no memory for a stack");
    std::exit(70);
  }
  memory_ = static_cast<char*>(memory);
  stack_ = memory_ + page;
  if (has_thread_sanitizer()) sanitizer_fiber_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (has_thread_sanitizer()) __tsan_destroy_fiber(sanitizer_fiber_);
  munmap(memory_, static_cast<size_t>(stack_ - memory_) + kStackBytes);
}

void Fiber::start() {
  if (has_address_sanitizer()) {
    __asan_unpoison_memory_region(stack_, kStackBytes);  // frames that were never returned from
    fake_stack_ = nullptr;
  }
  context_ = fresh_context(stack_, kStackBytes, &Fiber::trampoline);
}

void Fiber::name(const char* text) {
  if (has_thread_sanitizer()) __tsan_set_fiber_name(sanitizer_fiber_, text);
}

void Fiber::enter() {
  entered = this;
  if (has_address_sanitizer()) __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_, kStackBytes);
  if (has_thread_sanitizer()) {
    scheduler_fiber = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(sanitizer_fiber_, 1);
  }
  switch_to(&scheduler_context, context_);
  if (has_address_sanitizer()) __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}

void Fiber::leave(bool for_good) {
  if (has_address_sanitizer()) __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, scheduler_stack, scheduler_stack_bytes);
  if (has_thread_sanitizer()) __tsan_switch_to_fiber(scheduler_fiber, 1);
  switch_to(&context_, scheduler_context);
  if (has_address_sanitizer()) __sanitizer_finish_switch_fiber(fake_stack_, &scheduler_stack, &scheduler_stack_bytes);
}

void Fiber::trampoline() {
  if (has_address_sanitizer()) __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  Fiber* self = entered;
  self->body_();
  self->leave(true);
  std::abort();
}

void release(void* place) {
  if (has_thread_sanitizer()) __tsan_release(place);
}

void acquire(void* place) {
  if (has_thread_sanitizer()) __tsan_acquire(place);
}

Unobserved::Unobserved() {
  if (has_thread_sanitizer()) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
}

Unobserved::~Unobserved() {
  if (has_thread_sanitizer()) {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
}

}  // namespace emulator

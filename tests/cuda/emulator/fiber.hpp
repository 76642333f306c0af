// A stack of its own that can be left and entered again: what a CUDA thread runs on.
#pragma once
#include <cstddef>

namespace emulator {

// Fibers and whoever enters them (the scheduler) switch to and fro; a fiber never enters another. Sanitizers
// are told of every switch, and that a switch orders nothing: only what is released and acquired does.
class Fiber {
 public:
  explicit Fiber(void (*body)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void start();                      // next time, enter at the beginning of `body`
  void name(const char* text);       // what ThreadSanitizer calls it
  void enter();                      // from the scheduler; returns when the fiber leaves
  void leave(bool for_good = false);  // from the fiber, back to the scheduler

 private:
  static constexpr size_t kStackBytes = 128 * 1024;
  char* memory_ = nullptr;  // a page that faults, then the stack, which grows down to it
  char* stack_ = nullptr;
  void* context_ = nullptr;
  void (*body_)();
  void* sanitizer_fiber_ = nullptr;  // ThreadSanitizer's
  void* fake_stack_ = nullptr;       // AddressSanitizer's
  static void trampoline();
};

// Happens-before for ThreadSanitizer: what was done before a release is seen after an acquire of the same
// place. Nothing in other builds.
void release(void* place);
void acquire(void* place);

// Within it, ThreadSanitizer does not look: allocation and filling of shared memory is not the kernel's doing.
struct Unobserved {
  Unobserved();
  ~Unobserved();
};

}  // namespace emulator

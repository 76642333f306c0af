// Copies into shared memory that land some time between their start and the wait for them (cp.async).
#pragma once
#include <cstring>

#include "grid.hpp"
#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(const void* address, size_t bytes);  // checks as a load does, and reports
#endif

namespace emulator {

struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;  // the last `zeros` of the bytes are not read, but filled
};

// Checks a copy; says whether it lands at once. If not, it is noted.
bool start_copy(const Copy& copy, Where where);
void commit_copies();
// Gives one of the copies that must have landed when all groups but the last ones have; false if all have.
bool next_copy(size_t but_the_last, Copy* copy);

// Inline, so that the thread's sanitizer sees the access.
inline void land(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes - copy.zeros);
  if (copy.zeros > 0) std::memset(static_cast<char*>(copy.to) + copy.bytes - copy.zeros, 0, copy.zeros);
}

}  // namespace emulator

// As in cuda_pipeline_primitives.h.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0,
                                    emulator::Where where = emulator::Where::current()) {
  const emulator::Copy copy{to, from, bytes, zeros};
#if defined(__SANITIZE_ADDRESS__)  // here, since on landing the line would be another
  if (bytes > zeros) __asan_loadN(from, bytes - zeros);
#endif
  if (emulator::start_copy(copy, where)) emulator::land(copy);
}
inline void __pipeline_commit() { emulator::commit_copies(); }
inline void __pipeline_wait_prior(size_t but_the_last) {
  emulator::Copy copy;
  while (emulator::next_copy(but_the_last, &copy)) emulator::land(copy);
}

// Memory that threads reach atomically.
//
// Templates on purpose: they are compiled with the kernel's sanitizer, which then sees each access as the
// thread's own.
#pragma once
#include <algorithm>

#include "grid.hpp"

namespace emulator {

// Relaxed, as CUDA's are. Before and after it another thread may come.
template <class T, class Change>
T atomically(T* place, Change change) {
  pause();
  T before = __atomic_load_n(place, __ATOMIC_RELAXED), after;
  do {
    after = change(before);
  } while (!__atomic_compare_exchange_n(place, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  pause();
  return before;
}

}  // namespace emulator

template <class T>
T atomicAdd(T* place, T value) {
  return emulator::atomically(place, [value](T before) { return before + value; });
}
template <class T>
T atomicMax(T* place, T value) {
  return emulator::atomically(place, [value](T before) { return std::max(before, value); });
}
template <class T>
T atomicExch(T* place, T value) {
  return emulator::atomically(place, [value](T) { return value; });
}
template <class T>
T atomicCAS(T* place, T expected, T value) {
  return emulator::atomically(place, [=](T before) { return before == expected ? value : before; });
}
template <class T>
T __ldg(const T* place) {
  return *place;
}
inline void __syncthreads(emulator::Where where = emulator::Where::current()) { emulator::block_barrier(where); }

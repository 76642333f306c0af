// Shuffles, votes, and the barrier of a warp.
#pragma once
#include <cstring>

#include "grid.hpp"

namespace emulator {

struct Exchange {
  uint64_t value;
  unsigned source;  // whose value this lane gets
  unsigned ballot;  // the lanes whose value is not zero
};
uint64_t exchange(unsigned mask, uint64_t value, unsigned source, const char* operation, Where where);
unsigned ballot(unsigned mask, bool predicate, const char* operation, Where where);

template <class T>
T shuffle(unsigned mask, T value, unsigned source, const char* operation, Where where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles are of 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source, operation, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

// Lanes beyond the ends of a warp give the caller its own value back. Widths below 32 are not offered.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle(mask, value, static_cast<unsigned>(source) % 32, "__shfl_sync", where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle(mask, value, (emulator::lane() ^ static_cast<unsigned>(flip)) % 32, "__shfl_xor_sync", where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, emulator::Where where = emulator::Where::current()) {
  const unsigned lane = emulator::lane();
  return emulator::shuffle(mask, value, lane < by ? lane : lane - by, "__shfl_up_sync", where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, emulator::Where where = emulator::Where::current()) {
  const unsigned lane = emulator::lane();
  return emulator::shuffle(mask, value, lane + by > 31 ? lane : lane + by, "__shfl_down_sync", where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::ballot(mask, predicate != 0, "__ballot_sync", where);
}
inline int __any_sync(unsigned mask, int predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::ballot(mask, predicate != 0, "__any_sync", where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::ballot(mask, predicate != 0, "__all_sync", where) == mask;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, emulator::Where where = emulator::Where::current()) {
  emulator::warp_barrier(mask, where);
}

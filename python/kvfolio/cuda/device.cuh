// What differs between a GPU and the emulator (tests/cuda/emulator), and nothing else.
#pragma once
#include <cstdint>

#include "kvfolio.h"

#ifdef KVFOLIO_EMULATED
#include <emulator.hpp>

namespace kvfolio {
template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulator::shared_memory());
}
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, void*, Arguments... arguments) {
  emulator::launch(grid, dim3(threads), shared_bytes, [=] { kernel(arguments...); });
  return 0;
}
}  // namespace kvfolio

#else
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

namespace kvfolio {
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(128) unsigned char kvfolio_shared[];
  return reinterpret_cast<T*>(kvfolio_shared);
}
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, void* stream,
           Arguments... arguments) {
  if (shared_bytes > 48 * 1024) {  // more has to be asked for
    const auto status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes));
    if (status != cudaSuccess) {
      cudaGetLastError();  // or the next call would be blamed for it
      return status;
    }
  }
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}
}  // namespace kvfolio
#endif

namespace kvfolio {
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Every offset into storage is 64-bit: 2^24 blocks of 32 KiB are more than 32 bits can tell.
__device__ __forceinline__ char* at(void* data, int64_t offset) { return static_cast<char*>(data) + offset; }
__device__ __forceinline__ const char* at(const void* data, int64_t offset) {
  return static_cast<const char*>(data) + offset;
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a vector access may be used for: of everything that addresses are made of, the largest power of two,
// up to 16, that divides all.
template <class... Numbers>
int common_alignment(Numbers... numbers) {
  const int64_t all = (16 | ... | static_cast<int64_t>(numbers));
  return static_cast<int>(all & -all);
}
}  // namespace kvfolio

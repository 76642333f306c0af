// Storage types and the float32 that sums are taken in.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "device.cuh"

namespace kvfolio {

template <class To, class From>
__device__ __forceinline__ To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Four neighbours, rounded to T, in one store.
template <class T>
__device__ __forceinline__ void store4(T* to, float a, float b, float c, float d) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
  } else if constexpr (std::is_same_v<T, __half>) {
    const __half2 pairs[2] = {__floats2half2_rn(a, b), __floats2half2_rn(c, d)};
    *reinterpret_cast<uint2*>(to) = bits<uint2>(pairs);
  } else {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(a, b), __floats2bfloat162_rn(c, d)};
    *reinterpret_cast<uint2*>(to) = bits<uint2>(pairs);
  }
}

// Two neighbours of a matrix fragment.
template <class T>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    return bits<uint32_t>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return bits<uint32_t>(pair);
  }
}

}  // namespace kvfolio

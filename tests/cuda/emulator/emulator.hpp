// What a kernel's source is compiled with in place of nvcc, by g++ -std=c++20. README.md says what it shows.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "async_copy.hpp"
#include "grid.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "warp.hpp"

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__  // dynamic shared memory only, through shared_memory(): so it has an end that can be watched
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_shape())
#define gridDim (emulator::grid_shape())
#define warpSize 32

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }

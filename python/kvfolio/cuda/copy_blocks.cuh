// Copy-on-write: whole blocks of all layers, K and V, in one launch.
#pragma once
#include "device.cuh"

namespace kvfolio {

// A thread block for each pair and array.
template <class Word>
__global__ void copy_blocks_kernel(const __grid_constant__ kvfolio_copy_blocks a) {
  const int32_t* pair = a.pairs + 2 * static_cast<int64_t>(blockIdx.x);
  const int64_t source = pair[0], target = pair[1];
  if (source == target) return;  // padding
  char* array = static_cast<char*>(a.arrays[blockIdx.y]);
  const int words = a.head_bytes / static_cast<int>(sizeof(Word));
  const int per_token = a.num_heads * words;
  for (int i = static_cast<int>(threadIdx.x); i < a.block_size * per_token; i += static_cast<int>(blockDim.x)) {
    const int64_t token = i / per_token, head = i % per_token / words, word = i % words;
    const int64_t within = token * a.token_stride + head * a.head_stride;
    reinterpret_cast<Word*>(array + target * a.block_stride + within)[word] =
        reinterpret_cast<const Word*>(array + source * a.block_stride + within)[word];
  }
}

inline int copy_blocks(const kvfolio_copy_blocks& a, void* stream) {
  if (a.num_pairs == 0 || a.num_arrays == 0) return 0;
  if (a.num_arrays > KVFOLIO_MAX_ARRAYS) return KVFOLIO_UNSUPPORTED;
  int alignment = common_alignment(a.head_bytes, a.block_stride, a.token_stride, a.head_stride);
  for (int i = 0; i < a.num_arrays; i++)
    alignment = common_alignment(alignment, reinterpret_cast<intptr_t>(a.arrays[i]));
  const dim3 grid(static_cast<unsigned>(a.num_pairs), static_cast<unsigned>(a.num_arrays));
  if (alignment == 16) return launch(copy_blocks_kernel<uint4>, grid, 128, 0, stream, a);
  if (alignment >= 4) return launch(copy_blocks_kernel<uint32_t>, grid, 128, 0, stream, a);
  if (alignment == 2) return launch(copy_blocks_kernel<uint16_t>, grid, 128, 0, stream, a);
  return KVFOLIO_UNSUPPORTED;
}

}  // namespace kvfolio

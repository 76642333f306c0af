// Writes a step's K and V into their slots.
#pragma once
#include "device.cuh"

namespace kvfolio {

// A thread block a token. `Word` is as much as one access moves; the dtype does not matter.
template <class Word>
__global__ void append_kernel(const kvfolio_append a) {
  const int64_t token = blockIdx.x;
  const int64_t slot = a.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / a.block_size, offset = slot % a.block_size;
  const int words = a.head_bytes / static_cast<int>(sizeof(Word));
  for (int i = static_cast<int>(threadIdx.x); i < a.num_heads * words; i += static_cast<int>(blockDim.x)) {
    const int64_t head = i / words, word = i % words;
    const auto move = [&](const kvfolio_tokens& from, const kvfolio_storage& to) {
      const char* source = at(from.data, token * from.token_stride + head * from.head_stride);
      char* target = at(to.data, block * to.block_stride + offset * to.token_stride + head * to.head_stride);
      reinterpret_cast<Word*>(target)[word] = reinterpret_cast<const Word*>(source)[word];
    };
    move(a.k, a.keys);
    move(a.v, a.values);
  }
}

inline int append(const kvfolio_append& a, void* stream) {
  if (a.num_tokens == 0) return 0;
  const auto address = [](const void* data) { return reinterpret_cast<intptr_t>(data); };
  const int alignment = common_alignment(
      a.head_bytes, address(a.k.data), a.k.token_stride, a.k.head_stride, address(a.v.data), a.v.token_stride,
      a.v.head_stride, address(a.keys.data), a.keys.block_stride, a.keys.token_stride, a.keys.head_stride,
      address(a.values.data), a.values.block_stride, a.values.token_stride, a.values.head_stride);
  const dim3 grid(static_cast<unsigned>(a.num_tokens));
  if (alignment == 16) return launch(append_kernel<uint4>, grid, 128, 0, stream, a);
  if (alignment >= 4) return launch(append_kernel<uint32_t>, grid, 128, 0, stream, a);
  if (alignment == 2) return launch(append_kernel<uint16_t>, grid, 128, 0, stream, a);
  return KVFOLIO_UNSUPPORTED;
}

}  // namespace kvfolio

// What a warp does with its tensor core, in the fragment layouts of the PTX manual.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "grid.hpp"

namespace emulator {

void share_rows(const void* row, bool transposed, uint32_t (&fragments)[4], Where where);
void multiply_add(bool is_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Where where);

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16: lane 8 m + r brings the address of row r of matrix m, 8
// numbers of 2 bytes; a lane gets two neighbours of row lane / 4 of each matrix, or of its transpose.
inline void load_matrices(uint32_t (&fragments)[4], const void* row, bool transposed,
                          Where where = Where::current()) {
  const auto address = reinterpret_cast<uintptr_t>(row), shared = reinterpret_cast<uintptr_t>(shared_memory());
  if (address % 16 != 0) refuse(where, "ldmatrix needs an address that is a multiple of 16, not %p", row);
  if (address < shared || address + 16 > shared + shared_bytes())
    refuse(where, "ldmatrix reads byte %td of the block's %zu of shared memory", address - shared, shared_bytes());
  uint32_t mine[4];
  std::memcpy(mine, row, sizeof mine);  // by this lane, as its sanitizer sees it
  share_rows(mine, transposed, fragments, where);
}

// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32: c += a b.
template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Where where = Where::current()) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  multiply_add(std::is_same_v<T, __nv_bfloat16>, c, a, b0, b1, where);
}

}  // namespace emulator

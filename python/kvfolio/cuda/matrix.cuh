// The two instructions of the tensor core that attention needs; elsewhere nothing is written in PTX.
#pragma once
#include "numbers.cuh"

namespace kvfolio {

// Lane 8 m + r brings the address in shared memory of row r of the 8 x 8 matrix m; a lane gets, of each matrix,
// the two neighbours at row lane / 4, columns 2 (lane % 4) and the next; or of its transpose.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&fragments)[4], const void* row) {
#ifdef KVFOLIO_EMULATED
  emulator::load_matrices(fragments, row, kTransposed);
#else
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(address)
                 : "memory");
#endif
}

// c += a b: [16, 16] times [16, 8]. Of c a lane has (row, column) = (lane / 4, 2 (lane % 4)), its right neighbour,
// and the same 8 rows below.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef KVFOLIO_EMULATED
  emulator::multiply_add<T>(c, a, b0, b1);
#else
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace kvfolio

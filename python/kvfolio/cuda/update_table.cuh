// Brings a block table that lives on the device up to a plan.
#pragma once
#include "device.cuh"

namespace kvfolio {

// A thread an update. No cell is told twice in one plan, so their order does not matter.
static __global__ void update_table_kernel(const kvfolio_update_table a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= a.num_updates) return;
  const int32_t* update = a.updates + 3 * i;
  const int64_t row = update[0], block = update[1];
  if (row >= 0) a.table[row * a.row_stride + block] = update[2];
}

inline int update_table(const kvfolio_update_table& a, void* stream) {
  if (a.num_updates == 0) return 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.num_updates, 128)));
  return launch(update_table_kernel, grid, 128, 0, stream, a);
}

}  // namespace kvfolio

// Cuts a step's attention into items, on the device: what it depends on need not be known on the host, so that a
// captured graph may be replayed for other lengths.
#pragma once
#include "work.cuh"

namespace kvfolio {

constexpr int kPlanThreads = 256, kPlanWarps = kPlanThreads / 32;

// What one sequence takes. All its row tiles are cut into as many chunks as the one that sees most; some chunks
// of the others are empty then.
struct Share {
  int row_tiles = 0, most_tiles = 0;

  __device__ Share(const kvfolio_plan_attention& a, int number) {
    if (number >= a.num_sequences) return;
    const Sequence sequence(a.query_start_loc, a.seq_lens, number);
    const int64_t rows = static_cast<int64_t>(sequence.num_queries) * a.group;
    if (rows < max(1, a.min_rows) || rows > a.max_rows) return;
    row_tiles = static_cast<int>(ceil_div(rows, a.tile_rows));
    for (int tile = max(0, row_tiles - 2); tile < row_tiles; tile++) {  // the last may be short, and see less
      const RowTile part(sequence, a.group, tile, a.tile_rows);
      most_tiles = max(most_tiles, KeyRange(sequence, part, a.group, a.window, a.tile_keys).num_tiles());
    }
    if (a.window > 0) most_tiles++;  // windows begin anywhere in a tile
  }
  __device__ int chunks(int tiles_per_chunk) const {
    return max(1, static_cast<int>(ceil_div(most_tiles, tiles_per_chunk)));
  }
};

struct PlanShared {
  unsigned long long sum;
  int largest;
  long long warp_totals[kPlanWarps];
  int first_item[kPlanThreads], first_partial[kPlanThreads], row_tiles[kPlanThreads], chunks[kPlanThreads];
};

// The sum over all threads of a block; three barriers.
__device__ inline long long block_sum(PlanShared* shared, long long mine) {
  if (threadIdx.x == 0) shared->sum = 0;
  __syncthreads();  // it is cleared before it is added to
  for (int flip = 16; flip > 0; flip /= 2) mine += __shfl_xor_sync(kAllLanes, mine, flip);
  if (threadIdx.x % 32 == 0) atomicAdd(&shared->sum, static_cast<unsigned long long>(mine));
  __syncthreads();  // all have added
  const long long sum = static_cast<long long>(shared->sum);
  __syncthreads();  // before it is cleared again
  return sum;
}

// The sum over all threads before this one, and over all.
__device__ inline long long block_scan(PlanShared* shared, long long mine, long long* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  long long through = mine;
  for (int by = 1; by < 32; by *= 2) {
    const long long before = __shfl_up_sync(kAllLanes, through, static_cast<unsigned>(by));
    if (lane >= by) through += before;
  }
  if (lane == 31) shared->warp_totals[warp] = through;
  __syncthreads();  // totals of all warps are there
  long long sum = 0;
  for (int i = 0; i < kPlanWarps; i++) {
    if (i < warp) through += shared->warp_totals[i];
    sum += shared->warp_totals[i];
  }
  *total = sum;
  return through - mine;
}

// One block. Chunks are made as short as the number of items allows, so all sequences' chunks are alike.
static __global__ void __launch_bounds__(kPlanThreads) plan_attention_kernel(const kvfolio_plan_attention a) {
  PlanShared* shared = shared_memory<PlanShared>();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto items_of = [&](int tiles_per_chunk) {
    long long items = 0;
    for (int i = thread; i < a.num_sequences; i += kPlanThreads) {
      const Share share(a, i);
      items += static_cast<long long>(share.row_tiles) * share.chunks(tiles_per_chunk);
    }
    return block_sum(shared, items);
  };
  if (thread == 0) shared->largest = 1;
  __syncthreads();  // it is set before it is compared with
  int largest = 1;
  for (int i = thread; i < a.num_sequences; i += kPlanThreads) largest = max(largest, Share(a, i).most_tiles);
  atomicMax(&shared->largest, largest);
  __syncthreads();  // all have told theirs

  // The smallest chunk that gives no more items than are wanted; the largest gives one for each row tile.
  int high = max(a.min_tiles, shared->largest), low = a.min_tiles;
  const long long wanted = items_of(high) + a.extra;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (items_of(middle) <= wanted) high = middle;
    else low = middle + 1;
  }
  const int tiles_per_chunk = high;

  auto* header = static_cast<kvfolio_work_header*>(a.work);
  auto* items = reinterpret_cast<kvfolio_item*>(header + 1);
  auto* merges = reinterpret_cast<int32_t*>(items + a.capacity);
  if (thread == 0) *header = kvfolio_work_header{0, 0, tiles_per_chunk, 0};
  __syncthreads();  // the header is written before merges are counted
  long long first = 0, first_partial = 0;
  for (int base = 0; base < a.num_sequences; base += kPlanThreads) {
    const Share share(a, base + thread);
    const int chunks = share.chunks(tiles_per_chunk);
    const long long mine = static_cast<long long>(share.row_tiles) * chunks;
    long long total, total_partials;
    shared->first_item[thread] = static_cast<int>(first + block_scan(shared, mine, &total));
    __syncthreads();  // all have read the totals of warps
    const long long before = block_scan(shared, chunks > 1 ? mine : 0, &total_partials);
    shared->first_partial[thread] = static_cast<int>(first_partial + before);
    shared->row_tiles[thread] = share.row_tiles;
    shared->chunks[thread] = chunks;
    first += total;
    first_partial += total_partials;
    __syncthreads();  // these sequences' shares are there
    for (int i = warp; i < kPlanThreads; i += kPlanWarps) {  // a warp lists a sequence's items
      const int of_each = shared->chunks[i], count = shared->row_tiles[i] * of_each;
      for (int j = lane; j < count; j += 32) {
        const int64_t place = static_cast<int64_t>(shared->first_item[i]) + j;
        if (place >= a.capacity) continue;
        const int partial = of_each > 1 ? shared->first_partial[i] + j : -1;
        items[place] = kvfolio_item{base + i, j / of_each, static_cast<uint16_t>(j % of_each),
                                    static_cast<uint16_t>(of_each), partial};
        if (of_each > 1 && j % of_each == 0) merges[atomicAdd(&header->num_merges, 1)] = static_cast<int32_t>(place);
      }
    }
    // The next scan's barrier comes before any of these is written again.
  }
  if (thread == 0) {
    header->num_items = static_cast<int32_t>(min(first, static_cast<long long>(a.capacity)));
    header->overflow = first > a.capacity;
  }
}

inline int plan_attention(const kvfolio_plan_attention& a, void* stream) {
  const bool fits = a.extra >= 0 && a.extra < 65535 && a.min_tiles > 0 && a.group > 0 && a.tile_keys > 0 && a.tile_rows > 0;
  if (!fits) return KVFOLIO_UNSUPPORTED;
  return launch(plan_attention_kernel, dim3(1), kPlanThreads, sizeof(PlanShared), stream, a);
}

}  // namespace kvfolio

// Attention over paged K and V: decode, speculation, prefill and its chunks.
//
// A thread block takes an item of the work list, a tile of rows and a chunk of the keys that they see, for one
// KV head: so K and V are read once for all query heads that share them. Either all four warps have the same 16
// rows, and a quarter of each tile of keys each (decode), or 16 rows each, and all keys (many queries). Tiles of
// keys come by asynchronous copies of 16 bytes while the one before is worked on; the page that a copy reads from
// is looked up a tile earlier still. Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al.
// 2022), split along the context and merged by the logarithms of the denominators (Flash-Decoding, Dao et al.
// 2023); logarithms and exponentials are to base 2.
//
// No key outside what some row of the tile sees is read, so unowned pages, and dead cells of the table, have no
// influence. A key that only some of a tile's rows see weighs zero in the others; if V is not finite there, these
// are not either.
#pragma once
#include "tile.cuh"
#include "work.cuh"

#ifndef KVFOLIO_HEAD_DIMS  // fewer are built sooner
#define KVFOLIO_HEAD_DIMS 64, 128, 256
#endif

namespace kvfolio {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Where a key's K and V begin for the head in question; -1 if it is not seen.
struct __align__(16) Place {
  int64_t k, v;
};

// The logarithm of a row's denominator, with its sink: natural, where all else is to base 2.
__device__ __forceinline__ void write_lse(const kvfolio_attention& a, int64_t token, int head, float largest, float sum) {
  if (a.lse == nullptr) return;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head] * kLog2E, with_sink = fmaxf(largest, sink);
    if (with_sink > -INFINITY) sum = sum * exp2f(largest - with_sink) + exp2f(sink - with_sink);
    largest = with_sink;
  }
  const int num_heads = a.num_kv_heads * a.group;
  a.lse[token * num_heads + head] = sum > 0 ? (largest + log2f(sum)) * kLn2 : -INFINITY;
}

// What the sum of weights, relative to 2^largest, is divided by: a sink joins it.
__device__ __forceinline__ float denominator(const kvfolio_attention& a, int head, float largest, float sum) {
  if (a.sinks == nullptr || sum <= 0) return sum;
  return sum + exp2f(a.sinks[head] * kLog2E - largest);
}

template <class T, int kHeadDim, int kRowWarps>
class Attention {
  using S = Tile<T, kHeadDim, kRowWarps>;
  static constexpr int kTiles = S::kKeysPerWarp / 8;  // 16 x 8 scores of a warp
  static constexpr int kColumns = kHeadDim / 8;       // 16 x 8 results

 public:
  __device__ __forceinline__ Attention(const kvfolio_attention& arguments, int item_number, int kv_head_number)
      : a(arguments),
        item(WorkList(a.work, a.capacity).items[item_number]),
        sequence(a.query_start_loc, a.seq_lens, item.sequence),
        rows(sequence, a.group, item.row_tile, S::kRows),
        range(sequence, rows, a.group, a.window, S::kKeys),
        kv_head(kv_head_number),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        row_warp(thread / 32 / S::kKeyWarps),
        key_warp(thread / 32 % S::kKeyWarps),
        queries(shared_memory<char>()),
        stages(queries + S::kQueryBytes),
        places(reinterpret_cast<Place*>(stages + S::kStages * S::kStageBytes)) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = rows.first + 16 * row_warp + lane / 4 + 8 * i;
      const bool exists = row < rows.first + rows.count;
      positions[i] = exists ? sequence.position(row / a.group) : -1;
      slopes[i] = exists && a.alibi_slopes != nullptr ? a.alibi_slopes[head_of(row)] * kLog2E : 0;
      largest[i] = -INFINITY;
      weight_sums[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kColumns; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
  }

  __device__ __forceinline__ void run() {
    const int per_chunk = WorkList(a.work, a.capacity).header->tiles_per_chunk;
    const int first = range.first_tile + item.chunk * per_chunk;
    const int last = min(range.last_tile, first + per_chunk);
    load_queries();
    if (first < last) go_through(first, last);
    write_results();
  }

 private:
  __device__ __forceinline__ int head_of(int row) const { return kv_head * a.group + row % a.group; }

  __device__ __forceinline__ void go_through(int first, int last) {
    for (int i = 0; i < S::kStages - 1; i++) {
      note_places(first + i, find_page(first + i));
      __syncthreads();  // the places are there for all
      if (first + i < last) load_tile(first + i);
      __pipeline_commit();
    }
    note_places(first + S::kStages - 1, find_page(first + S::kStages - 1));
    for (int tile = first; tile < last; tile++) {
      __pipeline_wait_prior(S::kStages - 2);
      __syncthreads();  // the tile is there for all; all are done with the one before, whose stage is free
      if (tile + S::kStages - 1 < last) load_tile(tile + S::kStages - 1);
      __pipeline_commit();
      const int page = find_page(tile + S::kStages);  // is on its way while the tile is worked on
      if (16 * row_warp < rows.count) work_on(tile);
      note_places(tile + S::kStages, page);
    }
  }

  __device__ __forceinline__ char* stage(int tile) const { return stages + tile % S::kStages * S::kStageBytes; }

  __device__ __forceinline__ void load_queries() const {
    for (int i = thread; i < S::kRows * S::kChunks; i += S::kThreads) {
      const int row = i / S::kChunks, chunk = i % S::kChunks;
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (row < rows.count) {
        const int64_t token = sequence.first_token + (rows.first + row) / a.group;
        const int64_t head = head_of(rows.first + row);
        loaded = *reinterpret_cast<const uint4*>(
            at(a.q.data, token * a.q.token_stride + head * a.q.head_stride + chunk * 16));
      }
      *reinterpret_cast<uint4*>(queries + chunk_offset<S>(row, chunk)) = loaded;
    }
  }

  // The block of the key that this thread looks up for a tile; -1 if no row of ours sees it.
  __device__ __forceinline__ int find_page(int tile) const {
    const int key = tile * S::kKeys + thread;
    if (thread >= S::kKeys || key < range.begin || key >= range.end) return -1;
    return a.block_table[item.sequence * a.table_stride + key / a.block_size];
  }

  __device__ __forceinline__ void note_places(int tile, int page) const {
    if (thread >= S::kKeys) return;
    const int64_t offset = (tile * S::kKeys + thread) % a.block_size;
    const auto place = [&](const kvfolio_storage& side) {
      return page * side.block_stride + offset * side.token_stride + kv_head * side.head_stride;
    };
    const bool seen = page >= 0;
    places[tile % S::kPlaces * S::kKeys + thread] = {seen ? place(a.keys) : -1, seen ? place(a.values) : -1};
  }

  __device__ __forceinline__ void load_tile(int tile) const {
    char* k = stage(tile);
    for (int i = thread; i < S::kKeys * S::kChunks; i += S::kThreads) {
      const int row = i / S::kChunks, chunk = i % S::kChunks;
      const Place place = places[tile % S::kPlaces * S::kKeys + row];
      const bool seen = place.k >= 0;  // what is not is zero: zero times NaN would not be
      const size_t zeros = seen ? 0 : 16;
      char* to = k + chunk_offset<S>(row, chunk);
      __pipeline_memcpy_async(to, at(a.keys.data, seen ? place.k + chunk * 16 : 0), 16, zeros);
      __pipeline_memcpy_async(to + S::kSideBytes, at(a.values.data, seen ? place.v + chunk * 16 : 0), 16, zeros);
    }
  }

  __device__ __forceinline__ void work_on(int tile) {
    const char* k = stage(tile);
    const int first_key = key_warp * S::kKeysPerWarp;
    float scores[kTiles][4];
    multiply_keys<S, T>(scores, queries + 16 * row_warp * S::kRowBytes, k, first_key);
    finish_scores(scores, tile * S::kKeys + first_key);
    weigh(scores);
    add_values<S, T>(sums, scores, k + S::kSideBytes, first_key);
  }

  // From products to logits, to base 2.
  __device__ __forceinline__ void finish_scores(float (&scores)[kTiles][4], int first_key) const {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first_key + 8 * n + lane % 4 * 2 + i % 2, position = positions[i / 2];
        float score = scores[n][i] * a.scale;
        if (a.soft_cap > 0) score = a.soft_cap * tanhf(score / a.soft_cap);
        score = score * kLog2E + slopes[i / 2] * static_cast<float>(key - position);
        const bool seen = key <= position && (a.window <= 0 || key > position - a.window);
        scores[n][i] = seen ? score : -INFINITY;
      }
    }
  }

  // Scores become weights relative to the largest of the row so far, to which all sums are brought.
  __device__ __forceinline__ void weigh(float (&scores)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float now = largest[i];
#pragma unroll
      for (int n = 0; n < kTiles; n++) now = fmaxf(now, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 1));  // four lanes share a row
      now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 2));
      const float base = now > -INFINITY ? now : 0;  // a row that has seen no key yet
      const float rescale = exp2f(largest[i] - base);
      largest[i] = now;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        scores[n][2 * i] = exp2f(scores[n][2 * i] - base);
        scores[n][2 * i + 1] = exp2f(scores[n][2 * i + 1] - base);
        sum += scores[n][2 * i] + scores[n][2 * i + 1];
      }
      weight_sums[i] = weight_sums[i] * rescale + sum;
#pragma unroll
      for (int column = 0; column < kColumns; column++) {
        sums[column][2 * i] *= rescale;
        sums[column][2 * i + 1] *= rescale;
      }
    }
  }

  // Brings the warps of a row together, in the memory that K and V were in.
  __device__ __forceinline__ void write_results() {
    float* all_sums = reinterpret_cast<float*>(stages);
    float2* all_weights = reinterpret_cast<float2*>(queries);  // largest score, and sum of weights
    const int warp = thread / 32;
    __syncthreads();  // nobody reads queries, keys and values any more
#pragma unroll
    for (int i = 0; i < 2; i++) {
      weight_sums[i] += __shfl_xor_sync(kAllLanes, weight_sums[i], 1);
      weight_sums[i] += __shfl_xor_sync(kAllLanes, weight_sums[i], 2);
      const int row = warp * 16 + lane / 4 + 8 * i;
      if (lane % 4 == 0) all_weights[row] = make_float2(largest[i], weight_sums[i]);
#pragma unroll
      for (int column = 0; column < kColumns; column++)
        *reinterpret_cast<float2*>(all_sums + row * kHeadDim + 8 * column + lane % 4 * 2) =
            make_float2(sums[column][2 * i], sums[column][2 * i + 1]);
    }
    __syncthreads();  // results of all warps are there
    constexpr int kQuads = kHeadDim / 4;
    for (int i = thread; i < rows.count * kQuads; i += S::kThreads) {
      const int row = i / kQuads, dim = i % kQuads * 4;
      const int first = (row / 16 * S::kKeyWarps) * 16 + row % 16;  // of the first warp that had this row
      float most = -INFINITY, weight = 0;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int w = 0; w < S::kKeyWarps; w++) most = fmaxf(most, all_weights[first + 16 * w].x);
      for (int w = 0; w < S::kKeyWarps; w++) {
        const float2 part = all_weights[first + 16 * w];
        const float factor = part.y > 0 ? exp2f(part.x - most) : 0;
        const float4 of_warp = *reinterpret_cast<const float4*>(all_sums + (first + 16 * w) * kHeadDim + dim);
        weight += part.y * factor;
        sum.x += of_warp.x * factor;
        sum.y += of_warp.y * factor;
        sum.z += of_warp.z * factor;
        sum.w += of_warp.w * factor;
      }
      write_row(row, dim, most, weight, sum);
    }
  }

  __device__ __forceinline__ void write_row(int row, int dim, float most, float weight, const float4& sum) const {
    if (item.partial >= 0) {
      const int64_t place = (static_cast<int64_t>(item.partial) * a.num_kv_heads + kv_head) * S::kRows + row;
      const float share = weight > 0 ? 1 / weight : 0;
      store4<float>(a.partial_out + place * kHeadDim + dim, sum.x * share, sum.y * share, sum.z * share, sum.w * share);
      if (dim == 0) a.partial_lse[place] = weight > 0 ? most + log2f(weight) : -INFINITY;
      return;
    }
    const int head = head_of(rows.first + row);
    const int64_t token = sequence.first_token + (rows.first + row) / a.group;
    const float share = weight > 0 ? 1 / denominator(a, head, most, weight) : 0;
    store4<T>(reinterpret_cast<T*>(at(a.out.data, token * a.out.token_stride + head * a.out.head_stride)) + dim,
              sum.x * share, sum.y * share, sum.z * share, sum.w * share);
    if (dim == 0) write_lse(a, token, head, most, weight);
  }

  const kvfolio_attention& a;
  const kvfolio_item item;
  const Sequence sequence;
  const RowTile rows;
  const KeyRange range;
  const int kv_head, thread, lane, row_warp, key_warp;
  char* const queries;
  char* const stages;
  Place* const places;  // of the keys of two tiles
  int positions[2];     // of the lane's two rows; -1: there is no such row
  float slopes[2], largest[2], weight_sums[2];
  float sums[kColumns][4];
};

template <class T, int kHeadDim, int kRowWarps>
__global__ void __launch_bounds__(128, Tile<T, kHeadDim, kRowWarps>::kMinBlocks) attention_kernel(const __grid_constant__ kvfolio_attention a) {
  const int item = static_cast<int>(blockIdx.x) / a.num_kv_heads;
  if (item >= WorkList(a.work, a.capacity).header->num_items) return;
  // Neighbouring heads lie side by side in memory, and are read at about the same time.
  Attention<T, kHeadDim, kRowWarps>(a, item, static_cast<int>(blockIdx.x) % a.num_kv_heads).run();
}

// Merges the chunks of rows that came in several, a warp a row.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(128) merge_kernel(const __grid_constant__ kvfolio_attention a) {
  const WorkList work(a.work, a.capacity);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t rows_of_one = static_cast<int64_t>(a.num_kv_heads) * a.tile_rows;
  const int64_t num_rows = work.header->num_merges * rows_of_one;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < num_rows;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x / 32) {
    const kvfolio_item item = work.items[work.merges[i / rows_of_one]];
    const int kv_head = static_cast<int>(i % rows_of_one / a.tile_rows), row = static_cast<int>(i % a.tile_rows);
    const Sequence sequence(a.query_start_loc, a.seq_lens, item.sequence);
    const RowTile rows(sequence, a.group, item.row_tile, a.tile_rows);
    if (row >= rows.count) continue;
    const int64_t first = (static_cast<int64_t>(item.partial) * a.num_kv_heads + kv_head) * a.tile_rows + row;
    float most = -INFINITY, weight = 0;
    for (int c = 0; c < item.num_chunks; c++) most = fmaxf(most, a.partial_lse[first + c * rows_of_one]);
    const float base = most > -INFINITY ? most : 0;
    for (int c = 0; c < item.num_chunks; c++) weight += exp2f(a.partial_lse[first + c * rows_of_one] - base);
    const int head = kv_head * a.group + (rows.first + row) % a.group;
    const int64_t token = sequence.first_token + (rows.first + row) / a.group;
    const float share = weight > 0 ? 1 / denominator(a, head, most, weight) : 0;
    T* out = reinterpret_cast<T*>(at(a.out.data, token * a.out.token_stride + head * a.out.head_stride));
    for (int dim = 4 * lane; dim < kHeadDim; dim += 128) {
      float4 sum = make_float4(0, 0, 0, 0);
      for (int c = 0; c < item.num_chunks; c++) {
        const int64_t place = first + c * rows_of_one;
        const float factor = exp2f(a.partial_lse[place] - base) * share;
        const float4 part = *reinterpret_cast<const float4*>(a.partial_out + place * kHeadDim + dim);
        sum.x += part.x * factor;
        sum.y += part.y * factor;
        sum.z += part.z * factor;
        sum.w += part.w * factor;
      }
      store4<T>(out + dim, sum.x, sum.y, sum.z, sum.w);
    }
    if (lane == 0) write_lse(a, token, head, most, weight);
  }
}

template <class T, int kHeadDim, int kRowWarps>
int attend(const kvfolio_attention& a, void* stream) {
  constexpr int kThreads = 128, kMaxMergeBlocks = 1024;
  if (a.capacity == 0) return 0;
  const dim3 grid(static_cast<unsigned>(a.capacity * a.num_kv_heads));
  int status = launch(attention_kernel<T, kHeadDim, kRowWarps>, grid, kThreads,
                      Tile<T, kHeadDim, kRowWarps>::kSharedBytes, stream, a);
  if (status != 0 || a.extra == 0) return status;
  const int64_t rows = static_cast<int64_t>(a.extra) * a.num_kv_heads * a.tile_rows;  // at most are merged
  const int64_t blocks = ceil_div(rows * 32, kThreads);
  const dim3 merge_grid(static_cast<unsigned>(blocks < kMaxMergeBlocks ? blocks : kMaxMergeBlocks));
  return launch(merge_kernel<T, kHeadDim>, merge_grid, kThreads, 0, stream, a);
}

template <class T, int kHeadDim>
int attend(const kvfolio_attention& a, void* stream) {
  if (a.tile_rows == 16) return attend<T, kHeadDim, 1>(a, stream);
  if (a.tile_rows == 64) return attend<T, kHeadDim, 4>(a, stream);
  return KVFOLIO_UNSUPPORTED;
}

template <class T, int... kHeadDims>
int attend_one_of(const kvfolio_attention& a, void* stream) {
  int status = KVFOLIO_UNSUPPORTED;
  ((a.head_dim == kHeadDims && ((status = attend<T, kHeadDims>(a, stream)), true)) || ...);
  return status;
}

template <class T>
int attend(const kvfolio_attention& a, void* stream) {
  return attend_one_of<T, KVFOLIO_HEAD_DIMS>(a, stream);
}

}  // namespace kvfolio

// How a tile of queries, keys and values lies in shared memory, and the two products over it.
//
// A warp has 16 rows of queries and some of the tile's keys. Scores and results are spread over its lanes as the
// tensor core leaves them, 16 x 8 at a time: a lane has [0] and [1] of row lane / 4, columns 2 (lane % 4) and the
// next, [2] and [3] of the row 8 below. float32, which the tensor core would round, is multiplied by ordinary
// instructions into the same form, so that all that is done with scores is written once.
#pragma once
#include "matrix.cuh"

namespace kvfolio {

template <class T, int kHeadDim, int kRowWarps>
struct Tile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kKeyWarps = kWarps / kRowWarps;  // that share the same rows, and part the keys
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16;  // of 16 bytes, as memory is read
  // At most 64 KiB of K and V a stage; half of it where a warp has the scores of all keys in registers.
  static constexpr int kKeys = (kRowWarps == 1 ? 64 : 32) / (kRowBytes > 512 ? 2 : 1);
  static constexpr int kKeysPerWarp = kKeys / kKeyWarps;
  static constexpr int kStages = kRowBytes <= 128 ? 3 : 2;
  static constexpr int kQueryBytes = kRows * kRowBytes, kSideBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kSideBytes;  // K, then V
  static constexpr int kPlaces = 2;                   // of tiles whose keys' places are known
  static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes + kPlaces * kKeys * 16;
  // Thread blocks that find room on an SM of 227 KiB: they may have that many registers, and no more. 64 rows
  // are more work than reading, and are better off with two that have what they need.
  static constexpr int kBlocksOfSm = 227 * 1024 / (kSharedBytes + 1024);
  static constexpr int kMinBlocks = kBlocksOfSm < 1 ? 1 : kRowWarps > 1 && kBlocksOfSm > 2 ? 2 : kBlocksOfSm;
  static constexpr int kResultBytes = kWarps * 16 * kHeadDim * 4;
  static_assert(kResultBytes <= kStages * kStageBytes, "results take the place of K and V at the end");
  static_assert(kWarps * 16 * 8 <= kQueryBytes, "their maxima and sums, that of the queries");
};

// Where 16 bytes of a row are. Rows of equal chunks would compete for the same banks, so chunks change places
// with the row's number.
template <class S>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * S::kRowBytes + (chunk ^ row % 8) * 16;
}

// scores[n] = rows of q times keys first_key + 8 n.. of k.
template <class S, class T, int kCount>
__device__ __forceinline__ void multiply_keys(float (&scores)[kCount][4], const char* q, const char* k, int first_key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kCount; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll 1
    for (int chunk = 0; chunk < S::kChunks; chunk++) {
      const float4 above = *reinterpret_cast<const float4*>(q + chunk_offset<S>(lane / 4, chunk));
      const float4 below = *reinterpret_cast<const float4*>(q + chunk_offset<S>(lane / 4 + 8, chunk));
#pragma unroll
      for (int n = 0; n < kCount; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = first_key + 8 * n + lane % 4 * 2 + i;
          const float4 key = *reinterpret_cast<const float4*>(k + chunk_offset<S>(row, chunk));
          scores[n][i] += above.x * key.x + above.y * key.y + above.z * key.z + above.w * key.w;
          scores[n][2 + i] += below.x * key.x + below.y * key.y + below.z * key.z + below.w * key.w;
        }
      }
    }
  } else {
    static_assert(kCount % 2 == 0);
    const int matrix = lane / 8, row = lane % 8;
#pragma unroll 4
    for (int depth = 0; depth < S::kChunks / 2; depth++) {  // 16 elements of a head
      uint32_t queries[4];
      load_matrices<false>(queries, q + chunk_offset<S>(matrix % 2 * 8 + row, 2 * depth + matrix / 2));
#pragma unroll
      for (int n = 0; n < kCount; n += 2) {
        uint32_t keys[4];
        load_matrices<false>(keys, k + chunk_offset<S>(first_key + 8 * n + matrix / 2 * 8 + row, 2 * depth + matrix % 2));
        multiply_add<T>(scores[n], queries, keys[0], keys[1]);
        multiply_add<T>(scores[n + 1], queries, keys[2], keys[3]);
      }
    }
  }
}

// sums += weights, [16, 8 kCount], times values first_key.. of v.
template <class S, class T, int kCount, int kColumns>
__device__ __forceinline__ void add_values(float (&sums)[kColumns][4], const float (&weights)[kCount][4],
                                           const char* v, int first_key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int n = 0; n < kCount; n++) {
#pragma unroll 1  // or values of many keys would be held in registers at once
      for (int key = 0; key < 8; key++) {
        const int holder = lane / 4 * 4 + key / 2;
        const float above = __shfl_sync(kAllLanes, key % 2 == 0 ? weights[n][0] : weights[n][1], holder);
        const float below = __shfl_sync(kAllLanes, key % 2 == 0 ? weights[n][2] : weights[n][3], holder);
#pragma unroll
        for (int column = 0; column < kColumns; column++) {
          const int chunk = 2 * column + lane % 4 / 2;
          const float2 value = *reinterpret_cast<const float2*>(v + chunk_offset<S>(first_key + 8 * n + key, chunk) +
                                                                lane % 2 * 8);
          sums[column][0] += above * value.x;
          sums[column][1] += above * value.y;
          sums[column][2] += below * value.x;
          sums[column][3] += below * value.y;
        }
      }
    }
  } else {
    const int matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {  // 16 keys; two results of a product are one factor of the next
      const uint32_t factors[4] = {pack<T>(weights[n][0], weights[n][1]), pack<T>(weights[n][2], weights[n][3]),
                                   pack<T>(weights[n + 1][0], weights[n + 1][1]),
                                   pack<T>(weights[n + 1][2], weights[n + 1][3])};
#pragma unroll
      for (int column = 0; column < kColumns; column += 2) {
        uint32_t values[4];
        load_matrices<true>(values, v + chunk_offset<S>(first_key + 8 * n + matrix % 2 * 8 + row, column + matrix / 2));
        multiply_add<T>(sums[column], factors, values[0], values[1]);
        multiply_add<T>(sums[column + 1], factors, values[2], values[3]);
      }
    }
  }
}

}  // namespace kvfolio

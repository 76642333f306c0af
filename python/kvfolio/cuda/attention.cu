// Launchers of attention, and of what plans it.
#include "plan_attention.cuh"
#include "tile.cuh"

namespace kvfolio {

int attend_float32(const kvfolio_attention& a, void* stream);
int attend_float16(const kvfolio_attention& a, void* stream);
int attend_bfloat16(const kvfolio_attention& a, void* stream);

template <class T>
int tile_keys(int head_dim, int tile_rows) {
  if (tile_rows != 16 && tile_rows != 64) return 0;
  const bool many = tile_rows == 64;
  if (head_dim == 64) return many ? Tile<T, 64, 4>::kKeys : Tile<T, 64, 1>::kKeys;
  if (head_dim == 128) return many ? Tile<T, 128, 4>::kKeys : Tile<T, 128, 1>::kKeys;
  if (head_dim == 256) return many ? Tile<T, 256, 4>::kKeys : Tile<T, 256, 1>::kKeys;
  return 0;
}

}  // namespace kvfolio

extern "C" int64_t kvfolio_cuda_work_bytes(int64_t capacity) { return kvfolio::WorkList::bytes(capacity); }

extern "C" int kvfolio_cuda_plan_attention(const kvfolio_plan_attention* arguments, void* stream) {
  return kvfolio::plan_attention(*arguments, stream);
}

extern "C" int kvfolio_cuda_tile_keys(int dtype, int head_dim, int tile_rows) {
  // Storage types of 2 bytes are alike in this.
  return dtype == KVFOLIO_FLOAT32 ? kvfolio::tile_keys<float>(head_dim, tile_rows)
                                  : kvfolio::tile_keys<__nv_bfloat16>(head_dim, tile_rows);
}

extern "C" kvfolio_workspace kvfolio_cuda_workspace(int64_t num_sequences, int64_t num_tokens, int32_t num_kv_heads,
                                                    int32_t group, int32_t head_dim, int32_t extra) {
  const auto aligned = [](int64_t bytes) { return kvfolio::ceil_div(bytes, 256) * 256; };
  const int64_t rows = num_tokens * group;
  // A sequence of up to 16 rows is one tile. One of more is as many as its rows fill, and one that is not full.
  const int64_t many = num_sequences < rows / 17 ? num_sequences : rows / 17;
  kvfolio_workspace w;
  w.capacity[0] = num_sequences + extra;
  w.capacity[1] = many + rows / 64 + extra;
  w.work[0] = 0;
  w.work[1] = aligned(kvfolio::WorkList::bytes(w.capacity[0]));
  w.partial_out = w.work[1] + aligned(kvfolio::WorkList::bytes(w.capacity[1]));
  const int64_t partial_rows = int64_t{2} * extra * num_kv_heads * 64;  // both lists' in turn
  w.partial_lse = w.partial_out + aligned(partial_rows * head_dim * 4);
  w.bytes = w.partial_lse + aligned(partial_rows * 4);
  return w;
}

extern "C" int kvfolio_cuda_attend(const kvfolio_attention* arguments, void* stream) {
  const kvfolio_attention& a = *arguments;
  // Heads are read and written in pieces of 16 bytes.
  const auto address = [](const void* data) { return reinterpret_cast<intptr_t>(data); };
  const int alignment = kvfolio::common_alignment(
      address(a.q.data), a.q.token_stride, a.q.head_stride, address(a.out.data), a.out.token_stride, a.out.head_stride,
      address(a.keys.data), a.keys.block_stride, a.keys.token_stride, a.keys.head_stride, address(a.values.data),
      a.values.block_stride, a.values.token_stride, a.values.head_stride);
  if (alignment < 16) return KVFOLIO_UNSUPPORTED;
  if (a.dtype == KVFOLIO_FLOAT32) return kvfolio::attend_float32(a, stream);
  if (a.dtype == KVFOLIO_FLOAT16) return kvfolio::attend_float16(a, stream);
  if (a.dtype == KVFOLIO_BFLOAT16) return kvfolio::attend_bfloat16(a, stream);
  return KVFOLIO_UNSUPPORTED;
}

extern "C" const char* kvfolio_cuda_error(int code) {
  if (code == KVFOLIO_UNSUPPORTED) return "a shape, dtype or alignment that the kernels do not have";
#ifdef KVFOLIO_EMULATED
  return "the emulator returns no errors";
#else
  return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

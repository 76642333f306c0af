// The CUDA implementations of torch.ops.kvfolio.*, through torch's stable ABI. Their schemas, what they compute on
// a CPU, and what a compiler is told of them are in kvfolio/ops.py, which also has the documentation.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "kvfolio.h"

// The tests register these for tensors of the CPU, with the kernels run by the emulator.
#ifdef KVFOLIO_EMULATED
#define KVFOLIO_NAMESPACE kvfolio_emulated
#define KVFOLIO_KEY CPU
#else
#define KVFOLIO_NAMESPACE kvfolio
#define KVFOLIO_KEY CUDA
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// On the tensor's device, in its current stream: a launch.
template <class Arguments>
void launch(int (*function)(const Arguments*, void*), const Arguments& arguments, [[maybe_unused]] const Tensor& where,
            const char* name) {
  void* stream = nullptr;
#ifndef KVFOLIO_EMULATED
  using CurrentStream = int (*)(int32_t, void**);
  // In CUDA builds of torch only, and not in the headers of others.
  static const auto current_stream =
      reinterpret_cast<CurrentStream>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  STD_TORCH_CHECK(current_stream != nullptr, "kvfolio: this torch was built without CUDA");
  const torch::stable::accelerator::DeviceGuard guard(where.get_device_index());
  STD_TORCH_CHECK(current_stream(where.get_device_index(), &stream) == 0, "kvfolio: no current CUDA stream");
#endif
  const int status = function(&arguments, stream);
  STD_TORCH_CHECK(status == 0, "kvfolio::", name, ": ", kvfolio_cuda_error(status));
}

void check(const Tensor& tensor, const char* name, int64_t dim, const Tensor& like) {
  STD_TORCH_CHECK(tensor.dim() == dim, name, " must have ", dim, " dimensions, not ", tensor.dim());
  STD_TORCH_CHECK(tensor.device() == like.device(), name, " must be on the device that the others are on");
}

template <class T>
T* data(const Tensor& tensor, const char* name, int64_t dim, ScalarType type, const Tensor& like) {
  check(tensor, name, dim, like);
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " is of the wrong dtype");
  STD_TORCH_CHECK(dim == 0 || tensor.size(dim - 1) <= 1 || tensor.stride(dim - 1) == 1, name,
                  " must be contiguous in its last dimension");
  return static_cast<T*>(tensor.data_ptr());
}

int dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return KVFOLIO_FLOAT32;
    case ScalarType::Half: return KVFOLIO_FLOAT16;
    case ScalarType::BFloat16: return KVFOLIO_BFLOAT16;
    default: STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16"); return 0;
  }
}

int64_t item_bytes(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float ? 4 : 2; }

kvfolio_tokens tokens(const Tensor& tensor, const char* name, const Tensor& like) {
  void* start = data<void>(tensor, name, 3, like.scalar_type(), like);
  return {start, tensor.stride(0) * item_bytes(tensor), tensor.stride(1) * item_bytes(tensor)};
}

kvfolio_storage storage(const Tensor& tensor, const char* name, const Tensor& like) {
  void* start = data<void>(tensor, name, 4, like.scalar_type(), like);
  const int64_t bytes = item_bytes(tensor);
  return {start, tensor.stride(0) * bytes, tensor.stride(1) * bytes, tensor.stride(2) * bytes};
}

void append(Tensor k, Tensor v, Tensor keys, Tensor values, Tensor slot_mapping) {
  dtype_of(keys, "keys");
  kvfolio_append a{};
  a.k = tokens(k, "k", keys);
  a.v = tokens(v, "v", keys);
  a.keys = storage(keys, "keys", keys);
  a.values = storage(values, "values", keys);
  a.slots = data<const int64_t>(slot_mapping, "slot_mapping", 1, ScalarType::Long, keys);
  a.num_tokens = slot_mapping.size(0);
  a.num_heads = static_cast<int32_t>(keys.size(2));
  a.head_bytes = static_cast<int32_t>(keys.size(3) * item_bytes(keys));
  a.block_size = static_cast<int32_t>(keys.size(1));
  for (const Tensor& tensor : {k, v})
    STD_TORCH_CHECK(tensor.size(0) == a.num_tokens && tensor.size(1) == keys.size(2) && tensor.size(2) == keys.size(3),
                    "k and v must be [len(slot_mapping), num_kv_heads, head_dim]");
  launch(kvfolio_cuda_append, a, keys, "append");
}

void copy_blocks(std::vector<Tensor> arrays, Tensor pairs) {
  STD_TORCH_CHECK(!arrays.empty(), "storage must not be empty");
  kvfolio_copy_blocks a{};
  const Tensor& first = arrays[0];
  dtype_of(first, "storage");
  a.pairs = data<const int32_t>(pairs, "pairs", 2, ScalarType::Int, first);
  STD_TORCH_CHECK(pairs.size(1) == 2 && pairs.is_contiguous(), "pairs must be contiguous, [n, 2]");
  a.num_pairs = pairs.size(0);
  a.num_heads = static_cast<int32_t>(first.size(2));
  a.head_bytes = static_cast<int32_t>(first.size(3) * item_bytes(first));
  a.block_size = static_cast<int32_t>(first.size(1));
  // One launch for all arrays of equal strides: for all layers, unless they lie in very different ways.
  for (size_t i = 0; i < arrays.size(); i++) {
    const kvfolio_storage s = storage(arrays[i], "storage", first);
    const bool same = a.block_stride == s.block_stride && a.token_stride == s.token_stride && a.head_stride == s.head_stride;
    if (a.num_arrays == KVFOLIO_MAX_ARRAYS || (a.num_arrays > 0 && !same)) {
      launch(kvfolio_cuda_copy_blocks, a, first, "copy_blocks");
      a.num_arrays = 0;
    }
    a.block_stride = s.block_stride;
    a.token_stride = s.token_stride;
    a.head_stride = s.head_stride;
    a.arrays[a.num_arrays++] = s.data;
  }
  launch(kvfolio_cuda_copy_blocks, a, first, "copy_blocks");
}

void update_table(Tensor table, Tensor updates) {
  kvfolio_update_table a{};
  a.table = data<int32_t>(table, "table", 2, ScalarType::Int, table);
  a.updates = data<const int32_t>(updates, "updates", 2, ScalarType::Int, table);
  STD_TORCH_CHECK(updates.size(1) == 3 && updates.is_contiguous(), "updates must be contiguous, [n, 3]");
  a.row_stride = table.stride(0);
  a.num_updates = updates.size(0);
  launch(kvfolio_cuda_update_table, a, table, "update_table");
}

constexpr int32_t kTileRows[2] = {16, 64}, kMinRows[2] = {1, 17}, kMaxRows[2] = {16, INT32_MAX};
constexpr int32_t kMinTiles = 2;  // a chunk of less than 128 keys is not worth its merge

kvfolio_workspace layout_of(const Tensor& workspace, int64_t num_sequences, int64_t num_tokens, int64_t num_heads,
                            int64_t num_kv_heads, int64_t head_dim, int64_t extra) {
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  STD_TORCH_CHECK(0 <= extra && extra < 65535, "extra must be in 0..65534, not ", extra);
  const auto layout = kvfolio_cuda_workspace(num_sequences, num_tokens, static_cast<int32_t>(num_kv_heads),
                                             static_cast<int32_t>(num_heads / num_kv_heads),
                                             static_cast<int32_t>(head_dim), static_cast<int32_t>(extra));
  STD_TORCH_CHECK(workspace.is_contiguous() && workspace.numel() >= layout.bytes, "workspace must have ", layout.bytes,
                  " bytes, not ", workspace.numel(), ": kvfolio.ops.workspace_bytes tells");
  return layout;
}

void plan_attention(Tensor seq_lens, Tensor query_start_loc, Tensor workspace, int64_t num_tokens, int64_t num_heads,
                    Tensor keys, int64_t window, int64_t extra) {
  char* start = data<char>(workspace, "workspace", 1, ScalarType::Byte, seq_lens);
  const auto layout =
      layout_of(workspace, seq_lens.size(0), num_tokens, num_heads, keys.size(2), keys.size(3), extra);
  const int dtype = dtype_of(keys, "keys"), head_dim = static_cast<int>(keys.size(3));
  for (int i = 0; i < 2; i++) {
    kvfolio_plan_attention a{};
    a.seq_lens = data<const int32_t>(seq_lens, "seq_lens", 1, ScalarType::Int, seq_lens);
    a.query_start_loc = data<const int32_t>(query_start_loc, "query_start_loc", 1, ScalarType::Int, seq_lens);
    STD_TORCH_CHECK(query_start_loc.size(0) == seq_lens.size(0) + 1, "query_start_loc must have one more than seq_lens");
    a.work = start + layout.work[i];
    a.capacity = layout.capacity[i];
    a.num_sequences = static_cast<int32_t>(seq_lens.size(0));
    a.group = static_cast<int32_t>(num_heads / keys.size(2));
    a.min_rows = kMinRows[i];
    a.max_rows = kMaxRows[i];
    a.tile_rows = kTileRows[i];
    a.tile_keys = kvfolio_cuda_tile_keys(dtype, head_dim, kTileRows[i]);
    STD_TORCH_CHECK(a.tile_keys > 0, "head_dim must be 64, 128 or 256, not ", head_dim);
    a.window = static_cast<int32_t>(window);
    a.extra = static_cast<int32_t>(extra);
    a.min_tiles = kMinTiles;
    launch(kvfolio_cuda_plan_attention, a, seq_lens, "plan_attention");
  }
}

void attend(Tensor q, Tensor keys, Tensor values, Tensor block_table, Tensor seq_lens, Tensor query_start_loc,
            Tensor out, std::optional<Tensor> lse, Tensor workspace, double scale, int64_t window, double soft_cap,
            std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks, int64_t max_query_len, int64_t extra) {
  const auto layout = layout_of(workspace, seq_lens.size(0), q.size(0), q.size(1), keys.size(2), keys.size(3), extra);
  const auto per_head = [&](const std::optional<Tensor>& tensor, const char* name) -> const float* {
    if (!tensor) return nullptr;
    STD_TORCH_CHECK(tensor->numel() == q.size(1), name, " must have one number for each query head");
    return data<const float>(*tensor, name, 1, ScalarType::Float, q);
  };
  kvfolio_attention a{};
  a.dtype = dtype_of(keys, "keys");
  a.q = tokens(q, "q", keys);
  a.out = tokens(out, "out", keys);
  a.keys = storage(keys, "keys", keys);
  a.values = storage(values, "values", keys);
  STD_TORCH_CHECK(q.size(2) == keys.size(3) && out.size(0) == q.size(0) && out.size(1) == q.size(1) &&
                      out.size(2) == q.size(2), "q and out must be [num_tokens, num_heads, head_dim]");
  if (lse) {
    a.lse = data<float>(*lse, "lse", 2, ScalarType::Float, q);
    STD_TORCH_CHECK(lse->is_contiguous() && lse->size(0) == q.size(0) && lse->size(1) == q.size(1),
                    "lse must be contiguous, [num_tokens, num_heads]");
  }
  a.block_table = data<const int32_t>(block_table, "block_table", 2, ScalarType::Int, q);
  a.table_stride = block_table.stride(0);
  a.seq_lens = data<const int32_t>(seq_lens, "seq_lens", 1, ScalarType::Int, q);
  a.query_start_loc = data<const int32_t>(query_start_loc, "query_start_loc", 1, ScalarType::Int, q);
  STD_TORCH_CHECK(block_table.size(0) >= seq_lens.size(0) && query_start_loc.size(0) == seq_lens.size(0) + 1,
                  "block_table, seq_lens and query_start_loc must be of the same sequences");
  a.alibi_slopes = per_head(alibi_slopes, "alibi_slopes");
  a.sinks = per_head(sinks, "sinks");
  char* start = data<char>(workspace, "workspace", 1, ScalarType::Byte, q);
  a.partial_out = reinterpret_cast<float*>(start + layout.partial_out);
  a.partial_lse = reinterpret_cast<float*>(start + layout.partial_lse);
  a.num_kv_heads = static_cast<int32_t>(keys.size(2));
  a.group = static_cast<int32_t>(q.size(1) / keys.size(2));
  a.head_dim = static_cast<int32_t>(keys.size(3));
  a.block_size = static_cast<int32_t>(keys.size(1));
  a.window = static_cast<int32_t>(window);
  a.extra = static_cast<int32_t>(extra);
  a.scale = static_cast<float>(scale);
  a.soft_cap = static_cast<float>(soft_cap);
  for (int i = 0; i < 2; i++) {
    if (max_query_len * a.group < kMinRows[i]) continue;  // no sequence has that many rows
    a.work = start + layout.work[i];
    a.capacity = layout.capacity[i];
    a.tile_rows = kTileRows[i];
    launch(kvfolio_cuda_attend, a, q, "attend");
  }
}

}  // namespace

#define KVFOLIO_REGISTER(space, key, m) STABLE_TORCH_LIBRARY_IMPL(space, key, m)  // names as they are by now
KVFOLIO_REGISTER(KVFOLIO_NAMESPACE, KVFOLIO_KEY, m) {
  m.impl("append", TORCH_BOX(&append));
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks));
  m.impl("update_table", TORCH_BOX(&update_table));
  m.impl("plan_attention", TORCH_BOX(&plan_attention));
  m.impl("attend", TORCH_BOX(&attend));
}

/* The kernels' interface: plain C, device pointers, strides in bytes, the caller's stream.
 *
 * Nothing here waits for the device, allocates, or reads device memory on the host, so every call can be part
 * of a CUDA graph. Each returns 0, a cudaError_t, or KVFOLIO_UNSUPPORTED; it has launched nothing then. */
#ifndef KVFOLIO_H
#define KVFOLIO_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { KVFOLIO_FLOAT32 = 0, KVFOLIO_FLOAT16 = 1, KVFOLIO_BFLOAT16 = 2 };
enum { KVFOLIO_UNSUPPORTED = -1 };
/* Arrays of one kvfolio_cuda_copy_blocks: their addresses go along as arguments of the kernel, of at most 4 KiB. */
enum { KVFOLIO_MAX_ARRAYS = 256 };

/* K or V of a layer: [blocks, block_size, heads, head_dim], heads' elements adjacent. */
typedef struct {
  void* data;
  int64_t block_stride, token_stride, head_stride;
} kvfolio_storage;

/* Tokens' heads: [tokens, heads, head_dim], heads' elements adjacent. */
typedef struct {
  void* data;
  int64_t token_stride, head_stride;
} kvfolio_tokens;

/* Token t of k and v goes into slot slots[t]; negative slots are passed over. */
typedef struct {
  kvfolio_tokens k, v;
  kvfolio_storage keys, values;
  const int64_t* slots;
  int64_t num_tokens;
  int32_t num_heads, head_bytes, block_size;
} kvfolio_append;
int kvfolio_cuda_append(const kvfolio_append* arguments, void* stream);

/* Block pairs[i][1] of every array becomes what pairs[i][0] is; no block may be in both columns, unless in one
 * pair, which then is passed over. All arrays have the same strides. */
typedef struct {
  void* arrays[KVFOLIO_MAX_ARRAYS];
  int64_t block_stride, token_stride, head_stride;
  const int32_t* pairs;
  int64_t num_pairs;
  int32_t num_arrays, num_heads, head_bytes, block_size;
} kvfolio_copy_blocks;
int kvfolio_cuda_copy_blocks(const kvfolio_copy_blocks* arguments, void* stream);

/* table[row][block] = id for each (row, block, id) of updates; negative rows are passed over. */
typedef struct {
  int32_t* table;
  const int32_t* updates;
  int64_t row_stride, num_updates;
} kvfolio_update_table;
int kvfolio_cuda_update_table(const kvfolio_update_table* arguments, void* stream);

/* Which parts of which sequences' attention a thread block takes. A sequence of n queries and g query heads a KV
 * head has n g rows for each KV head: row r is query r / g, head r % g. They are cut into tiles of `tile_rows`,
 * and the keys that a tile sees into chunks, so many that the device is busy and no more than fit. */
typedef struct {
  int32_t sequence, row_tile;
  uint16_t chunk, num_chunks;
  int32_t partial; /* where a chunk's result goes if there are others; -1: it is the result */
} kvfolio_item;
typedef struct {
  int32_t num_items, num_merges, tiles_per_chunk, overflow;
} kvfolio_work_header;
/* Bytes of a work list: its header, `capacity` items, `capacity` numbers of first items of what is to be merged. */
int64_t kvfolio_cuda_work_bytes(int64_t capacity);

/* Fills a work list. Sequences of min_rows to max_rows rows are taken. At most `extra` chunks come on top of one
 * for each row tile, so that `partial` stays below 2 * extra; a chunk is of `min_tiles` tiles of keys at least.
 * If `capacity` items are too few, the header's `overflow` tells, and results miss. */
typedef struct {
  const int32_t *seq_lens, *query_start_loc;
  void* work;
  int64_t capacity;
  int32_t num_sequences, group, min_rows, max_rows, tile_rows, tile_keys, window, extra, min_tiles;
} kvfolio_plan_attention;
int kvfolio_cuda_plan_attention(const kvfolio_plan_attention* arguments, void* stream);

/* Causal attention of the sequences in a work list; the queries of a sequence are its last positions. */
typedef struct {
  kvfolio_tokens q, out;
  kvfolio_storage keys, values;
  float* lse; /* [tokens, heads] or null */
  const int32_t *block_table, *seq_lens, *query_start_loc;
  const float *alibi_slopes, *sinks; /* [heads] or null */
  const void* work;
  float *partial_out, *partial_lse; /* [partials, num_kv_heads, tile_rows, head_dim] and without head_dim */
  int64_t table_stride;             /* cells */
  int64_t capacity;                 /* of the work list */
  int32_t dtype, num_kv_heads, group, head_dim, block_size, tile_rows;
  int32_t window; /* keys that a query sees, its own included; 0: all */
  int32_t extra;  /* as the work list was planned with */
  float scale, soft_cap; /* 0: none */
} kvfolio_attention;
int kvfolio_cuda_attend(const kvfolio_attention* arguments, void* stream);
/* Keys of a tile: what a work list has to be planned with. 0 if these are not supported. */
int kvfolio_cuda_tile_keys(int dtype, int head_dim, int tile_rows);

/* Where a step's work lists and partial results lie in one piece of memory: for sequences of few rows, then of many. */
typedef struct {
  int64_t capacity[2], work[2]; /* items, and bytes from the start */
  int64_t partial_out, partial_lse, bytes;
} kvfolio_workspace;
kvfolio_workspace kvfolio_cuda_workspace(int64_t num_sequences, int64_t num_tokens, int32_t num_kv_heads, int32_t group,
                                         int32_t head_dim, int32_t extra);

/* The description of an error that was returned. */
const char* kvfolio_cuda_error(int code);

#ifdef __cplusplus
}
#endif
#endif

// Which keys a tile of rows sees, and the list of who takes which of them.
#pragma once
#include "device.cuh"

namespace kvfolio {

static_assert(sizeof(kvfolio_item) == 16);

struct WorkList {
  const kvfolio_work_header* header;
  const kvfolio_item* items;
  const int32_t* merges;  // numbers of the first items of what is to be merged

  __host__ __device__ static int64_t bytes(int64_t capacity) { return 16 + capacity * (16 + 4); }
  __device__ WorkList(const void* work, int64_t capacity)
      : header(static_cast<const kvfolio_work_header*>(work)),
        items(reinterpret_cast<const kvfolio_item*>(header + 1)),
        merges(reinterpret_cast<const int32_t*>(items + capacity)) {}
};

// The queries of a sequence, which are its last positions, and how many keys it has.
struct Sequence {
  int first_token, num_queries, length;

  __device__ Sequence(const int32_t* query_start_loc, const int32_t* seq_lens, int number)
      : first_token(query_start_loc[number]),
        num_queries(query_start_loc[number + 1] - first_token),
        length(seq_lens[number]) {}
  __device__ int position(int query) const { return length - num_queries + query; }
};

// Rows first .. first + count of a sequence.
struct RowTile {
  int first, count;

  __device__ RowTile(const Sequence& sequence, int group, int number, int tile_rows)
      : first(number * tile_rows), count(min(tile_rows, sequence.num_queries * group - first)) {}
};

// The tiles of keys that hold all that any of these rows sees.
struct KeyRange {
  int begin, end;               // keys
  int first_tile, last_tile;    // of them, the last not included

  __device__ KeyRange(const Sequence& sequence, const RowTile& rows, int group, int window, int tile_keys)
      : begin(window > 0 ? max(0, sequence.position(rows.first / group) - window + 1) : 0),
        end(max(0, sequence.position((rows.first + rows.count - 1) / group) + 1)),
        first_tile(begin / tile_keys),
        last_tile(end > begin ? (end - 1) / tile_keys + 1 : first_tile) {}
  __device__ int num_tiles() const { return last_tile - first_tile; }
};

}  // namespace kvfolio

// Launchers of what writes the cache and the table.
#include "append.cuh"
#include "copy_blocks.cuh"
#include "update_table.cuh"

extern "C" int kvfolio_cuda_append(const kvfolio_append* arguments, void* stream) {
  return kvfolio::append(*arguments, stream);
}

extern "C" int kvfolio_cuda_copy_blocks(const kvfolio_copy_blocks* arguments, void* stream) {
  return kvfolio::copy_blocks(*arguments, stream);
}

extern "C" int kvfolio_cuda_update_table(const kvfolio_update_table* arguments, void* stream) {
  return kvfolio::update_table(*arguments, stream);
}

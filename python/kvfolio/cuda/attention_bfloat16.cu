// A file a dtype, so that they are compiled side by side.
#include "attention.cuh"

namespace kvfolio {
int attend_bfloat16(const kvfolio_attention& a, void* stream) { return attend<__nv_bfloat16>(a, stream); }
}  // namespace kvfolio

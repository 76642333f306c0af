// A file a dtype, so that they are compiled side by side.
#include "attention.cuh"

namespace kvfolio {
int attend_float16(const kvfolio_attention& a, void* stream) { return attend<__half>(a, stream); }
}  // namespace kvfolio

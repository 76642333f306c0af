// A file a dtype, so that they are compiled side by side.
#include "attention.cuh"

namespace kvfolio {
int attend_float32(const kvfolio_attention& a, void* stream) { return attend<float>(a, stream); }
}  // namespace kvfolio

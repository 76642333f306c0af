#include "warp.hpp"

namespace emulator {
namespace {

void complete_exchange(void* const operands[32]) {
  uint64_t values[32] = {};
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; lane++) {
    if (operands[lane] == nullptr) continue;
    values[lane] = static_cast<Exchange*>(operands[lane])->value;
    votes |= static_cast<unsigned>(values[lane] != 0) << lane;
  }
  for (unsigned lane = 0; lane < 32; lane++) {
    auto* mine = static_cast<Exchange*>(operands[lane]);
    if (mine == nullptr) continue;
    mine->value = values[mine->source];
    mine->ballot = votes;
  }
}

}  // namespace

uint64_t exchange(unsigned mask, uint64_t value, unsigned source, const char* operation, Where where) {
  if (!(mask >> source & 1)) refuse(where, "%s reads lane %u, which its mask, %08x, does not have", operation, source, mask);
  Exchange operands{value, source, 0};
  together(mask, operation, complete_exchange, &operands, where);
  return operands.value;
}

unsigned ballot(unsigned mask, bool predicate, const char* operation, Where where) {
  Exchange operands{predicate, lane(), 0};
  together(mask, operation, complete_exchange, &operands, where);
  return operands.ballot;
}

}  // namespace emulator

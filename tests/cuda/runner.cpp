// Calls the kernels' C interface on memory that a file describes (harness.py writes it), in the emulator.
//
//     runner CASE RESULT
//
// Each array is memory of its own and exact size, so that AddressSanitizer sees its ends; parts of it may be
// forbidden. Arrays of gigabytes are given in pieces and take no memory between them.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "emulator/grid.hpp"
#include "emulator/sanitizers.hpp"
#include "kvfolio.h"

namespace {

struct Function {
  size_t bytes;
  int (*call)(const void* arguments);
};
template <auto function, class Arguments>
Function of() {
  return {sizeof(Arguments), [](const void* a) { return function(static_cast<const Arguments*>(a), nullptr); }};
}
const std::map<std::string, Function> kFunctions = {
    {"append", of<kvfolio_cuda_append, kvfolio_append>()},
    {"copy_blocks", of<kvfolio_cuda_copy_blocks, kvfolio_copy_blocks>()},
    {"update_table", of<kvfolio_cuda_update_table, kvfolio_update_table>()},
    {"plan_attention", of<kvfolio_cuda_plan_attention, kvfolio_plan_attention>()},
    {"attend", of<kvfolio_cuda_attend, kvfolio_attention>()},
};

struct Piece {
  uint64_t offset, bytes;
};
struct Array {
  char* data = nullptr;
  uint64_t bytes = 0;
  std::vector<Piece> pieces, forbidden;
};

std::ifstream input;

uint64_t number() {
  uint64_t value = 0;
  if (!input.read(reinterpret_cast<char*>(&value), sizeof value)) {
    std::fputs("runner: the case ends early\n", stderr);
    std::exit(2);
  }
  return value;
}

void bytes(void* to, uint64_t count) { input.read(static_cast<char*>(to), static_cast<std::streamsize>(count)); }

Array read_array() {
  constexpr uint64_t kHuge = 1 << 30;
  Array array;
  array.bytes = number();
  if (array.bytes >= kHuge) {
    void* memory = mmap(nullptr, array.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::exit(3);
    array.data = static_cast<char*>(memory);
  } else {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, array.bytes) != 0) std::exit(3);
    array.data = static_cast<char*>(memory);
  }
  array.pieces.resize(number());
  for (Piece& piece : array.pieces) {
    piece = {number(), number()};
    bytes(array.data + piece.offset, piece.bytes);
  }
  array.forbidden.resize(number());
  for (Piece& piece : array.forbidden) piece = {number(), number()};
  return array;
}

void forbid(const Array& array, bool forbidden) {
  if (!emulator::has_address_sanitizer()) return;
  for (const Piece& piece : array.forbidden) {
    if (forbidden) __asan_poison_memory_region(array.data + piece.offset, piece.bytes);
    else __asan_unpoison_memory_region(array.data + piece.offset, piece.bytes);
  }
}

void run_call(const std::vector<Array>& arrays) {
  std::string name(number(), ' ');
  bytes(name.data(), name.size());
  emulator::Schedule schedule;
  schedule.order = static_cast<emulator::Schedule::Order>(number());
  schedule.landing = static_cast<emulator::Schedule::Landing>(number());
  schedule.seed = number();
  std::vector<char> arguments(number());
  bytes(arguments.data(), arguments.size());
  for (uint64_t left = number(); left > 0; left--) {
    const uint64_t field = number(), array = number(), offset = number();
    const char* pointer = arrays.at(array).data + offset;
    std::memcpy(arguments.data() + field, &pointer, sizeof pointer);
  }
  const Function& function = kFunctions.at(name);
  if (function.bytes != arguments.size()) {
    std::fprintf(stderr, "runner: arguments of %s are of %zu bytes, not %zu\n", name.c_str(), function.bytes, arguments.size());
    std::exit(2);
  }
  emulator::set_schedule(schedule);
  if (const int status = function.call(arguments.data())) {
    std::fprintf(stderr, "runner: %s returned %d\n", name.c_str(), status);
    std::exit(4);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  input.open(words[1], std::ios::binary);
  std::vector<Array> arrays(number());
  for (Array& array : arrays) array = read_array();
  for (const Array& array : arrays) forbid(array, true);
  for (uint64_t left = number(); left > 0; left--) run_call(arrays);
  for (const Array& array : arrays) forbid(array, false);
  std::ofstream output(words[2], std::ios::binary);
  for (const Array& array : arrays)
    for (const Piece& piece : array.pieces)
      output.write(array.data + piece.offset, static_cast<std::streamsize>(piece.bytes));
  return output.good() ? 0 : 2;
}

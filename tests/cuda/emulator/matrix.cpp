#include "matrix.hpp"

namespace emulator {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

struct Rows {
  uint16_t row[8];
  bool transposed;
  uint32_t fragments[4];
};

void complete_rows(void* const operands[32]) {
  for (unsigned lane = 0; lane < 32; lane++) {
    auto& mine = *static_cast<Rows*>(operands[lane]);
    for (unsigned matrix = 0; matrix < 4; matrix++) {
      uint32_t pair[2];
      for (unsigned i = 0; i < 2; i++) {
        unsigned row = lane / 4, column = lane % 4 * 2 + i;
        if (mine.transposed) std::swap(row, column);
        pair[i] = static_cast<Rows*>(operands[8 * matrix + row])->row[column];
      }
      mine.fragments[matrix] = pair[0] | pair[1] << 16;
    }
  }
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
  bool is_bfloat16;
};

float number(uint32_t pair, unsigned i, bool is_bfloat16) {
  const auto bits = static_cast<uint16_t>(pair >> 16 * i);
  if (!is_bfloat16) return __half2float(__half(__half_raw{bits}));
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Terms are added one after another to what is there, in ascending order of k.
void complete_product(void* const operands[32]) {
  float a[16][16], b[16][8], c[16][8];
  for (unsigned lane = 0; lane < 32; lane++) {
    const auto& mine = *static_cast<Product*>(operands[lane]);
    for (unsigned i = 0; i < 2; i++) {
      for (unsigned r = 0; r < 4; r++) a[lane / 4 + r % 2 * 8][lane % 4 * 2 + r / 2 * 8 + i] = number(mine.a[r], i, mine.is_bfloat16);
      for (unsigned r = 0; r < 2; r++) b[lane % 4 * 2 + r * 8 + i][lane / 4] = number(mine.b[r], i, mine.is_bfloat16);
      for (unsigned r = 0; r < 2; r++) c[lane / 4 + r * 8][lane % 4 * 2 + i] = mine.c[2 * r + i];
    }
  }
  for (unsigned row = 0; row < 16; row++)
    for (unsigned k = 0; k < 16; k++)
      for (unsigned column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
  for (unsigned lane = 0; lane < 32; lane++)
    for (unsigned i = 0; i < 4; i++)
      static_cast<Product*>(operands[lane])->c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

}  // namespace

void share_rows(const void* row, bool transposed, uint32_t (&fragments)[4], Where where) {
  Rows operands{{}, transposed, {}};
  std::memcpy(operands.row, row, sizeof operands.row);
  together(kAll, "ldmatrix", complete_rows, &operands, where);
  std::memcpy(fragments, operands.fragments, sizeof fragments);
}

void multiply_add(bool is_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Where where) {
  Product operands{c, a, {b0, b1}, is_bfloat16};
  together(kAll, "mma", complete_product, &operands, where);
}

}  // namespace emulator

// Small kernels, right and wrong, for test_emulator.py: `emulator_cases NAME ORDER LANDING SEED` runs one and
// prints what it computed.
#include <emulator.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
using emulator::launch;

int* shared_ints() { return reinterpret_cast<int*>(emulator::shared_memory()); }

template <class T>
void print(const std::vector<T>& values) {
  for (const T& value : values) std::printf("%g ", static_cast<double>(value));
}

// Thread i gets what thread i + 1 of its block wrote.
void neighbours(bool with_barrier) {
  std::vector<int> out(64);
  launch(dim3(1), dim3(64), 64 * sizeof(int), [=, &out] {
    const unsigned i = threadIdx.x;
    shared_ints()[i] = static_cast<int>(i);
    if (with_barrier) __syncthreads();
    out[i] = shared_ints()[(i + 1) % 64];
  });
  print(out);
}

// The same in a warp, ordered by what `order` does.
template <class Order>
void neighbours_of_a_warp(Order order) {
  std::vector<int> out(32);
  launch(dim3(1), dim3(32), 32 * sizeof(int), [=, &out] {
    const unsigned i = threadIdx.x;
    shared_ints()[i] = static_cast<int>(i);
    order();
    out[i] = shared_ints()[(i + 1) % 32];
  });
  print(out);
}

// Thread 0 writes again after a barrier while the others still read: a race, though all go through barriers.
void write_after_the_barrier() {
  std::vector<int> out(64);
  launch(dim3(1), dim3(64), sizeof(int), [&out] {
    const unsigned i = threadIdx.x;
    if (i == 0) shared_ints()[0] = 1;
    __syncthreads();
    if (i == 0) shared_ints()[0] = 2;
    else out[i] = shared_ints()[0];
    __syncthreads();
  });
}

void blocks_write_one_place() {
  std::vector<int> out(32);
  launch(dim3(2), dim3(32), 0, [&out] { out[threadIdx.x] = static_cast<int>(blockIdx.x); });
}

void count_atomically() {
  int count = 0;
  std::vector<int> first(1);
  launch(dim3(5), dim3(64), 0, [&] {
    if (atomicAdd(&count, 1) == 0) atomicExch(first.data(), static_cast<int>(blockIdx.x * 64 + threadIdx.x));
  });
  std::printf("%d first %d", count, first[0]);
}

// One copy of 16 floats by 4 threads.
void copy_asynchronously(bool wait) {
  std::unique_ptr<float[]> in(new float[16]);
  std::iota(in.get(), in.get() + 16, 0.0f);
  std::vector<float> out(16);
  const float* from = in.get();
  launch(dim3(1), dim3(16), 64, [=, &out] {
    auto* to = reinterpret_cast<float*>(emulator::shared_memory());
    if (threadIdx.x < 4) __pipeline_memcpy_async(to + 4 * threadIdx.x, from + 4 * threadIdx.x, 16, 8 * (threadIdx.x == 3));
    __pipeline_commit();
    if (wait) __pipeline_wait_prior(0);
    __syncthreads();
    out[threadIdx.x] = to[threadIdx.x];
    __pipeline_wait_prior(0);
  });
  print(out);
}

// The first of two groups has to have landed, the second may not have.
void wait_for_the_first_group() {
  float in[2] = {1, 2};
  std::vector<float> out(2);
  const float* from = in;
  launch(dim3(1), dim3(1), 8, [=, &out] {
    auto* to = reinterpret_cast<float*>(emulator::shared_memory());
    for (int i = 0; i < 2; i++) {
      __pipeline_memcpy_async(to + i, from + i, 4);
      __pipeline_commit();
    }
    __pipeline_wait_prior(1);
    out[0] = to[0], out[1] = to[1];
    __pipeline_wait_prior(0);
  });
  print(out);
}

// Whatever a stage still holds is written over at once by an early copy.
void copy_over_what_is_read() {
  std::unique_ptr<int[]> in(new int[32]());
  std::vector<int> out(64);
  const int* from = in.get();
  launch(dim3(1), dim3(64), 64 * sizeof(int), [=, &out] {
    const unsigned i = threadIdx.x;
    shared_ints()[i] = 7;
    __syncthreads();
    if (i < 32) __pipeline_memcpy_async(shared_ints() + i, from + i, 4);
    __pipeline_commit();
    out[i] = shared_ints()[63 - i];
    __pipeline_wait_prior(0);
  });
  print(out);
}

// 16 x 16 times 16 x 8 and 16 x 16 times (8 x 16)^T, loaded by ldmatrix; printed with what loops give.
template <class T>
void multiply() {
  std::vector<float> got(2 * 16 * 8), expected(2 * 16 * 8);
  float a[16][16], b[16][8];
  for (int i = 0; i < 256; i++) a[i / 16][i % 16] = static_cast<float>((i * 37) % 29 - 14);
  for (int i = 0; i < 128; i++) b[i / 8][i % 8] = static_cast<float>((i * 23) % 31 - 15);
  for (int i = 0; i < 128; i++)
    for (int k = 0; k < 16; k++) expected[i] += a[i / 8][k] * b[k][i % 8];
  std::copy_n(expected.begin(), 128, expected.begin() + 128);
  launch(dim3(1), dim3(32), (16 * 16 + 16 * 8 + 8 * 16) * sizeof(T), [&] {
    T* rows = reinterpret_cast<T*>(emulator::shared_memory());
    T *down = rows + 256, *across = down + 128;  // b, and b with its axes swapped
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) rows[i] = T(a[i / 16][i % 16]);
    for (unsigned i = lane; i < 128; i += 32) down[i] = T(b[i / 8][i % 8]), across[i % 8 * 16 + i / 8] = T(b[i / 8][i % 8]);
    __syncwarp();
    uint32_t of_a[4], of_down[4], of_across[4];
    emulator::load_matrices(of_a, rows + (lane % 16) * 16 + lane / 16 * 8, false);
    emulator::load_matrices(of_down, down + (lane % 16) * 8, true);
    emulator::load_matrices(of_across, across + lane % 8 * 16 + lane / 8 % 2 * 8, false);
    float one[4] = {}, other[4] = {};
    emulator::multiply_add<T>(one, of_a, of_down[0], of_down[1]);
    emulator::multiply_add<T>(other, of_a, of_across[0], of_across[1]);
    for (unsigned i = 0; i < 4; i++) {
      const unsigned place = (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2;
      got[place] = one[i], got[128 + place] = other[i];
    }
  });
  std::printf("%s", got == expected ? "equal" : "different");
}

void shuffle() {
  std::vector<int> out(5 * 32);
  launch(dim3(1), dim3(32), 0, [&out] {
    const int i = static_cast<int>(threadIdx.x);
    out[i] = __shfl_sync(kAll, i, 3);
    out[32 + i] = __shfl_xor_sync(kAll, i, 5);
    out[64 + i] = __shfl_up_sync(kAll, i, 2);
    out[96 + i] = static_cast<int>(__shfl_down_sync(kAll, static_cast<double>(i), 2));
    out[128 + i] = static_cast<int>(__ballot_sync(kAll, i % 3 == 0) & 0xFFFF) + __any_sync(kAll, i == 7) + __all_sync(kAll, i < 31);
  });
  print(out);
}

template <class Body>
void one_warp(Body body) {
  launch(dim3(1), dim3(32), 64, body);
}

const struct {
  const char* name;
  void (*run)();
} kCases[] = {
    {"barrier", [] { neighbours(true); }},
    {"no barrier", [] { neighbours(false); }},
    {"syncwarp", [] { neighbours_of_a_warp([] { __syncwarp(); }); }},
    {"shuffle orders nothing", [] { neighbours_of_a_warp([] { __shfl_sync(kAll, 1, 0); }); }},
    {"write after the barrier", write_after_the_barrier},
    {"blocks write one place", blocks_write_one_place},
    {"count", count_atomically},
    {"copy", [] { copy_asynchronously(true); }},
    {"copy without wait", [] { copy_asynchronously(false); }},
    {"first group", wait_for_the_first_group},
    {"copy over what is read", copy_over_what_is_read},
    {"multiply half", multiply<__half>},
    {"multiply bfloat16", multiply<__nv_bfloat16>},
    {"shuffle", shuffle},
    {"barriers at two places", [] { one_warp([] { if (threadIdx.x < 7) __syncthreads(); else
                                                    __syncthreads(); }); }},
    {"barrier and shuffle", [] { one_warp([] { if (threadIdx.x < 7) __syncthreads(); else __shfl_sync(kAll, 1, 9); }); }},
    {"exited threads and a barrier", [] { one_warp([] { if (threadIdx.x >= 7) __syncthreads(); }); }},
    {"exited lane", [] { one_warp([] { if (threadIdx.x != 5) __shfl_sync(kAll, 1, 0); }); }},
    {"own lane", [] { one_warp([] { __shfl_sync(0xFFFEu, 1, 1); }); }},
    {"source lane", [] { one_warp([] { if (threadIdx.x < 16) __shfl_sync(0xFFFFu, 1, 20); }); }},
    {"copy of 3 bytes", [] { one_warp([] { __pipeline_memcpy_async(shared_ints(), shared_ints(), 3); }); }},
    {"copy misaligned", [] { one_warp([] { __pipeline_memcpy_async(shared_ints() + 1, &kAll, 16); }); }},
    {"copy from outside", [] { std::unique_ptr<int[]> a(new int[4]); one_warp([&] { __pipeline_memcpy_async(shared_ints(), a.get() + 4, 4); }); }},
    {"copy beyond", [] { one_warp([] { __pipeline_memcpy_async(shared_ints() + 16, &kAll, 4); }); }},
    {"copy never waited for", [] { one_warp([] { __pipeline_memcpy_async(shared_ints(), &kAll, 4); __pipeline_commit(); }); }},
    {"ldmatrix misaligned", [] { one_warp([] { uint32_t f[4]; emulator::load_matrices(f, shared_ints() + 1, false); }); }},
    {"ldmatrix beyond", [] { one_warp([] { uint32_t f[4]; emulator::load_matrices(f, shared_ints() + 4 * threadIdx.x, false); }); }},
    {"too many threads", [] { launch(dim3(1), dim3(1025), 0, [] {}); }},
    {"too much shared memory", [] { launch(dim3(1), dim3(1), 228 * 1024, [] {}); }},
    {"shared overflow", [] { one_warp([] { shared_ints()[16 + (threadIdx.x == 3)] = 1; }); }},
    {"global overflow", [] { std::unique_ptr<int[]> a(new int[31]); one_warp([&] { a[threadIdx.x] = 1; }); }},
    {"vector misaligned", [] { std::vector<int> a(36); one_warp([&] { *reinterpret_cast<int4*>(a.data() + 1) = int4{}; }); }},
};

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  emulator::Schedule schedule;
  schedule.order = static_cast<emulator::Schedule::Order>(std::atoi(words[2]));
  schedule.landing = static_cast<emulator::Schedule::Landing>(std::atoi(words[3]));
  schedule.seed = static_cast<uint64_t>(std::atoll(words[4]));
  emulator::set_schedule(schedule);
  for (const auto& one : kCases)
    if (std::strcmp(one.name, words[1]) == 0) return one.run(), 0;
  return 2;
}

#include "grid.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fiber.hpp"
#include "sanitizers.hpp"

namespace emulator {
namespace {

constexpr unsigned kWarp = 32, kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a block on sm_90 and sm_100
enum class State { runnable, at_barrier, in_warp, done };

struct Thread {
  Fiber* fiber = nullptr;
  State state = State::done;
  uint3 index{};
  const char* operation = "";  // what it waits in, and where
  Where where;
  unsigned mask = 0;
  Complete complete = nullptr;
  void* operands = nullptr;
  int copies = 0;
  // Barriers alternate between two places for happens-before, so that who leaves one late does not see what
  // others did on their way to the next.
  unsigned block_barriers = 0, warp_barriers = 0;
  char released[2] = {};
  void* seen[kWarp] = {};
};

struct Grid {
  Schedule schedule;
  uint64_t random = 1;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Thread> threads{kMaxThreads};
  std::vector<unsigned> ready;
  unsigned num_threads = 0, num_live = 0, current = 0;
  bool running = false;
  uint3 block{};
  dim3 grid_shape, block_shape;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  char started = 0, ended = 0, barrier[2] = {};  // places for happens-before
};

Grid& grid() {
  static Grid the_only_one;
  return the_only_one;
}

Thread& current() { return grid().threads[grid().current]; }

void describe(const Thread& thread) {
  const Grid& g = grid();
  std::fprintf(stderr, "thread (%u,%u,%u) of block (%u,%u,%u)", thread.index.x, thread.index.y,
               thread.index.z, g.block.x, g.block.y, g.block.z);
}

void describe_at_death() {
  if (!grid().running) return;
  std::fputs("emulator: that was ", stderr);
  describe(current());
  std::fputs("\n", stderr);
}

// The end of a block in which nobody can go on.
[[noreturn]] void refuse_deadlock(const char* what) {
  const Grid& g = grid();
  std::fprintf(stderr, "emulator: %s\n", what);
  int shown = 0;
  for (unsigned i = 0; i < g.num_threads && shown < 40; i++) {
    const Thread& t = g.threads[i];
    const bool told = i > 0 && g.threads[i - 1].state == t.state && g.threads[i - 1].where.line() == t.where.line();
    if (t.state == State::done || told) continue;  // one for all that wait at the same place
    std::fprintf(stderr, "  %s:%u: ", t.where.file_name(), t.where.line());
    describe(t);
    std::fprintf(stderr, " and its like wait in %s\n", t.operation);
    shown++;
  }
  std::_Exit(70);
}

void run_thread() {
  Grid& g = grid();
  acquire(&g.started);
  (*g.kernel)();
  release(&g.ended);
  Thread& me = current();
  if (me.copies != 0) refuse(Where::current(), "a thread ended before its asynchronous copies did");
  me.state = State::done;
  g.num_live--;
}

void wait(State state, const char* operation, Where where) {
  Thread& me = current();
  me.state = state;
  me.operation = operation;
  me.where = where;
  me.fiber->leave();
}

bool same_place(const Thread& a, const Thread& b) {
  const char *one = a.where.file_name(), *other = b.where.file_name();
  return a.mask == b.mask && a.complete == b.complete && a.where.line() == b.where.line() &&
         (one == other || std::strcmp(one, other) == 0);
}

// Lets one group of lanes of a warp go on, if all that it waits for are there.
bool complete_in_warp(unsigned warp) {
  Grid& g = grid();
  const unsigned base = warp * kWarp, lanes = std::min(kWarp, g.num_threads - base);
  for (unsigned l = 0; l < lanes; l++) {
    Thread& first = g.threads[base + l];
    if (first.state != State::in_warp) continue;
    bool all = true;
    for (unsigned k = 0; k < kWarp; k++) {
      if (!(first.mask >> k & 1)) continue;
      const bool gone = k >= lanes || g.threads[base + k].state == State::done;
      if (gone) {
        g.current = base + l;
        refuse(first.where, "%s names lane %u, which has ended", first.operation, k);
      }
      const Thread& other = g.threads[base + k];
      all &= other.state == State::in_warp && same_place(first, other);
    }
    if (!all) continue;
    void* operands[kWarp] = {};
    void* released[kWarp] = {};
    const unsigned mask = first.mask;
    for (unsigned k = 0; k < lanes; k++) {
      if (!(mask >> k & 1)) continue;
      Thread& t = g.threads[base + k];
      operands[k] = t.operands;
      released[k] = &t.released[t.warp_barriers & 1];
    }
    const bool orders = first.complete == nullptr;  // as only __syncwarp does
    if (!orders) first.complete(operands);
    for (unsigned k = 0; k < lanes; k++) {
      if (!(mask >> k & 1)) continue;
      Thread& t = g.threads[base + k];
      if (orders) std::copy(released, released + kWarp, t.seen);
      t.state = State::runnable;
      g.ready.push_back(base + k);
    }
    return true;
  }
  return false;
}

// Called when nobody can run: lets one warp go on, or else all threads through the barrier.
void release_waiting() {
  Grid& g = grid();
  const unsigned warps = (g.num_threads + kWarp - 1) / kWarp;
  const unsigned start = g.schedule.order == Schedule::Order::shuffled ? static_cast<unsigned>(random_number() % warps) : 0;
  for (unsigned i = 0; i < warps; i++) {
    unsigned warp = (start + i) % warps;
    if (g.schedule.order == Schedule::Order::descending) warp = warps - 1 - i;
    if (complete_in_warp(warp)) return;
  }
  const Thread* first = nullptr;
  for (unsigned i = 0; i < g.num_threads; i++) {
    const Thread& t = g.threads[i];
    if (t.state == State::done) continue;
    if (t.state != State::at_barrier) refuse_deadlock("deadlock: some lanes of a warp never come, or come elsewhere");
    if (first != nullptr && !same_place(*first, t)) refuse_deadlock("__syncthreads at different places");
    first = &t;
  }
  for (unsigned i = 0; i < g.num_threads; i++) {
    if (g.threads[i].state != State::at_barrier) continue;
    g.threads[i].state = State::runnable;
    g.ready.push_back(i);
  }
}

void put_in_order(std::vector<unsigned>& list) {
  switch (grid().schedule.order) {
    case Schedule::Order::ascending:
      std::sort(list.begin(), list.end());
      break;
    case Schedule::Order::descending:
      std::sort(list.rbegin(), list.rend());
      break;
    case Schedule::Order::shuffled:
      for (size_t i = list.size(); i > 1; i--) std::swap(list[i - 1], list[random_number() % i]);
  }
}

void run_block(unsigned rotation) {
  Grid& g = grid();
  const dim3 shape = g.block_shape;
  g.ready.clear();
  g.num_live = g.num_threads;
  for (unsigned i = 0; i < g.num_threads; i++) {
    Thread& t = g.threads[i];
    // Another fiber in each block: what blocks do to each other's memory are races then, also of threads of
    // equal number.
    t.fiber = g.fibers[(i + rotation) % g.num_threads].get();
    t.state = State::runnable;
    t.index = uint3{i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
    t.copies = 0;
    char name[64];
    std::snprintf(name, sizeof name, "thread %u of block %u,%u,%u", i, g.block.x, g.block.y, g.block.z);
    t.fiber->name(name);
    t.fiber->start();
    g.ready.push_back(i);
  }
  release(&g.started);
  std::vector<unsigned> turn;
  while (g.num_live > 0) {
    if (g.ready.empty()) release_waiting();
    turn.swap(g.ready);
    g.ready.clear();
    put_in_order(turn);
    for (unsigned i : turn) {
      g.current = i;
      g.threads[i].fiber->enter();
      if (g.threads[i].state == State::runnable) g.ready.push_back(i);
    }
  }
}

// Fresh for each block, of the exact size, full of what is NaN in every float type.
void give_shared_memory(size_t bytes) {
  Unobserved unobserved;
  Grid& g = grid();
  std::free(g.shared);
  g.shared = nullptr;
  if (bytes > 0 && posix_memalign(reinterpret_cast<void**>(&g.shared), 128, bytes) != 0) std::abort();
  if (bytes > 0) std::memset(g.shared, 0xFF, bytes);
  g.shared_bytes = bytes;
}

}  // namespace

void set_schedule(const Schedule& schedule) {
  grid().schedule = schedule;
  grid().random = schedule.seed * 0x9E3779B97F4A7C15u | 1;
}

const Schedule& schedule() { return grid().schedule; }

uint64_t random_number() {  // xorshift*
  uint64_t& x = grid().random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return (x * 0x2545F4914F6CDD1Du) >> 16;
}

void launch(dim3 shape, dim3 block, size_t shared, const std::function<void()>& kernel, Where where) {
  Grid& g = grid();
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t blocks = uint64_t{shape.x} * shape.y * shape.z;
  if (g.running) refuse(where, "a kernel launches a kernel");
  if (threads < 1 || threads > kMaxThreads || block.z > 64)
    refuse(where, "a block has 1 to 1024 threads, not %u x %u x %u", block.x, block.y, block.z);
  if (blocks < 1 || shape.x > 0x7FFFFFFF || shape.y > 65535 || shape.z > 65535)
    refuse(where, "a grid has 1 to 2^31 - 1 x 65535 x 65535 blocks, not %u x %u x %u", shape.x, shape.y, shape.z);
  if (shared > kMaxSharedBytes) refuse(where, "a block has up to 227 KiB of shared memory, not %zu bytes", shared);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(describe_at_death);
  while (g.fibers.size() < threads) g.fibers.push_back(std::make_unique<Fiber>(run_thread));
  g.num_threads = static_cast<unsigned>(threads);
  g.grid_shape = shape;
  g.block_shape = block;
  g.kernel = &kernel;
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; i++) order[i] = i;
  put_in_order(order);
  g.running = true;
  for (unsigned i = 0; i < blocks; i++) {
    g.block = uint3{order[i] % shape.x, order[i] / shape.x % shape.y, order[i] / (shape.x * shape.y)};
    give_shared_memory(shared);
    run_block(i);
  }
  g.running = false;
  give_shared_memory(0);
  acquire(&g.ended);
}

uint3 thread_index() { return current().index; }
uint3 block_index() { return grid().block; }
dim3 block_shape() { return grid().block_shape; }
dim3 grid_shape() { return grid().grid_shape; }
unsigned lane() { return grid().current % kWarp; }
unsigned thread_number() { return grid().current; }
char* shared_memory() { return grid().shared; }
size_t shared_bytes() { return grid().shared_bytes; }
int& copies_in_flight() { return current().copies; }

void refuse(Where where, const char* format, ...) {
  std::fprintf(stderr, "emulator: %s:%u: ", where.file_name(), where.line());
  if (grid().running) {
    describe(current());
    std::fputs(": ", stderr);
  }
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::_Exit(70);
}

void block_barrier(Where where) {
  char* place = &grid().barrier[current().block_barriers++ & 1];
  current().mask = 0;
  current().complete = nullptr;
  release(place);
  wait(State::at_barrier, "__syncthreads", where);
  acquire(place);
}

void together(unsigned mask, const char* operation, Complete complete, void* operands, Where where) {
  Thread& me = current();
  if (!(mask >> lane() & 1)) refuse(where, "%s with a mask, %08x, that does not have its own lane", operation, mask);
  me.mask = mask;
  me.complete = complete;
  me.operands = operands;
  wait(State::in_warp, operation, where);
}

void warp_barrier(unsigned mask, Where where) {
  release(&current().released[current().warp_barriers & 1]);
  together(mask, "__syncwarp", nullptr, nullptr, where);
  for (unsigned k = 0; k < kWarp; k++)
    if (mask >> k & 1) acquire(current().seen[k]);
  current().warp_barriers++;
}

void pause() {
  if (grid().schedule.order == Schedule::Order::shuffled && random_number() % 2 == 0)
    current().fiber->leave();
}

}  // namespace emulator

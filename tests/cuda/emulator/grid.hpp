// Launches: blocks one after another, the threads of a block as fibers, in an order that a seed chooses.
#pragma once
#include <vector_types.h>  // NVIDIA's own: uint3, dim3

#include <cstdint>
#include <functional>
#include <source_location>

namespace emulator {

using Where = std::source_location;

// Which of the runs that CUDA allows is taken. Threads run until they wait for others; a warp that can go on
// does so before the next is looked at, so `ascending` lets warp 0 run ahead up to the barrier, `descending`
// the last one, and `shuffled` a random one at each step. Asynchronous copies land as late as they may
// (when waited for), as early as they may (at once), or either.
struct Schedule {
  enum class Order { ascending, descending, shuffled };
  enum class Landing { late, early, either };
  Order order = Order::ascending;
  Landing landing = Landing::late;
  uint64_t seed = 1;
};
void set_schedule(const Schedule& schedule);
const Schedule& schedule();
uint64_t random_number();

// Runs a kernel, given as a call of it with its arguments, to its end.
void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel,
            Where where = Where::current());

// What the running thread is.
uint3 thread_index();
uint3 block_index();
dim3 block_shape();
dim3 grid_shape();
unsigned lane();
unsigned thread_number();  // in its block
char* shared_memory();
size_t shared_bytes();

// Ends the program; says what the thread did that a kernel may not do, where, and which thread it was.
[[noreturn, gnu::format(printf, 2, 3)]] void refuse(Where where, const char* format, ...);

// __syncthreads: all threads of the block that have not ended, at one place of the source.
void block_barrier(Where where);

// What the lanes of `mask` do together: each brings its own operands, and when all are there, at one place of
// the source, `complete` works on them; nullptr for a lane that takes no part. Does not order memory.
using Complete = void (*)(void* const operands[32]);
void together(unsigned mask, const char* operation, Complete complete, void* operands, Where where);

// __syncwarp: the same, and orders memory.
void warp_barrier(unsigned mask, Where where);

// A place where another thread may come first.
void pause();

// Asynchronous copies that the running thread has started and not waited for; a thread must not end with any.
int& copies_in_flight();

}  // namespace emulator

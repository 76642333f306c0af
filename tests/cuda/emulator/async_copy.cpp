#include "async_copy.hpp"

#include <deque>
#include <vector>

namespace emulator {
namespace {

struct Copies {
  std::deque<std::vector<Copy>> groups{1};  // the last one is open
};

Copies& mine() {
  static std::vector<Copies> of_threads(1024);
  return of_threads[thread_number()];
}

}  // namespace

bool start_copy(const Copy& copy, Where where) {
  const auto [to, from, bytes, zeros] = copy;
  if (bytes != 4 && bytes != 8 && bytes != 16) refuse(where, "an asynchronous copy is of 4, 8 or 16 bytes, not %zu", bytes);
  if (zeros > bytes) refuse(where, "an asynchronous copy of %zu bytes cannot fill %zu with zeros", bytes, zeros);
  const auto target = reinterpret_cast<uintptr_t>(to), shared = reinterpret_cast<uintptr_t>(shared_memory());
  if (target % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0)
    refuse(where, "an asynchronous copy of %zu bytes is from %p to %p, which are no multiples of it", bytes, from, to);
  if (target < shared || target + bytes > shared + shared_bytes())
    refuse(where, "an asynchronous copy goes to byte %td of the block's %zu of shared memory", target - shared,
           shared_bytes());
  const auto landing = schedule().landing;
  if (landing == Schedule::Landing::early || (landing == Schedule::Landing::either && random_number() % 2 == 0))
    return true;
  mine().groups.back().push_back(copy);
  copies_in_flight()++;
  return false;
}

void commit_copies() { mine().groups.emplace_back(); }

bool next_copy(size_t but_the_last, Copy* copy) {
  auto& groups = mine().groups;
  while (groups.size() - 1 > but_the_last) {
    auto& oldest = groups.front();
    if (!oldest.empty()) {
      *copy = oldest.back();
      oldest.pop_back();
      copies_in_flight()--;
      return true;
    }
    groups.pop_front();
  }
  return false;
}

}  // namespace emulator

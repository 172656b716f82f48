// Which level of instructions and how many threads the kernels of this process use.
#pragma once

#include <string>
#include <vector>

#include "table.hpp"

namespace mtplx {

// The table in force: the best that the processor has, unless `choose` took another.
const Kernels& kernels();

// The levels that this build and this processor have, best first; "portable" is always among them.
std::vector<std::string> levels();

// Takes a level by name from now on. Throws std::invalid_argument, naming the ones there are.
void choose(const std::string& name);

// Sets the number of threads, at least 1. Helpers are only ever added: with fewer threads some are left waiting.
// Throws std::invalid_argument and std::system_error.
void set_threads(int threads);
int threads();

// The pool behind `share` and `share_ranges`.
void run_on_pool(int count, void (*work)(const void*, int, int), const void* context);

// Calls work(first, last) for ranges that make up [0, count), on the pool; returns when all are done.
template <class Work>
void share_ranges(int count, const Work& work) {
  run_on_pool(
      count, [](const void* self, int first, int last) { (*static_cast<const Work*>(self))(first, last); }, &work);
}

// Calls work(i) once for each i in [0, count) on the pool; returns when all are done.
template <class Work>
void share(int count, const Work& work) {
  share_ranges(count, [&](int first, int last) {
    for (int i = first; i < last; ++i) work(i);
  });
}

}  // namespace mtplx

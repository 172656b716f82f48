#include "dispatch.hpp"

#include <atomic>
#include <stdexcept>

#include "pool.hpp"

namespace mtplx {

namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
  for (const auto find : {avx512vnni_kernels, avx512_kernels, avx2_kernels, neon_kernels, portable_kernels}) {
    if (const Kernels* table = find(); table != nullptr) found.push_back(table);
  }
  return found;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{available().front()};
  return table;
}

// Never destroyed: the helpers live as long as the process.
struct Threads {
  Pool pool{30000};  // 0.7 ms on x86: what Python does between two forwards takes less
  std::atomic<int> count{1};
  int helpers = 0;
};

Threads& state() {
  static Threads* instance = new Threads;
  return *instance;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_acquire); }

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const Kernels* table : available()) names.emplace_back(table->name);
  return names;
}

void choose(const std::string& name) {
  std::string known;
  for (const Kernels* table : available()) {
    if (name == table->name) {
      current().store(table, std::memory_order_release);
      return;
    }
    known += known.empty() ? table->name : std::string(", ") + table->name;
  }
  throw std::invalid_argument("no kernels for '" + name + "' on this machine: it has " + known);
}

void set_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("the number of threads must be positive");
  Threads& s = state();
  if (threads - 1 > s.helpers) {
    s.pool.start(threads - 1 - s.helpers);
    s.helpers = threads - 1;
  }
  s.count = threads;
}

int threads() { return state().count; }

void run_on_pool(int count, void (*work)(const void*, int, int), const void* context) {
  Threads& s = state();
  if (count <= 1 || s.count.load(std::memory_order_relaxed) == 1) {
    if (count > 0) work(context, 0, count);
  } else {
    s.pool.run(count, work, context, 2 * s.count.load(std::memory_order_relaxed));
  }
}

}  // namespace mtplx

// Shares the tiles of one product between the calling thread and a few helpers.
//
// Tiles are claimed as threads come to them, so a helper that the scheduler has put aside takes none and the caller does its share.
// That is the point: OpenBLAS's own threads get fixed shares and spin for them, and on cores that another process uses
// one product then waits whole time slices for a thread that is not running.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace mtplx {

// Unnamed, so that nothing of it is exported: std::thread makes a virtual table for the function it starts, with default
// visibility, and a process that opens one library globally would run that library's helpers on another one's pool.
// To be included by one source file of a library.
namespace {

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // spins: how often a helper looks for work before it sleeps, of the order of 25 ns each on x86. To wake one takes longer than a
  // small product, so it should not sleep between two parts of a decode.
  explicit Pool(int spins) : spins_(spins) {}

  // Starts `helpers` threads, which live as long as the process. Throws std::system_error if one cannot be started.
  void start(int helpers) {
    for (int i = 0; i < helpers; ++i) std::thread([this] { help(); }).detach();
  }

  // Calls work(context, first, last) for ranges that make up [0, tiles), on any of the threads; returns when all are
  // done. If another caller holds the helpers, this thread does all tiles alone. With share > 0 a claim takes the first
  // 1/share of the tiles that are left, one at least: neighbours stay together, and the last claims are small.
  void run(int tiles, void (*work)(const void*, int, int), const void* context, int share = 0) {
    std::unique_lock<std::mutex> guard(busy_, std::try_to_lock);
    if (!guard.owns_lock()) {
      work(context, 0, tiles);
      return;
    }
    work_ = work;
    context_ = context;
    tiles_ = tiles;
    share_.store(share, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const std::uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(epoch << 32 | static_cast<std::uint32_t>(tiles), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) ticket_.notify_all();
    while (claim_one()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != tiles; ++spins) {
      if (spins < kSpinsBeforeYield) {
        pause_cpu();
      } else {
        std::this_thread::yield();  // the helper that holds the last tile may need this very core
      }
    }
  }

 private:
  static constexpr int kSpinsBeforeYield = 1000;

  // The ticket holds an epoch and the number of tiles not claimed yet. A claim that succeeds keeps the caller of that
  // epoch in run(), so work_, context_ and tiles_ are valid from then until done_ is raised, and only then are they read.
  bool claim_one() {
    std::uint64_t seen = ticket_.load(std::memory_order_acquire);
    int left, taken;
    do {
      left = static_cast<int>(static_cast<std::uint32_t>(seen));
      if (left == 0) return false;
      // Read while tiles are left. Should the epoch change meanwhile, the exchange fails and the value is not used.
      const int share = share_.load(std::memory_order_relaxed);
      taken = share > 0 && left > share ? left / share : 1;
    } while (!ticket_.compare_exchange_weak(seen, seen - taken, std::memory_order_acq_rel, std::memory_order_acquire));
    const int first = tiles_ - left;
    work_(context_, first, first + taken);
    done_.fetch_add(taken, std::memory_order_release);
    return true;
  }

  void help() {
    while (true) {
      if (claim_one()) continue;
      const std::uint64_t seen = ticket_.load(std::memory_order_acquire);
      if (static_cast<std::uint32_t>(seen) != 0) continue;
      bool changed = false;
      for (int spins = 0; spins < spins_ && !changed; ++spins) {
        pause_cpu();
        changed = ticket_.load(std::memory_order_relaxed) != seen;
      }
      if (changed) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      ticket_.wait(seen, std::memory_order_seq_cst);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  const int spins_;
  std::mutex busy_;
  // On one cache line, which a helper that sees a new ticket then has: each line costs it about 0.1 us.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  void (*work_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  int tiles_ = 0;
  std::atomic<int> share_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace
}  // namespace mtplx

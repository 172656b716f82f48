// One product phase: rows come from a source, are prepared once by each thread, and go to a sink.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>

#include "dispatch.hpp"
#include "packed.hpp"

namespace mtplx {

// Memory of one thread, kept between phases. Never smaller than asked for; contents are not kept.
class Scratch {
 public:
  float* take(std::size_t floats) {
    if (size_ < floats) {
      memory_.reset(new float[floats]);
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<float[]> memory_;
  std::size_t size_ = 0;
};

// The rows of one block in the form that the products of one format read.
struct Prepared {
  std::uint64_t phase = 0;  // 0: nothing
  int block = -1, group = 0;
  Format format{};
  float *scaled = nullptr, *sums = nullptr;
  Scratch memory, raw;
};

inline Prepared& prepared() {
  thread_local Prepared instance;
  return instance;
}

inline std::uint64_t next_phase() {
  static std::atomic<std::uint64_t> count{0};
  return count.fetch_add(1, std::memory_order_relaxed) + 1;
}

// source(row, float* k numbers) gives a row of activations.
template <class Source>
const Prepared& prepare_block(const MatrixView& m, std::uint64_t phase, int block, int rows, const Source& source) {
  Prepared& p = prepared();
  const int group = has_scales(m.format) ? m.group : 0;
  if (p.phase == phase && p.block == block && p.format == m.format && p.group == group) return p;
  const std::size_t scaled = static_cast<std::size_t>(kRowBlock) * m.padded;
  p.scaled = p.memory.take(scaled + static_cast<std::size_t>(kRowBlock) * m.groups);
  p.sums = p.scaled + scaled;
  float* raw = p.raw.take(m.k);
  const int first = block * kRowBlock, count = std::min(rows - first, kRowBlock);
  for (int r = 0; r < count; ++r) {
    source(first + r, raw);
    kernels().prepare(m, raw, p.scaled + static_cast<std::size_t>(r) * m.padded,
                      p.sums + static_cast<std::size_t>(r) * m.groups);
  }
  p.phase = phase;
  p.block = block;
  p.format = m.format;
  p.group = group;
  return p;
}

// Runs matrices of the same number of inputs over the same rows. sink(matrix index, row, first column, count, values) is
// called once for each stretch of outputs, on any thread. Half panels are shared out where whole ones would be too few;
// two halves that come to one thread are done as a whole, which one row is faster with.
template <class Source, class Sink>
void products(std::initializer_list<const Packed*> matrices, int rows, const Source& source, const Sink& sink) {
  int panels = 0;
  for (const Packed* m : matrices) panels += m->view().panels;
  const int cuts = panels < 16 * threads() ? 2 : 1;
  const int width = kPanel / cuts;
  const int units = panels * cuts;
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  const std::uint64_t phase = next_phase();
  // `count` units of one panel.
  const auto work = [&](int tile, int count) {
    const int block = tile / units;
    int unit = tile % units, index = 0;
    const Packed* const* matrix = matrices.begin();
    while (unit >= (*matrix)->view().panels * cuts) {
      unit -= (*matrix)->view().panels * cuts;
      ++matrix;
      ++index;
    }
    const MatrixView& m = (*matrix)->view();
    const int panel = unit / cuts, first = unit % cuts * width;
    const int outputs = std::min(m.n - panel * kPanel - first, count * width);
    if (outputs <= 0) return;
    const Prepared& p = prepare_block(m, phase, block, rows, source);
    alignas(64) float out[kRowBlock * kPanel];
    const int top = block * kRowBlock;
    const int height = std::min(rows - top, kRowBlock);
    kernels().product(m, panel, first, first + count * width, height, p.scaled, p.sums, out);
    for (int r = 0; r < height; ++r) {
      sink(index, top + r, panel * kPanel + first, outputs, out + r * kPanel + first);
    }
  };
  share_ranges(units * blocks, [&](int first, int last) {
    while (first < last) {
      const int count = cuts == 2 && first % 2 == 0 && first + 1 < last ? 2 : 1;
      work(first, count);
      first += count;
    }
  });
}

}  // namespace mtplx

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
template <class T>
class Scratch {
 public:
  T* take(std::size_t count) {
    if (size_ < count) {
      memory_.reset(new T[count]);
      size_ = count;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<T[]> memory_;
  std::size_t size_ = 0;
};

// The rows of one block in the form that the products of one format read.
struct Prepared {
  std::uint64_t phase = 0;  // 0: nothing
  int block = -1, group = 0;
  Format format{};
  std::uint32_t* inputs = nullptr;
  float* sums = nullptr;
  Scratch<std::uint32_t> words;
  Scratch<float> numbers, raw;
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
  const std::size_t words = words_of_inputs(m);
  p.inputs = p.words.take(kRowBlock * words);
  p.sums = p.numbers.take(static_cast<std::size_t>(kRowBlock) * 2 * m.groups);
  float* raw = p.raw.take(m.k);
  const int top = block * kRowBlock, height = std::min(rows - top, kRowBlock);
  for (int c = 0; c < chunks_of(height); ++c) {
    const RowChunk chunk = chunk_of(height, c);
    for (int r = 0; r < chunk.size; ++r) {
      source(top + chunk.first + r, raw);
      kernels().prepare(m, raw, chunk.size, p.inputs + chunk.first * words + r,
                        p.sums + static_cast<std::size_t>(chunk.first) * 2 * m.groups + 2 * r);
    }
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
    kernels().product(m, panel, first, first + count * width, height, p.inputs, p.sums, out);
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

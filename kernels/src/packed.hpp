// A matrix of weights in the kernels' layout (table.hpp), with the memory that it lies in.
#pragma once

#include <memory>

#include "table.hpp"

namespace mtplx {

// Where a matrix is taken from: rows of words or numbers as MLX has them, row after row.
struct Source {
  Format format;
  int n, k;
  const void* weights;               // kQ4, kQ8: uint32 words, first element lowest; else numbers of the format
  int group = 0;                     // quantised formats: 32, 64 or 128 inputs
  ScaleType scale_type = ScaleType::kFloat32;
  const void* scales = nullptr;      // (n, k / group)
  const void* biases = nullptr;
};

class Packed {
 public:
  // Copies and repacks on the pool. Throws std::invalid_argument for sizes that do not fit, or a float16 that is not
  // finite (the kernels widen it without a special case).
  explicit Packed(const Source& source);
  const MatrixView& view() const { return view_; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.panels) * (kPanel / kStrip) * view_.strip_bytes; }

 private:
  MatrixView view_{};
  std::shared_ptr<void> memory_;  // the arena's block, shared with its neighbours
};

}  // namespace mtplx

// The attention of one layer: rotation, cache rows, chunks of scores, and their sum.
#pragma once

#include <cstddef>
#include <vector>

#include "layers.hpp"

namespace mtplx {

// Up to this many rows of a sequence the chunks of its context are shared out, above it the rows are.
constexpr int kFewRows = 8;

// Cosines and sines of the positions of a sequence's rows, in double precision before they are rounded.
class Angles {
 public:
  Angles(const std::vector<double>& frequency, int offset, int rows);
  bool serves(const std::vector<double>& frequency) const { return frequency == frequency_; }
  void rotate(float* head, int row) const;

 private:
  std::vector<double> frequency_;
  std::vector<float> cosine_, sine_;
};

// What the phases of a layer hand to one another.
struct Workspace {
  std::vector<float> qkv, inner, partial;
  void fit(const Layer& layer, const Batch& batch);
};

// Attends on construction: the cache then has the new rows, and `row` gives the result. Everywhere below, a row is one
// of the batch, a kv head one of the layer's.
class Attention {
 public:
  Attention(const Layer& layer, const float* qkv, const Batch& batch, const CacheView& cache, const Angles& angles,
            std::vector<float>& partial);

  // Writes (heads * dim) numbers of row r. Callable from any thread.
  void row(int r, float* out) const;

 private:
  void store(int kv, int first, int last) const;
  void chunk(int kv, int first_row, int last_row, int chunk, float* const* out) const;
  void few() const;
  void many() const;
  int first_chunk(int row) const;
  int last_chunk(int row) const { return position(row) / kChunk; }
  int position(int row) const { return batch_.offset + row % batch_.rows; }
  // Where the cache of a row's sequence and a kv head begins.
  std::size_t place(int kv, int row) const {
    return (static_cast<std::size_t>(row / batch_.rows) * layer_.kv_heads + kv) * cache_.capacity * layer_.dim;
  }
  float* part(int row, int head, int chunk) const {
    return partial_ + ((static_cast<std::size_t>(row) * layer_.heads + head) * chunks_ + chunk) * (2 + layer_.dim);
  }

  const Layer& layer_;
  const float* qkv_;
  const Batch batch_;
  const CacheView& cache_;
  const Angles& angles_;
  float* partial_;
  int base_, chunks_;  // the first chunk that any row sees, and how many are kept a row and head
};

}  // namespace mtplx

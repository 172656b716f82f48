#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "dispatch.hpp"
#include "phases.hpp"

namespace mtplx {
namespace {

Scratch<float>& query_scratch() {
  thread_local Scratch<float> scratch;
  return scratch;
}

int chunks_kept(const Layer& layer, const Batch& batch) {
  if (batch.rows > kFewRows) return 1;
  const int earliest = layer.window > 0 ? std::max(0, batch.offset - layer.window + 1) : 0;
  return (batch.offset + batch.rows - 1) / kChunk - earliest / kChunk + 1;
}

}  // namespace

Angles::Angles(const std::vector<double>& frequency, int offset, int rows)
    : frequency_(frequency), cosine_(frequency.size() * rows), sine_(frequency.size() * rows) {
  for (int r = 0; r < rows; ++r) {
    for (std::size_t i = 0; i < frequency.size(); ++i) {
      const double angle = static_cast<double>(offset + r) * frequency[i];
      cosine_[r * frequency.size() + i] = static_cast<float>(std::cos(angle));
      sine_[r * frequency.size() + i] = static_cast<float>(std::sin(angle));
    }
  }
}

void Angles::rotate(float* head, int row) const {
  const std::size_t half = frequency_.size();
  kernels().rotate(head, cosine_.data() + row * half, sine_.data() + row * half, static_cast<int>(half));
}

void Workspace::fit(const Layer& l, const Batch& batch) {
  const std::size_t n = batch.size();
  const auto grow = [](std::vector<float>& v, std::size_t size) {
    if (v.size() < size) v.resize(size);
  };
  grow(qkv, n * (l.heads + 2 * l.kv_heads) * l.dim);
  grow(inner, n * l.inner());
  grow(partial, n * l.heads * (2 + l.dim) * chunks_kept(l, batch));
}

Attention::Attention(const Layer& layer, const float* qkv, const Batch& batch, const CacheView& cache,
                     const Angles& angles, std::vector<float>& partial)
    : layer_(layer),
      qkv_(qkv),
      batch_(batch),
      cache_(cache),
      angles_(angles),
      partial_(partial.data()),
      base_(batch.rows > kFewRows ? 0 : first_chunk(0)),
      chunks_(chunks_kept(layer, batch)) {
  if (batch.rows > kFewRows) {
    many();
  } else {
    few();
  }
}

int Attention::first_chunk(int row) const {
  return layer_.window > 0 ? std::max(0, position(row) - layer_.window + 1) / kChunk : 0;
}

// Puts keys and values of the rows [first, last) of one head into the cache.
void Attention::store(int kv, int first, int last) const {
  const int dim = layer_.dim, width = (layer_.heads + 2 * layer_.kv_heads) * dim;
  for (int r = first; r < last; ++r) {
    const float* key = qkv_ + static_cast<std::size_t>(r) * width + (layer_.heads + kv) * dim;
    const std::size_t at = place(kv, r) + static_cast<std::size_t>(position(r)) * dim;
    float* to = cache_.keys + at;
    if (layer_.k_norm.empty()) {
      std::memcpy(to, key, sizeof(float) * dim);
    } else {
      kernels().rms_norm(key, layer_.k_norm.data(), layer_.eps, dim, to);
    }
    angles_.rotate(to, r % batch_.rows);
    std::memcpy(cache_.values + at, key + layer_.kv_heads * dim, sizeof(float) * dim);
  }
}

// The scores of rows [first_row, last_row) of one sequence and the query heads of one kv head in one chunk; out: row by row, head by head.
void Attention::chunk(int kv, int first_row, int last_row, int chunk, float* const* out) const {
  const int dim = layer_.dim, heads = layer_.heads / layer_.kv_heads;
  const int width = (layer_.heads + 2 * layer_.kv_heads) * dim;
  const int count = (last_row - first_row) * heads;
  float* q = query_scratch().take(static_cast<std::size_t>(kQueries) * dim);
  const std::size_t cache = place(kv, first_row);
  for (int at = 0; at < count; at += kQueries) {
    const int n = std::min(kQueries, count - at);
    int limit[kQueries] = {};
    for (int i = 0; i < n; ++i) {
      const int row = first_row + (at + i) / heads, head = kv * heads + (at + i) % heads;
      const float* from = qkv_ + static_cast<std::size_t>(row) * width + head * dim;
      float* to = q + i * dim;
      if (layer_.q_norm.empty()) {
        std::memcpy(to, from, sizeof(float) * dim);
      } else {
        kernels().rms_norm(from, layer_.q_norm.data(), layer_.eps, dim, to);
      }
      angles_.rotate(to, row % batch_.rows);
      for (int d = 0; d < dim; ++d) to[d] *= layer_.scale;
      limit[i] = std::clamp(position(row) + 1 - chunk * kChunk, 0, kChunk);
      const int earliest = layer_.window > 0 ? position(row) - layer_.window + 1 - chunk * kChunk : 0;
      if (layer_.window > 0 && earliest > 0) {  // where the window cuts the chunk, the query goes alone
        const int start = std::min(earliest, limit[i]), rest = limit[i] - start;
        const std::size_t from_start = cache + (static_cast<std::size_t>(chunk) * kChunk + start) * dim;
        kernels().attend(to, 1, &rest, cache_.keys + from_start, cache_.values + from_start, dim, out + at + i);
        limit[i] = -1;
      }
    }
    const std::size_t start = cache + static_cast<std::size_t>(chunk) * kChunk * dim;
    for (int i = 0; i < n;) {
      if (limit[i] < 0) {
        ++i;
        continue;
      }
      int j = i;
      while (j < n && limit[j] >= 0) ++j;
      kernels().attend(q + i * dim, j - i, limit + i, cache_.keys + start, cache_.values + start, dim, out + at + i);
      i = j;
    }
  }
}

// A tile is one chunk of one kv head of a sequence; the one that holds a new position writes it.
void Attention::few() const {
  const int heads = layer_.heads / layer_.kv_heads;
  const int rows = batch_.rows, tiles = layer_.kv_heads * chunks_;
  share(tiles * batch_.sequences, [&](int tile) {
    const int kv = tile % layer_.kv_heads, index = tile % tiles / layer_.kv_heads, at = base_ + index;
    const int first = tile / tiles * rows, start = at * kChunk - batch_.offset;
    store(kv, first + std::clamp(start, 0, rows), first + std::clamp(start + kChunk, 0, rows));
    std::vector<float*> out;
    out.reserve(static_cast<std::size_t>(rows) * heads);
    for (int r = first; r < first + rows; ++r) {
      for (int h = 0; h < heads; ++h) out.push_back(part(r, kv * heads + h, index));
    }
    chunk(kv, first, first + rows, at, out.data());
  });
}

// A tile is a few rows of one kv head of a sequence, over all chunks in order.
void Attention::many() const {
  constexpr int kRows = 16;
  const int heads = layer_.heads / layer_.kv_heads, dim = layer_.dim;
  const int blocks = (batch_.rows + kRows - 1) / kRows, tiles = layer_.kv_heads * blocks;
  // The first row of a tile, and the one after its last.
  const auto rows_of = [&](int tile) {
    const int first = tile / tiles * batch_.rows, at = tile % tiles / layer_.kv_heads * kRows;
    return std::pair(first + at, first + std::min(batch_.rows, at + kRows));
  };
  share(tiles * batch_.sequences, [&](int tile) {
    const auto [first, last] = rows_of(tile);
    store(tile % layer_.kv_heads, first, last);
  });
  share(tiles * batch_.sequences, [&](int tile) {
    const auto [first, last] = rows_of(tile);
    const int kv = tile % layer_.kv_heads, count = (last - first) * heads;
    std::vector<float> memory(static_cast<std::size_t>(count) * (2 + dim));
    std::vector<float*> out(count);
    for (int i = 0; i < count; ++i) {
      out[i] = memory.data() + static_cast<std::size_t>(i) * (2 + dim);
      float* sum = part(first + i / heads, kv * heads + i % heads, 0);
      std::fill(sum, sum + 2 + dim, 0.0f);
    }
    for (int at = first_chunk(first); at <= last_chunk(last - 1); ++at) {
      chunk(kv, first, last, at, out.data());
      for (int i = 0; i < count; ++i) {
        kernels().merge(part(first + i / heads, kv * heads + i % heads, 0), out[i], dim);
      }
    }
  });
}

void Attention::row(int r, float* out) const {
  const int dim = layer_.dim;
  std::vector<float> sum(2 + dim);
  for (int head = 0; head < layer_.heads; ++head) {
    if (batch_.rows > kFewRows) {
      kernels().finish(part(r, head, 0), dim, out + head * dim);
      continue;
    }
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int c = first_chunk(r); c <= last_chunk(r); ++c) kernels().merge(sum.data(), part(r, head, c - base_), dim);
    kernels().finish(sum.data(), dim, out + head * dim);
  }
}

}  // namespace mtplx

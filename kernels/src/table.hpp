// What one level of instructions offers to the layers: a table of plain functions, chosen once at run time.
//
// Each level is compiled in a file of its own, with its own flags, from kernels.inl. Nothing here has a body, so that no
// inline function compiled with the flags of one level can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtplx {

// Results are written in panels of this many outputs, weights lie in strips of this many, whatever the vector length.
constexpr int kPanel = 64;
constexpr int kStrip = 16;
// The most rows that one call of `product` takes.
constexpr int kRowBlock = 32;
// The most rows that go through a strip at once; see `chunk_of`.
constexpr int kRows = 6;
// Positions whose scores are summed up together; chunks lie at multiples of it, whatever the rows.
constexpr int kChunk = 64;
// The most queries that one call of `attend` takes. They share what it brings into the caches.
constexpr int kQueries = 12;

enum class Format : int { kQ4 = 0, kQ8 = 1, kBfloat16 = 2, kFloat16 = 3, kFloat32 = 4 };
enum class ScaleType : int { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

constexpr int elements_per_word(Format format) {
  return format == Format::kQ4 ? 8 : format == Format::kQ8 ? 4 : format == Format::kFloat32 ? 1 : 2;
}
// Quantised weights are multiplied two at a time.
constexpr int steps_per_word(Format format) {
  return format == Format::kQ4 ? 4 : format == Format::kFloat32 ? 1 : 2;
}
constexpr bool has_scales(Format format) { return format == Format::kQ4 || format == Format::kQ8; }
constexpr int bytes_of(ScaleType type) { return type == ScaleType::kFloat32 ? 4 : 2; }

// Rows go through the weights in chunks of nearly the same size.
struct RowChunk {
  int first, size;
};
constexpr int chunks_of(int rows) { return (rows + kRows - 1) / kRows; }
constexpr RowChunk chunk_of(int rows, int index) {
  const int count = chunks_of(rows), small = rows / count, large = rows % count;
  return {index * small + (index < large ? index : large), small + (index < large ? 1 : 0)};
}

// An (n, k) matrix of weights, repacked. Strips of 16 outputs follow one another, up to whole panels; in a strip, groups
// of `group` inputs; in a group, for each word of 8, 4, 2 or 1 inputs the 32-bit words of all 16 outputs, then (quantised
// formats) their 16 scales and 16 biases. So a product reads a strip from front to end, and a vector holds different
// outputs: the sum of an output runs over its inputs in one order, whatever the vector length and the number of rows.
struct MatrixView {
  const std::uint8_t* data;
  int n, k;        // outputs, inputs
  int padded;      // inputs, up to whole groups: the rest is zero
  int group;       // inputs that share a scale; without scales, inputs summed up before they are added to the rest
  int groups;
  int panels;
  Format format;
  ScaleType scale_type;
  std::size_t group_bytes, strip_bytes;
};

// Words that a prepared row takes.
constexpr std::size_t words_of_inputs(const MatrixView& m) {
  return static_cast<std::size_t>(m.padded / elements_per_word(m.format)) * steps_per_word(m.format);
}

struct Kernels {
  const char* name;

  // One row of a chunk of `rows` as `product` wants it; the rows of a chunk lie word by word beside one another. x: k
  // floats. inputs: `words_of_inputs` words. sums, for quantised formats: two for each group.
  // Quantised weights are multiplied by whole numbers of 16 bits: input i of a group is n_i * unit, with unit = the
  // group's largest magnitude / 32767 and n_i the nearest whole number. Sums of a group are exact then.
  void (*prepare)(const MatrixView& matrix, const float* x, int rows, std::uint32_t* inputs, float* sums);

  // out[r][j] = sum_i w[64 panel + j][i] x[r][i] for first <= j < last (multiples of 32); out has rows of 64.
  // 1 <= rows <= kRowBlock, in chunks as `chunk_of` has them.
  void (*product)(const MatrixView& matrix, int panel, int first, int last, int rows, const std::uint32_t* inputs,
                  const float* sums, float* out);

  // y = x / sqrt(mean(x^2) + eps) * weight, weight null for 1.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);

  // y = gate / (1 + exp(-gate)) * up.
  void (*swiglu)(const float* gate, const float* up, int n, float* y);

  // Rotates the pairs (x[i], x[i + half]) of one head by the angles whose cosines and sines are given; in place.
  void (*rotate)(float* x, const float* cosines, const float* sines, int half);

  // Attention of `queries` queries (rows of `dim`, scaled) over keys and values [0, limit[i]) of one chunk, limit <=
  // kChunk. Gives for each the largest score, the sum of exp(score - largest), and the sum of the values so weighted,
  // side by side: out[i] has 2 + dim floats. limit 0 gives -inf, 0, zeros.
  void (*attend)(const float* q, int queries, const int* limit, const float* keys, const float* values, int dim,
                 float* const* out);

  // Adds what `attend` gave for a later chunk to what it gave for the earlier ones. Both 2 + dim floats.
  void (*merge)(float* sum, const float* part, int dim);

  // out = values / sum of weights.
  void (*finish)(const float* sum, int dim, float* out);

  // Row `row` of the matrix, dequantised: k floats.
  void (*unpack_row)(const MatrixView& matrix, int row, float* out);
};

// nullptr where this build or this processor does not have the level.
const Kernels* portable_kernels();
const Kernels* neon_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512vnni_kernels();

}  // namespace mtplx

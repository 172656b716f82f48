// The kernels, written once over a vector type `V` that the including file defines in its own anonymous namespace.
//
// V: kLanes; Float, Int; load, hold (the same, in a register from here on), store, set, add, sub, mul, div, fma, max (the
// second operand where one is NaN), min, load_words, store_words, words, keep (a mask's bits), right, left,
// right_of_halves, dot (of pairs of 16 bits), nearest (whole number, ties to even), from_int, from_bits, bits, pow2,
// widen16 (kLanes float16), sum, sum4 (of four vectors), largest; kRegisters, how many vectors there are.
// No function of the standard library is called here: one instantiated with this file's flags might replace another's.

constexpr int W = V::kLanes;
constexpr int kAhead = 4;  // groups that are fetched before they are needed
constexpr int kMostGroup = 128;
constexpr float kMostWhole = 32767.0f;
constexpr float kSmallest = 1e-30f;  // a group with nothing larger counts as 0
constexpr float kZero = 0.0f;
using F = V::Float;

inline std::uint32_t word_at(const std::uint8_t* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, 4);
  return word;
}

inline float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// float16 -> float32, exact, subnormals and infinities too.
inline float float_of_half(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  const float size = float_of(rest << 13) * float_of(0x77800000u);  // 2^112 moves the exponent's bias
  return sign != 0 ? -size : size;
}

#include "kernels_products.inl"

#include "kernels_attention.inl"

constexpr Kernels kTable = {V::kName, prepare, product, rms_norm, swiglu,    rotate,
                            attend,   merge,   finish,  unpack_row};

// The two sweeps over a row, compiled once for each instruction set: law.cpp includes this file with MTPLX_LAW_NAME (a
// namespace), MTPLX_LAW_TARGET (a function attribute) and MTPLX_LAW_BYTES (a vector's) set. Neither calls anything: it
// would not be inlined.

namespace MTPLX_LAW_NAME {

constexpr std::size_t kLanes = MTPLX_LAW_BYTES / sizeof(float);
typedef float Floats __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef float HalfFloats __attribute__((vector_size(MTPLX_LAW_BYTES / 2)));
typedef std::int32_t Ints __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef std::uint32_t Bits __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef double Doubles __attribute__((vector_size(MTPLX_LAW_BYTES)));

// maxima[i] = the highest of 64 logits; `size` is a multiple of 64. Whether all logits are < +inf and none is NaN.
MTPLX_LAW_TARGET bool scan(const float* row, std::size_t size, float* maxima) {
  Ints good = Ints{} == 0;
  for (std::size_t i = 0; i < size; i += kBlock) {
    Floats m, x;
    std::memcpy(&m, row + i, sizeof m);
    good &= m < kInfinity;
    for (std::size_t j = kLanes; j < kBlock; j += kLanes) {
      std::memcpy(&x, row + i + j, sizeof x);
      good &= x < kInfinity;
      m = x > m ? x : m;
    }
    float highest = m[0];
    for (std::size_t lane = 1; lane < kLanes; ++lane) highest = m[lane] > highest ? m[lane] : highest;
    maxima[i / kBlock] = highest;
  }
  int all = -1;
  for (std::size_t lane = 0; lane < kLanes; ++lane) all &= good[lane];
  return all != 0;
}

// The sum of w = 2^((row - highest) * (scale + scale_low)), and the w if `weights` is not null; `size` is a multiple of
// 64, and w is 0 below 2^-126.
//
// 2^t = 2^n 2^r, n the nearest integer, |r| <= 1/2. Both uses of d * scale become fused multiply-adds where there are
// any: r is then exact but for its last bit, and has no error that grows with t. 2^r is interpolated in Chebyshev
// nodes, degree 6: relative error 3e-9.
MTPLX_LAW_TARGET double weigh(const float* row, std::size_t size, float highest, float scale, float scale_low,
                              float* weights) {
  const float least = kLeastPower / scale;
  Doubles low = {}, high = {};
  for (std::size_t i = 0; i < size; i += kLanes) {
    Floats x;
    std::memcpy(&x, row + i, sizeof x);
    const Floats d = x - highest;
    const Floats shifted = d * scale + kRounder;
    const Floats n = shifted - kRounder;
    Floats r = d * scale - n;
    r = d * scale_low + r;
    Floats p = r * kPower[6] + kPower[5];
    p = p * r + kPower[4];
    p = p * r + kPower[3];
    p = p * r + kPower[2];
    p = p * r + kPower[1];
    p = p * r + kPower[0];
    // n stands in the low bits of `shifted`: into the exponent with it.
    const Bits bits = (Bits)p + ((Bits)shifted << 23);
    const Floats w = d > least ? (Floats)bits : Floats{};
    if (weights != nullptr) std::memcpy(weights + i, &w, sizeof w);
    HalfFloats halves[2];
    std::memcpy(halves, &w, sizeof w);
    low += __builtin_convertvector(halves[0], Doubles);
    high += __builtin_convertvector(halves[1], Doubles);
  }
  low += high;
  double sum = 0.0;
  for (std::size_t lane = 0; lane < kLanes / 2; ++lane) sum += low[lane];
  return sum;
}

}  // namespace MTPLX_LAW_NAME

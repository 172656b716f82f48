// The sweeps over a row, compiled once for each instruction set: law.cpp includes this file with MTPLX_LAW_NAME (a
// namespace), MTPLX_LAW_TARGET (a function attribute) and MTPLX_LAW_BYTES (a vector's) set, and unset at the end. None of
// them calls anything: it would not be inlined.

namespace MTPLX_LAW_NAME {

constexpr std::size_t kLanes = MTPLX_LAW_BYTES / sizeof(float);
typedef float Floats __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef float HalfFloats __attribute__((vector_size(MTPLX_LAW_BYTES / 2)));
typedef std::int32_t Ints __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef std::uint32_t Bits __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef std::uint32_t HalfBits __attribute__((vector_size(MTPLX_LAW_BYTES / 2)));
typedef double Doubles __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef std::int64_t Longs __attribute__((vector_size(MTPLX_LAW_BYTES)));
typedef std::uint64_t Words __attribute__((vector_size(MTPLX_LAW_BYTES)));

// Of exp in float64: log 2 in two parts, 1/13! to 1/0!.
constexpr double kLongRounder = 6755399441055744.0;  // 1.5 * 2^52
constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kLog2High = 0x1.62e42fefa3800p-1, kLog2Low = 0x1.ef35793c76730p-45;
constexpr int kTerms = 14;
constexpr double kSeries[kTerms] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                    1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                    1.0 / 6,          1.0 / 2,         1.0,            1.0};

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

// out[i] = exp((row[i] - highest) / temperature), 0 below exp(-708); their sum in `sum`. `size` is a multiple of 64. Whether
// any is below exp(-708).
//
// exp x = 2^n exp r, n the nearest integer to x / log 2, x - n log 2 exact but for r's last bit (log 2 in two parts, of
// which the first has few enough bits for n times it to be exact), and exp r by its series, to 4e-18.
MTPLX_LAW_TARGET bool exponentials(const float* row, std::size_t size, double highest, double temperature, double* out,
                                   double* sum) {
  Longs below = {};
  double total = 0.0, lost = 0.0;  // of blocks, compensated: as good as exact
  for (std::size_t i = 0; i < size; i += kBlock) {
    Doubles part = {};
    for (std::size_t j = i; j < i + kBlock; j += kLanes / 2) {
      HalfFloats half;
      std::memcpy(&half, row + j, sizeof half);
      const Doubles x = (__builtin_convertvector(half, Doubles) - highest) / temperature;
      const Doubles shifted = x * kLog2E + kLongRounder;
      const Doubles n = shifted - kLongRounder;
      Doubles r = x - n * kLog2High;
      r = r - n * kLog2Low;
      Doubles p = r * kSeries[0] + kSeries[1];
      for (int term = 2; term < kTerms; ++term) p = p * r + kSeries[term];
      const Words bits = (Words)p + ((Words)shifted << 52);
      const Longs low = x < kLeastLog;
      const Doubles w = low ? Doubles{} : (Doubles)bits;
      below |= low;
      part += w;
      std::memcpy(out + j, &w, sizeof w);
    }
    double block = 0.0;
    for (std::size_t lane = 0; lane < kLanes / 2; ++lane) block += part[lane];
    const double next = total + block;
    lost += total >= block ? block - (next - total) : total - (next - block);
    total = next;
  }
  *sum = total + lost;
  std::int64_t any = 0;
  for (std::size_t lane = 0; lane < kLanes / 2; ++lane) any |= below[lane];
  return any != 0;
}

// values[i] /= by. `size` is a multiple of 64.
MTPLX_LAW_TARGET void divide(double* values, std::size_t size, double by) {
  for (std::size_t i = 0; i < size; i += kLanes / 2) {
    Doubles v;
    std::memcpy(&v, values + i, sizeof v);
    v = v / by;
    std::memcpy(values + i, &v, sizeof v);
  }
}

// out[i] = a number in (0, 1) for each of 64 ids: Threefry-2x32 with 20 rounds, and the upper 52 bits of its words, as in
// mtplx/rng.py. Whether one of them is not above bound * probs[i].
MTPLX_LAW_TARGET bool noise(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, const std::int64_t* ids,
                            const double* probs, double bound, double* out) {
  const std::uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAU};
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  Longs within = {};
  for (std::size_t i = 0; i < kBlock; i += kLanes) {
    HalfBits halves[2];
    for (int half = 0; half < 2; ++half) {
      Words wide;
      std::memcpy(&wide, ids + i + half * kLanes / 2, sizeof wide);
      halves[half] = __builtin_convertvector(wide, HalfBits);
    }
    Bits x0, x1 = Bits{} + (position + keys[1]);
    std::memcpy(&x0, halves, sizeof x0);
    x0 += keys[0];
    for (std::uint32_t block = 0; block < 5; ++block) {
      for (int turn = 0; turn < 4; ++turn) {
        const int by = kRotations[block % 2][turn];
        x0 += x1;
        x1 = (x1 << by | x1 >> (32 - by)) ^ x0;
      }
      x0 += keys[(block + 1) % 3];
      x1 += keys[(block + 2) % 3] + block + 1;
    }
    HalfBits first[2], second[2];
    std::memcpy(first, &x0, sizeof x0);
    std::memcpy(second, &x1, sizeof x1);
    for (int half = 0; half < 2; ++half) {
      // 52 bits behind the point of a number from 1 on; then all that follows is exact.
      const Words k = __builtin_convertvector(first[half], Words) << 20 | __builtin_convertvector(second[half], Words) >> 12;
      const Doubles u = (Doubles)(k | 0x3ff0000000000000U) - 1.0 + 0x1p-53;
      Doubles p;
      std::memcpy(&p, probs + i + half * kLanes / 2, sizeof p);
      within |= u <= p * bound;
      std::memcpy(out + i + half * kLanes / 2, &u, sizeof u);
    }
  }
  std::int64_t any = 0;
  for (std::size_t lane = 0; lane < kLanes / 2; ++lane) any |= within[lane];
  return any != 0;
}

}  // namespace MTPLX_LAW_NAME

#undef MTPLX_LAW_NAME
#undef MTPLX_LAW_TARGET
#undef MTPLX_LAW_BYTES

// x86-64 with AVX2, FMA and F16C.
#include "table.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <cpuid.h>
#include <immintrin.h>

namespace mtplx {
namespace {

struct V {
  static constexpr const char* kName = "avx2";
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  using Float = __m256;
  using Int = __m256i;

  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float hold(Float v) {
    asm("" : "+x"(v));
    return v;
  }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static Float set(float v) { return _mm256_set1_ps(v); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Int load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Int keep(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int words(std::uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
  static Int either(Int a, Int b) { return _mm256_or_si256(a, b); }
  template <int N>
  static Int right(Int v) {
    return _mm256_srli_epi32(v, N);
  }
  template <int N>
  static Int right_of_halves(Int v) {
    return _mm256_srli_epi16(v, N);
  }
  template <int N>
  static Int left(Int v) {
    return _mm256_slli_epi32(v, N);
  }
  // Two products of whole numbers of 16 bits in each lane, added to its sum. Nothing reorders the sums: compilers do,
  // to shorten their chain, and run out of registers.
  static Int dot(Int sum, Int a, Int b) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    asm("" : "+x"(sum));
    return sum;
  }
  static Int nearest(Float v) { return _mm256_cvtps_epi32(v); }
  static void store_words(void* p, Int v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static Float from_int(Int v) { return _mm256_cvtepi32_ps(v); }
  static Float from_bits(Int v) { return _mm256_castsi256_ps(v); }
  static Int bits(Float v) { return _mm256_castps_si256(v); }
  static Float pow2(Float n) {
    return from_bits(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static Float widen16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static Float widen_bfloat(const void* p) {
    return from_bits(left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))));
  }
  // v, but 0 where x is not above `bound`; NaN is above.
  static Float zero_below(Float v, Float x, float bound) {
    return _mm256_and_ps(v, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_NLE_UQ));
  }
  static float sum(Float v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static void sum4(const Float* v, float* out) {
    const Float a = _mm256_hadd_ps(v[0], v[1]), b = _mm256_hadd_ps(v[2], v[3]), c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
  }
  static float largest(Float v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
};

#include "kernels.inl"

}  // namespace

const Kernels* avx2_kernels() {
  unsigned a, b, features = 0, d;  // Clang's __builtin_cpu_supports does not know F16C
  const bool f16c = __get_cpuid(1, &a, &b, &features, &d) != 0 && (features & bit_F16C) != 0;
  const bool have = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  return have ? &kTable : nullptr;
}

}  // namespace mtplx
#else
namespace mtplx {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace mtplx
#endif

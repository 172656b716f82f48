// The vectors of AVX-512, for the files that are compiled for it; MTPLX_LEVEL is the level's name. With VNNI a product and
// its addition are one instruction, and give the same whole numbers.
#include <immintrin.h>

namespace mtplx {
namespace {

struct V {
  static constexpr const char* kName = MTPLX_LEVEL;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  using Float = __m512;
  using Int = __m512i;

  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static Float hold(Float v) {
    asm("" : "+v"(v));
    return v;
  }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static Float set(float v) { return _mm512_set1_ps(v); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Int load_words(const void* p) { return _mm512_loadu_si512(p); }
  static Int keep(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int words(std::uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
  static Int either(Int a, Int b) { return _mm512_or_si512(a, b); }
  template <int N>
  static Int right(Int v) {
    return _mm512_srli_epi32(v, N);
  }
  template <int N>
  static Int right_of_halves(Int v) {
    return _mm512_srli_epi16(v, N);
  }
  template <int N>
  static Int left(Int v) {
    return _mm512_slli_epi32(v, N);
  }
  static Int dot(Int sum, Int a, Int b) {  // as in kernels_avx2.cpp
#if defined(__AVX512VNNI__)
    sum = _mm512_dpwssd_epi32(sum, a, b);
#else
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
    asm("" : "+v"(sum));
    return sum;
  }
  static Int nearest(Float v) { return _mm512_cvtps_epi32(v); }
  static void store_words(void* p, Int v) { _mm512_storeu_si512(p, v); }
  static Float from_int(Int v) { return _mm512_cvtepi32_ps(v); }
  static Float from_bits(Int v) { return _mm512_castsi512_ps(v); }
  static Int bits(Float v) { return _mm512_castps_si512(v); }
  static Float pow2(Float n) {
    return from_bits(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  static Float widen16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static Float widen_bfloat(const void* p) {
    return from_bits(left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))));
  }
  static Float zero_below(Float v, Float x, float bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_NLE_UQ), v);
  }
  static float sum(Float v) { return _mm512_reduce_add_ps(v); }
  static void sum4(const Float* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
  static float largest(Float v) { return _mm512_reduce_max_ps(v); }
};

#include "kernels.inl"

}  // namespace
}  // namespace mtplx

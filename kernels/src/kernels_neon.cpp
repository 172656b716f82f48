// 64-bit ARM.
#include "table.hpp"

#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

namespace mtplx {
namespace {

struct V {
  static constexpr const char* kName = "neon";
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 32;
  using Float = float32x4_t;
  using Int = uint32x4_t;

  static Float load(const float* p) { return vld1q_f32(p); }
  static Float hold(Float v) {
    asm("" : "+w"(v));
    return v;
  }
  static void store(float* p, Float v) { vst1q_f32(p, v); }
  static Float set(float v) { return vdupq_n_f32(v); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float div(Float a, Float b) { return vdivq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float max(Float a, Float b) { return vmaxq_f32(a, b); }  // NaN where either is
  static Float min(Float a, Float b) { return vminq_f32(a, b); }
  static Int load_words(const void* p) {
    return vreinterpretq_u32_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)));
  }
  static Int keep(Int a, Int b) { return vandq_u32(a, b); }
  static Int words(std::uint32_t v) { return vdupq_n_u32(v); }
  static Int either(Int a, Int b) { return vorrq_u32(a, b); }
  template <int N>
  static Int right(Int v) {
    return vshrq_n_u32(v, N);
  }
  template <int N>
  static Int right_of_halves(Int v) {
    return vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(v), N));
  }
  template <int N>
  static Int left(Int v) {
    return vshlq_n_u32(v, N);
  }
  static Int dot(Int sum, Int a, Int b) {
    const auto low = [](Int v) { return vreinterpret_s16_u16(vmovn_u32(v)); };
    const auto high = [](Int v) { return vreinterpret_s16_u16(vshrn_n_u32(v, 16)); };
    int32x4_t s = vmlal_s16(vreinterpretq_s32_u32(sum), low(a), low(b));
    return vreinterpretq_u32_s32(vmlal_s16(s, high(a), high(b)));
  }
  static Int nearest(Float v) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(v)); }
  static void store_words(void* p, Int v) {
    vst1q_u8(static_cast<std::uint8_t*>(p), vreinterpretq_u8_u32(v));
  }
  static Float from_int(Int v) { return vcvtq_f32_s32(vreinterpretq_s32_u32(v)); }
  static Float from_bits(Int v) { return vreinterpretq_f32_u32(v); }
  static Int bits(Float v) { return vreinterpretq_u32_f32(v); }
  static Float pow2(Float n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
  }
  static Float widen16(const void* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const std::uint8_t*>(p))));
  }
  static Float widen_bfloat(const void* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(static_cast<const std::uint8_t*>(p))), 16));
  }
  static Float zero_below(Float v, Float x, float bound) {
    return from_bits(vbicq_u32(bits(v), vcleq_f32(x, vdupq_n_f32(bound))));
  }
  static float sum(Float v) { return vaddvq_f32(v); }
  static void sum4(const Float* v, float* out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
  }
  static float largest(Float v) { return vmaxvq_f32(v); }
};

#include "kernels.inl"

}  // namespace

const Kernels* neon_kernels() { return &kTable; }

}  // namespace mtplx
#else
namespace mtplx {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace mtplx
#endif

// Any processor: arrays of four floats, which compilers turn into whatever vectors there are. Multiply and add are two
// roundings here, so results differ from the other levels' in the last places.
#include "table.hpp"

namespace mtplx {
namespace {

struct V {
  static constexpr const char* kName = "portable";
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;
  typedef float Float __attribute__((vector_size(16)));
  typedef std::uint32_t Int __attribute__((vector_size(16)));
  typedef std::int32_t Signed __attribute__((vector_size(16)));

  static Float load(const float* p) {
    Float v;
    __builtin_memcpy(&v, p, 16);
    return v;
  }
  static Float hold(Float v) { return v; }
  static void store(float* p, Float v) { __builtin_memcpy(p, &v, 16); }
  static Float set(float v) { return Float{v, v, v, v}; }
  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Float max(Float a, Float b) { return from_bits(choose(a > b, a, b)); }
  static Float min(Float a, Float b) { return from_bits(choose(a < b, a, b)); }
  static Int load_words(const void* p) {
    Int v;
    __builtin_memcpy(&v, p, 16);
    return v;
  }
  static Int keep(Int a, Int b) { return a & b; }
  static Int words(std::uint32_t v) { return Int{v, v, v, v}; }
  static Int either(Int a, Int b) { return a | b; }
  template <int N>
  static Int right(Int v) {
    return v >> N;
  }
  template <int N>
  static Int right_of_halves(Int v) {
    return v >> N & (0xffffu >> N) * 0x10001u;
  }
  template <int N>
  static Int left(Int v) {
    return v << N;
  }
  static Int dot(Int sum, Int a, Int b) {
    const Signed x = reinterpret_cast<Signed>(a), y = reinterpret_cast<Signed>(b);
    const Signed low = ((x << 16) >> 16) * ((y << 16) >> 16), high = (x >> 16) * (y >> 16);
    return sum + reinterpret_cast<Int>(low + high);
  }
  static Int nearest(Float v) {
    const Float shift = set(12582912.0f);  // 1.5 * 2^23: what follows its last place is rounded away
    return bits(v + shift) - bits(shift);
  }
  static void store_words(void* p, Int v) { __builtin_memcpy(p, &v, 16); }
  static Float from_int(Int v) { return __builtin_convertvector(reinterpret_cast<Signed>(v), Float); }
  static Float from_bits(Int v) { return reinterpret_cast<Float>(v); }
  static Int bits(Float v) { return reinterpret_cast<Int>(v); }
  static Float pow2(Float n) {
    // NaN has no integer: its power does not matter, but the conversion must be defined.
    const Float defined = from_bits(choose(n == n, n, set(0.0f)));
    return from_bits(reinterpret_cast<Int>(__builtin_convertvector(defined, Signed) + 127) << 23);
  }
  static Float widen16(const void* p);
  static Float widen_bfloat(const void* p) {
    std::uint16_t h[4];
    __builtin_memcpy(h, p, 8);
    return from_bits(Int{h[0], h[1], h[2], h[3]} << 16);
  }
  static Float zero_below(Float v, Float x, float bound) {
    return from_bits(bits(v) & ~reinterpret_cast<Int>(x <= set(bound)));
  }
  static float sum(Float v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static void sum4(const Float* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
  static float largest(Float v) {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }

 private:
  static Int choose(Signed where, Float a, Float b) {
    const Int mask = reinterpret_cast<Int>(where);
    return (bits(a) & mask) | (bits(b) & ~mask);
  }
};

#include "kernels.inl"

V::Float V::widen16(const void* p) {
  std::uint16_t h[4];
  __builtin_memcpy(h, p, 8);
  return Float{float_of_half(h[0]), float_of_half(h[1]), float_of_half(h[2]), float_of_half(h[3])};
}

}  // namespace

const Kernels* portable_kernels() { return &kTable; }

}  // namespace mtplx

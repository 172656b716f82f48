// x86-64 with AVX-512 (F, BW, DQ, VL) and its VNNI.
#include "table.hpp"

#if defined(__AVX512VNNI__)
#define MTPLX_LEVEL "avx512vnni"
#include "vector_avx512.inl"

namespace mtplx {
const Kernels* avx512vnni_kernels() {
  return avx512_kernels() != nullptr && __builtin_cpu_supports("avx512vnni") ? &kTable : nullptr;
}
}  // namespace mtplx
#else
namespace mtplx {
const Kernels* avx512vnni_kernels() { return nullptr; }
}  // namespace mtplx
#endif

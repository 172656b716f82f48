// x86-64 with AVX-512 (F, BW, DQ, VL).
#include "table.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MTPLX_LEVEL "avx512"
#include "vector_avx512.inl"

namespace mtplx {
const Kernels* avx512_kernels() {
  const bool have = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return have ? &kTable : nullptr;
}
}  // namespace mtplx
#else
namespace mtplx {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace mtplx
#endif

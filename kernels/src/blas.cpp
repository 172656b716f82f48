// The plain CBLAS names, answered by the OpenBLAS of the PyPI package scipy-openblas32.
//
// MLX's CPU build finds cblas_sgemm, cblas_dgemm and cblas_cgemm through the dynamic linker. Opened with RTLD_GLOBAL
// before MLX, this library is what it finds. OpenBLAS itself stays private: it is opened RTLD_LOCAL, by path, and told
// to use one thread; a large product is cut into tiles here and shared out by pool.hpp. The tiles depend on the shape
// alone, so a product has the same bits whatever the number of threads and whoever computes which tile.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <system_error>

#include "pool.hpp"

#define MTPLX_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 1;

// A product costs its multiply-adds / 16 plus the elements of both factors: a product of few rows is bound by reading
// its weights. Below kSmall it runs on one thread; a tile costs about kTile. Measured: kernels/README.md.
constexpr std::int64_t kSmall = std::int64_t{1} << 15;
constexpr std::int64_t kTile = std::int64_t{1} << 15;

enum Code : int {
  kOk = 0,
  kBadArgument = 1,
  kCannotOpen = 2,
  kMissingSymbol = 3,
  kWrongIntegers = 4,
  kAlreadyInitialised = 5,
  kNoThreads = 6,
};

constexpr int kRowMajor = 101;
constexpr int kNoTrans = 111;

template <typename T, typename Scalar>
using Gemm = void (*)(int, int, int, int, int, int, Scalar, const T*, int, const T*, int, Scalar, T*, int);

struct Complex32 {
  float re, im;
};

struct Shim {
  Gemm<float, float> sgemm = nullptr;
  Gemm<double, double> dgemm = nullptr;
  Gemm<Complex32, const void*> cgemm = nullptr;
  int threads = 1;
  std::int64_t small = kSmall;
  std::string config;
  std::string core;
  std::string error;
  std::atomic<bool> ready = false;
  mtplx::Pool pool{4000};  // 0.1 ms: the pause between two products of a forward
  std::atomic<std::uint64_t> calls[3] = {};
  std::atomic<std::uint64_t> shared = 0;
};

// Never destroyed: MLX's own threads may still multiply while the process exits.
Shim& shim() {
  static Shim* instance = new Shim;
  return *instance;
}

template <typename Function>
bool resolve(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  if (out == nullptr) shim().error = std::string("no symbol ") + name;
  return out != nullptr;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// How an m x n result is cut: rows and columns of one tile.
struct Grid {
  int rows, columns, down, across;
};

std::int64_t cost(std::int64_t m, std::int64_t n, std::int64_t k) { return m * n / 16 * k + (m + n) * k; }

// Cuts the longer side, and the shorter one too where it is long; narrow tiles would pack the other factor too often.
Grid make_grid(int m, int n, int k, std::int64_t small) {
  const std::int64_t price = cost(m, n, k);
  if (price < small) return {m, n, 1, 1};
  const std::int64_t longer = std::max(m, n);
  const std::int64_t shorter = std::min(m, n);
  const std::int64_t pieces_short = ceil_div(shorter, 512);
  const std::int64_t piece_short = ceil_div(shorter, pieces_short);
  const std::int64_t narrowest = shorter <= 8 ? 48 : shorter <= 64 ? 128 : 256;
  const std::int64_t wanted = std::max<std::int64_t>(1, price / kTile / pieces_short);
  const std::int64_t piece_long = std::max(narrowest, ceil_div(ceil_div(longer, wanted), 16) * 16);
  const int pieces_long = static_cast<int>(ceil_div(longer, piece_long));
  if (m <= n) {
    return {static_cast<int>(piece_short), static_cast<int>(piece_long), static_cast<int>(pieces_short), pieces_long};
  }
  return {static_cast<int>(piece_long), static_cast<int>(piece_short), pieces_long, static_cast<int>(pieces_short)};
}

// One product, row major, as the tiles see it.
template <typename T, typename Scalar>
struct Product {
  Gemm<T, Scalar> gemm;
  int transa, transb, m, n, k;
  Scalar alpha, beta;
  const T* a;
  const T* b;
  T* c;
  int lda, ldb, ldc;
  Grid grid;

  static void tiles(const void* self, int first, int last) {
    for (int i = first; i < last; ++i) static_cast<const Product*>(self)->tile(i);
  }

  void tile(int index) const {
    const std::int64_t top = static_cast<std::int64_t>(index / grid.across) * grid.rows;
    const std::int64_t left = static_cast<std::int64_t>(index % grid.across) * grid.columns;
    const int rows = static_cast<int>(std::min<std::int64_t>(grid.rows, m - top));
    const int columns = static_cast<int>(std::min<std::int64_t>(grid.columns, n - left));
    gemm(kRowMajor, transa, transb, rows, columns, k, alpha, a + (transa == kNoTrans ? top * lda : top), lda,
         b + (transb == kNoTrans ? left : left * ldb), ldb, beta, c + top * ldc + left, ldc);
  }
};

template <typename T, typename Scalar>
void multiply(int which, Gemm<T, Scalar> gemm, int order, int transa, int transb, int m, int n, int k, Scalar alpha,
              const T* a, int lda, const T* b, int ldb, Scalar beta, T* c, int ldc) {
  Shim& s = shim();
  s.calls[which].fetch_add(1, std::memory_order_relaxed);
  if (m <= 0 || n <= 0 || k <= 0) {
    gemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  if (order != kRowMajor) {  // a column-major product is the row-major product of the transposes
    std::swap(transa, transb);
    std::swap(m, n);
    std::swap(a, b);
    std::swap(lda, ldb);
  }
  const Product<T, Scalar> product{gemm, transa, transb, m,   n,   k,   alpha,
                                   beta, a,      b,      c,   lda, ldb, ldc, make_grid(m, n, k, s.small)};
  const int tiles = product.grid.down * product.grid.across;
  if (tiles == 1 || s.threads == 1) {
    product.tiles(&product, 0, tiles);
    return;
  }
  s.shared.fetch_add(1, std::memory_order_relaxed);
  s.pool.run(tiles, &Product<T, Scalar>::tiles, &product);
}

}  // namespace

MTPLX_EXPORT int mtplx_blas_abi() { return kAbi; }

// Opens the OpenBLAS at `path` (its symbols carry the prefix scipy_) and fixes the thread count for the process.
// `small`: cost below which one thread is used; 0 takes the measured default. Returns a Code; the text of a failure is
// in mtplx_blas_error. To be called once, by one thread, before the library is made global.
MTPLX_EXPORT int mtplx_blas_init(const char* path, int threads, std::int64_t small) {
  Shim& s = shim();
  if (s.ready) return kAlreadyInitialised;
  if (path == nullptr || threads < 1 || small < 0) {
    s.error = "bad argument";
    return kBadArgument;
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    s.error = text != nullptr ? text : "dlopen failed";
    return kCannotOpen;
  }
  char* (*get_config)() = nullptr;
  char* (*get_core)() = nullptr;
  void (*set_threads)(int) = nullptr;
  if (!resolve(library, "scipy_cblas_sgemm", s.sgemm) || !resolve(library, "scipy_cblas_dgemm", s.dgemm) ||
      !resolve(library, "scipy_cblas_cgemm", s.cgemm) ||
      !resolve(library, "scipy_openblas_set_num_threads", set_threads) ||
      !resolve(library, "scipy_openblas_get_config", get_config) ||
      !resolve(library, "scipy_openblas_get_corename", get_core)) {
    return kMissingSymbol;
  }
  s.config = get_config();
  s.core = get_core();
  if (s.config.find("USE64BITINT") != std::string::npos) {
    s.error = "this OpenBLAS takes 64-bit integers: " + s.config;
    return kWrongIntegers;
  }
  set_threads(1);
  try {
    s.pool.start(threads - 1);
  } catch (const std::system_error& failure) {
    s.error = failure.what();
    return kNoThreads;
  }
  s.threads = threads;
  s.small = small > 0 ? small : kSmall;
  s.ready = true;
  return kOk;
}

MTPLX_EXPORT const char* mtplx_blas_error() { return shim().error.c_str(); }
MTPLX_EXPORT const char* mtplx_blas_config() { return shim().config.c_str(); }
MTPLX_EXPORT const char* mtplx_blas_core() { return shim().core.c_str(); }
MTPLX_EXPORT int mtplx_blas_threads() { return shim().threads; }
MTPLX_EXPORT std::int64_t mtplx_blas_small() { return shim().small; }

// out[0..3]: calls of sgemm, dgemm and cgemm since the library was opened, and how many of them were shared out.
MTPLX_EXPORT void mtplx_blas_counters(std::uint64_t* out) {
  Shim& s = shim();
  for (int i = 0; i < 3; ++i) out[i] = s.calls[i].load(std::memory_order_relaxed);
  out[3] = s.shared.load(std::memory_order_relaxed);
}

MTPLX_EXPORT void cblas_sgemm(int order, int transa, int transb, int m, int n, int k, float alpha, const float* a,
                              int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  multiply(0, shim().sgemm, order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

MTPLX_EXPORT void cblas_dgemm(int order, int transa, int transb, int m, int n, int k, double alpha, const double* a,
                              int lda, const double* b, int ldb, double beta, double* c, int ldc) {
  multiply(1, shim().dgemm, order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

MTPLX_EXPORT void cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                              int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  multiply(2, shim().cgemm, order, transa, transb, m, n, k, alpha, static_cast<const Complex32*>(a), lda,
           static_cast<const Complex32*>(b), ldb, beta, static_cast<Complex32*>(c), ldc);
}

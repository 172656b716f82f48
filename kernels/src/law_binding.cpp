// law.hpp for Python: rows of logits in NumPy arrays, a tuple for each row out. And the uniforms of mtplx/rng.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.hpp"
#include "law.hpp"

namespace nb = nanobind;

namespace {

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// A NumPy array that owns the vector's memory.
template <typename T>
Array<T> to_numpy(std::vector<T>&& values) {
  auto held = std::make_unique<std::vector<T>>(std::move(values));
  T* data = held->data();
  const std::size_t size = held->size();
  nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  held.release();
  return Array<T>(data, {size}, owner);
}

// A level by the name that it has in dispatch.hpp; "" is the one in force. On AArch64 both levels are one code here.
mtplx::LawIsa isa_named(std::string name) {
  using mtplx::LawIsa;
  if (name.empty()) name = mtplx::kernels().name;
  const std::vector<std::string> levels = mtplx::levels();
  if (std::find(levels.begin(), levels.end(), name) == levels.end()) {
    throw nb::value_error(("no kernels for '" + name + "' on this machine").c_str());
  }
  return name == "avx512" ? LawIsa::avx512 : name == "avx2" ? LawIsa::avx2 : LawIsa::portable;
}

nb::list law(nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows, double temperature,
             double top_p, double min_p, std::int64_t top_k, const std::string& isa) {
  const mtplx::LawIsa chosen = isa_named(isa);
  const std::size_t count = rows.shape(0), size = rows.shape(1);
  const mtplx::LawRequest request{temperature, top_p, min_p, top_k};
  mtplx::check_law(size, request);
  std::vector<mtplx::LawRow> found(count);
  std::vector<mtplx::Law> laws(count);
  {
    nb::gil_scoped_release released;
    mtplx::share(static_cast<int>(count), [&](int i) {
      thread_local mtplx::LawScratch scratch;
      const auto row = static_cast<std::size_t>(i);
      mtplx::law_row(rows.data() + row * size, size, request, chosen, scratch, found[row]);
      mtplx::finish_law(found[row], request, scratch, laws[row]);
    });
  }
  nb::list out;
  for (std::size_t i = 0; i < count; ++i) {
    out.append(nb::make_tuple(to_numpy(std::move(laws[i].ids)), to_numpy(std::move(laws[i].probs)), found[i].mass,
                              found[i].nan, found[i].inf));
  }
  return out;
}

// Threefry-2x32 with 20 rounds, and the upper 52 bits of its words as a number in (0, 1): bit for bit as in rng.py.
Array<double> uniforms(std::uint32_t key0, std::uint32_t key1, std::uint32_t position,
                       nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const std::uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAU};
  std::vector<double> out(ids.shape(0));
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint32_t x0 = static_cast<std::uint32_t>(ids.data()[i]) + keys[0], x1 = position + keys[1];
    for (std::uint32_t block = 0; block < 5; ++block) {
      for (const int rotation : kRotations[block % 2]) {
        x0 += x1;
        x1 = std::rotl(x1, rotation) ^ x0;
      }
      x0 += keys[(block + 1) % 3];
      x1 += keys[(block + 2) % 3] + block + 1;
    }
    out[i] = (static_cast<double>(std::uint64_t{x0} << 20 | x1 >> 12) + 0.5) * 0x1p-52;
  }
  return to_numpy(std::move(out));
}

}  // namespace

void bind_law(nb::module_& m) {
  m.def("law", &law, nb::arg("rows").noconvert(), nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"),
        nb::arg("top_k"), nb::arg("isa") = "",
        "The law of each row of logits, (R, V) float32: R tuples (ids, probs, mass, nan, inf).\n\n"
        "ids, probs: int64, ascending, and float64, positive; empty if a logit is NaN or +inf, or all are -inf.\n"
        "mass: the sum of exp((logit - highest) / temperature), 0 if neither top_p nor min_p asks for it.\n"
        "nan, inf: how many logits are NaN, +inf. isa: a level that `levels` names, \"\" for the one in force.\n"
        "Raises ValueError for what is out of range.");
  m.def("uniforms", &uniforms, nb::arg("key0"), nb::arg("key1"), nb::arg("position"), nb::arg("ids"),
        "mtplx.rng.uniforms of (n,) int64 ids, bit for bit.");
}

// law.hpp for Python: rows of logits in NumPy arrays, a tuple for each row out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
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
  {
    nb::gil_scoped_release released;
    mtplx::share(static_cast<int>(count), [&](int i) {
      thread_local mtplx::LawScratch scratch;
      const auto row = static_cast<std::size_t>(i);
      mtplx::law_row(rows.data() + row * size, size, request, chosen, scratch, found[row]);
    });
  }
  nb::list out;
  for (mtplx::LawRow& row : found) {
    out.append(nb::make_tuple(to_numpy(std::move(row.ids)), to_numpy(std::move(row.values)), row.mass, row.nan,
                              row.inf));
  }
  return out;
}

}  // namespace

void bind_law(nb::module_& m) {
  m.def("law", &law, nb::arg("rows").noconvert(), nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"),
        nb::arg("top_k"), nb::arg("isa") = "",
        "Candidates and mass of each row of logits, (R, V) float32: R tuples (ids, values, mass, nan, inf).\n\n"
        "ids, values: uint32 and float32, logit descending, then id ascending; empty if a logit is NaN or +inf, or\n"
        "all are -inf. mass: the sum of exp((logit - highest) / temperature), 0 if neither top_p nor min_p asks for it.\n"
        "nan, inf: how many logits are NaN, +inf. isa: a level that `levels` names, \"\" for the one in force.\n"
        "Raises ValueError for what is out of range.");
}

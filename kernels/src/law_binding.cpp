// law.hpp for Python: rows of logits in NumPy arrays, a tuple for each row out. And what draws and verification do with laws.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.hpp"
#include "law.hpp"
#include "primitives.hpp"

namespace nb = nanobind;

namespace {

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <typename T>
using Given = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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
  if (name.empty()) {
    name = mtplx::kernels().name;
  } else {
    const std::vector<std::string> levels = mtplx::levels();
    if (std::find(levels.begin(), levels.end(), name) == levels.end()) {
      throw nb::value_error(("no kernels for '" + name + "' on this machine").c_str());
    }
  }
  return name.starts_with("avx512") ? LawIsa::avx512 : name == "avx2" ? LawIsa::avx2 : LawIsa::portable;
}

nb::list laws_of(const float* rows, std::size_t count, std::size_t size, const mtplx::LawRequest& request,
                 const std::string& isa) {
  const mtplx::LawIsa chosen = isa_named(isa);
  mtplx::check_law(size, request);
  std::vector<mtplx::LawRow> found(count);
  std::vector<mtplx::Law> laws(count);
  {
    nb::gil_scoped_release released;
    mtplx::share(static_cast<int>(count), [&](int i) {
      thread_local mtplx::LawScratch scratch;
      const auto row = static_cast<std::size_t>(i);
      mtplx::law_row(rows + row * size, size, request, chosen, scratch, found[row]);
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

nb::list law_of_numpy(nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows, double temperature,
                      double top_p, double min_p, std::int64_t top_k, const std::string& isa) {
  return laws_of(rows.data(), rows.shape(0), rows.shape(1), {temperature, top_p, min_p, top_k}, isa);
}

// Rows of MLX as they lie in memory, float32, waited for without the GIL.
mlx::core::array rows_at_hand(const mlx::core::array& rows) {
  if (rows.ndim() != 2) throw nb::value_error("logits must be (rows, vocab)");
  nb::gil_scoped_release released;
  return mtplx::at_hand(rows);
}

nb::list law_of_mlx(const mlx::core::array& rows, double temperature, double top_p, double min_p, std::int64_t top_k,
                    const std::string& isa) {
  const mlx::core::array ready = rows_at_hand(rows);
  const auto count = static_cast<std::size_t>(ready.shape(0)), size = static_cast<std::size_t>(ready.shape(1));
  return laws_of(ready.data<float>(), count, size, {temperature, top_p, min_p, top_k}, isa);
}

nb::list whole_laws(const mlx::core::array& rows, double temperature, const std::string& isa) {
  const mlx::core::array ready = rows_at_hand(rows);
  const auto count = static_cast<std::size_t>(ready.shape(0)), size = static_cast<std::size_t>(ready.shape(1));
  const mtplx::LawIsa chosen = isa_named(isa);
  std::vector<mtplx::WholeLaw> laws(count);
  {
    nb::gil_scoped_release released;
    mtplx::share(static_cast<int>(count), [&](int i) {
      thread_local mtplx::LawScratch scratch;
      mtplx::whole_law(ready.data<float>() + i * size, size, temperature, chosen, scratch, laws[i]);
    });
  }
  nb::list out;
  for (mtplx::WholeLaw& law : laws) {
    const std::size_t known = law.probs == nullptr ? 0 : size;
    if (known == 0) law.probs.reset(new double[1]);
    double* data = law.probs.get();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<double*>(p); });
    law.probs.release();
    out.append(nb::make_tuple(Array<double>(data, {known}, owner), law.positive));
  }
  return out;
}

double uniform(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, std::uint32_t id) {
  return mtplx::uniform(key0, key1, position, id, isa_named(""));
}

std::int64_t race(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, Given<std::int64_t> ids,
                  Given<double> probs, const std::string& isa) {
  if (ids.size() == 0 || ids.size() != probs.size()) throw nb::value_error("ids and probs must be of one length, >= 1");
  return ids.data()[mtplx::race(key0, key1, position, ids.data(), probs.data(), ids.size(), isa_named(isa))];
}

// p(id), 0 outside; ids ascending.
double probability(Given<std::int64_t> ids, Given<double> probs, std::int64_t id) {
  if (ids.size() != probs.size()) throw nb::value_error("ids and probs must be of one length");
  const std::int64_t* end = ids.data() + ids.size();
  const std::int64_t* found = std::lower_bound(ids.data(), end, id);
  return found != end && *found == id ? probs.data()[found - ids.data()] : 0.0;
}

// (scale p - q)+ by id, both ascending: the ids where it is positive, and how much it is there.
nb::tuple excess(Given<std::int64_t> p_ids, Given<double> p, Given<std::int64_t> q_ids, Given<double> q, double scale) {
  if (p_ids.size() != p.size() || q_ids.size() != q.size()) throw nb::value_error("ids and probs must be of one length");
  const std::size_t size = p.size();
  const std::int64_t *begin = p_ids.data(), *end = begin + size;
  std::vector<std::int64_t> ids(size);
  std::vector<double> masses(size);
  for (std::size_t i = 0; i < size; ++i) masses[i] = scale * p.data()[i];
  for (std::size_t j = 0; j < q.size(); ++j) {
    const std::int64_t id = q_ids.data()[j];
    // In a law of all ids each stands at its own place, and need not be looked for.
    const bool own = id >= 0 && static_cast<std::size_t>(id) < size && begin[id] == id;
    const std::int64_t* at = own ? begin + id : std::lower_bound(begin, end, id);
    if (at != end && *at == id) masses[at - begin] -= q.data()[j];
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < size; ++i) {  // without a branch, which would be guessed wrong where p and q are close
    ids[kept] = begin[i];
    masses[kept] = masses[i];
    kept += masses[i] > 0.0 ? 1 : 0;
  }
  ids.resize(kept);
  masses.resize(kept);
  return nb::make_tuple(to_numpy(std::move(ids)), to_numpy(std::move(masses)));
}

}  // namespace

void bind_law(nb::module_& m) {
  const char* about =
      "The law of each row of logits, (R, V), float32 in NumPy or of any kind in MLX: R tuples (ids, probs, mass, nan, inf).\n\n"
      "ids, probs: int64, ascending, and float64, positive; empty if a logit is NaN or +inf, or all are -inf.\n"
      "mass: the sum of exp((logit - highest) / temperature), 0 if neither top_p nor min_p asks for it.\n"
      "nan, inf: how many logits are NaN, +inf. isa: a level that `levels` names, \"\" for the one in force.\n"
      "Raises ValueError for what is out of range.";
  const auto define = [&](auto function) {
    m.def("law", function, nb::arg("rows").noconvert(), nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"),
          nb::arg("top_k"), nb::arg("isa") = "", about);
  };
  define(&law_of_mlx);
  define(&law_of_numpy);
  m.def("whole_law", &whole_laws, nb::arg("rows"), nb::arg("temperature"), nb::arg("isa") = "",
        "The law without filters of each row of logits, (R, V): R tuples (probs (V,) float64, how many are positive);\n"
        "probs is empty if a logit is NaN or +inf, or all are -inf.");
  m.def("uniform", &uniform, nb::arg("key0"), nb::arg("key1"), nb::arg("position"), nb::arg("id"),
        "mtplx.rng.uniforms of one id, bit for bit.");
  m.def("excess", &excess, nb::arg("p_ids"), nb::arg("p"), nb::arg("q_ids"), nb::arg("q"), nb::arg("scale"),
        "mtplx.distribution.excess of sparse laws, ids ascending, bit for bit.");
  m.def("probability", &probability, nb::arg("ids"), nb::arg("probs"), nb::arg("id"), "p(id), ids ascending; 0 outside.");
  m.def("race", &race, nb::arg("key0"), nb::arg("key1"), nb::arg("position"), nb::arg("ids"), nb::arg("probs"),
        nb::arg("isa") = "", "mtplx.rng.race on (n,) int64 ids, ascending, and float64 probabilities, positive.");
}

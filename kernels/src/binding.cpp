// The extension module `mtplx_kernels._core`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>

#include "dispatch.hpp"
#include "mlx/version.h"
#include "primitives.hpp"

#ifdef MTPLX_WITH_LAW
void bind_law(nanobind::module_& m);
#endif

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace {

// Python's handle of a matrix; the shared pointer lets operations outlive it.
struct Matrix {
  mtplx::Weights weights;
  std::shared_ptr<const mtplx::Vector> bias;
};

std::shared_ptr<const mtplx::Vector> bias_of(const std::optional<mx::array>& bias, const mtplx::Weights& weights) {
  auto vector = std::make_shared<mtplx::Vector>();
  if (bias) {
    *vector = mtplx::to_vector(*bias);
    if (static_cast<int>(vector->size()) != weights->view().n) {
      throw std::invalid_argument("the bias must have one number for each output");
    }
  }
  return vector;
}

mtplx::Vector vector_of(const std::optional<mx::array>& a) { return a ? mtplx::to_vector(*a) : mtplx::Vector{}; }

struct Layers {
  std::shared_ptr<const mtplx::LayerList> list;
  std::shared_ptr<const mtplx::Features> features;
};

struct Head {
  std::shared_ptr<const mtplx::Combine> combine;
};

void bind_matrix(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", "Weights (outputs, inputs) in the kernels' layout, with an optional bias.")
      .def_static(
          "dense",
          [](const mx::array& w, const std::optional<mx::array>& bias) {
            auto weights = mtplx::pack(w);
            return Matrix{weights, bias_of(bias, weights)};
          },
          "weight"_a, "bias"_a = nb::none(), "From (outputs, inputs) float32, float16 or bfloat16; kept in that type.")
      .def_static(
          "quantized",
          [](const mx::array& w, const mx::array& scales, const mx::array& biases, int group_size, int bits,
             const std::optional<mx::array>& bias) {
            auto weights = mtplx::pack_quantized(w, scales, biases, group_size, bits);
            return Matrix{weights, bias_of(bias, weights)};
          },
          "weight"_a, "scales"_a, "biases"_a, "group_size"_a, "bits"_a, "bias"_a = nb::none(),
          "From MLX's affine packing of 4 or 8 bits in groups of 32, 64 or 128.")
      .def("__call__", [](const Matrix& self, const mx::array& x) { return mtplx::multiply_op(x, self.weights, self.bias); },
           "x"_a, "(..., inputs) -> (..., outputs) float32.")
      .def("now",
           [](const Matrix& self, const mx::array& x) { return mtplx::multiply_now(x, self.weights, *self.bias); }, "x"_a,
           nb::call_guard<nb::gil_scoped_release>(), "(rows, inputs) -> (rows, outputs), computed when it returns.")
      .def("joined",
           [](const Matrix& self, const mx::array& logits, const mx::array& x, int row) {
             return mtplx::join_now(logits, x, self.weights, row);
           },
           "logits"_a, "x"_a, "row"_a, nb::call_guard<nb::gil_scoped_release>(),
           "logits (R, V) and, behind each row, the product of x (R, inputs) with one row of the matrix, without the\n"
           "bias: (R, V + 1) float32, computed when it returns.")
      .def("rows", [](const Matrix& self, const mx::array& ids) { return mtplx::look_up_op(self.weights, ids); }, "ids"_a,
           "ids (...) -> (..., inputs) float32, dequantised, without the bias; NaN for an id out of range.")
      .def_prop_ro("shape",
                   [](const Matrix& self) { return std::make_pair(self.weights->view().n, self.weights->view().k); })
      .def_prop_ro("nbytes", [](const Matrix& self) { return self.weights->bytes(); });
}

std::shared_ptr<const mtplx::Layer> make_layer(const std::vector<Matrix>& parts, const std::vector<std::optional<mx::array>>& norms,
                                               float eps, int heads, int kv_heads, float scale, int window,
                                               const std::vector<double>& frequencies) {
  if (parts.size() != 7 || norms.size() != 4) throw std::invalid_argument("a layer has 7 matrices and 4 norms");
  auto l = std::make_shared<mtplx::Layer>();
  mtplx::Weights* weights[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
  mtplx::Vector* biases[] = {&l->q_bias, &l->k_bias, &l->v_bias, &l->o_bias, &l->gate_bias, &l->up_bias, &l->down_bias};
  mtplx::Vector* vectors[] = {&l->input_norm, &l->post_norm, &l->q_norm, &l->k_norm};
  for (int i = 0; i < 7; ++i) {
    *weights[i] = parts[i].weights;
    *biases[i] = *parts[i].bias;
  }
  for (int i = 0; i < 4; ++i) *vectors[i] = vector_of(norms[i]);
  l->eps = eps;
  l->heads = heads;
  l->kv_heads = kv_heads;
  l->dim = heads > 0 ? l->q->view().n / heads : 0;
  l->scale = scale;
  l->window = window;
  l->frequency = frequencies;
  l->check();
  return l;
}

void bind_layers(nb::module_& m) {
  // The pointer is bound, not the layer: with nanobind's <stl/shared_ptr.h> an operation would hold the Python object,
  // and its end on MLX's thread would take the GIL, which aborts the process where Python is shutting down.
  nb::class_<std::shared_ptr<const mtplx::Layer>>(m, "Layer", "One decoder layer of the Llama kind.");
  m.def("layer", &make_layer, "matrices"_a, "norms"_a, "eps"_a, "heads"_a, "kv_heads"_a, "scale"_a, "window"_a,
        "frequencies"_a,
        "matrices: q, k, v, o, gate, up, down. norms: input, post-attention, and of a query and key head, or None.\n"
        "window: positions that a query sees, 0 for all. frequencies: radians a position of each rotated pair.");
  nb::class_<Layers>(m, "Layers", "Layers run one after the other as one operation.")
      .def(
          "__init__",
          [](Layers* self, const mtplx::LayerList& layers, float eps, const std::optional<mx::array>& final_norm,
             const std::vector<int>& levels) {
            auto features = std::make_shared<mtplx::Features>();
            features->levels = levels;
            features->eps = eps;
            features->final_norm = vector_of(final_norm);
            if (layers.empty()) throw std::invalid_argument("no layers");
            const std::size_t hidden = layers.front()->hidden();
            if (!features->final_norm.empty() && features->final_norm.size() != hidden) {
              throw std::invalid_argument("the final norm does not fit the layers");
            }
            for (const int level : levels) {
              if (level < 1 || level > static_cast<int>(layers.size())) throw std::invalid_argument("no such level");
            }
            new (self) Layers{std::make_shared<const mtplx::LayerList>(layers), features};
          },
          "layers"_a, "eps"_a, "final_norm"_a = nb::none(), "levels"_a = std::vector<int>{})
      .def(
          "__call__",
          [](const Layers& self, const mx::array& x, int offset, const mx::array& caches) {
            return mtplx::run_op(self.list, self.features, x, offset, caches);
          },
          "x"_a, "offset"_a, "caches"_a,
          "x (B, R, D) -> (B, R, (1 + levels) D), caches: R rows of each of B sequences, all at the same positions. The\n"
          "caches, (layers, 2, B * kv_heads, T, dim) for keys and values, are written in place where nothing else\n"
          "holds them.")
      .def(
          "step",
          [](const Layers& self, const Matrix& embedding, const Matrix& output, const std::vector<std::int32_t>& tokens,
             int offset, const mx::array& caches) {
            return mtplx::step_trunk(*embedding.weights, *output.weights, *output.bias, *self.list, *self.features,
                                     tokens, offset, caches);
          },
          "embedding"_a, "output"_a, "tokens"_a, "offset"_a, "caches"_a, nb::call_guard<nb::gil_scoped_release>(),
          "tokens (R) of one sequence -> (R, (1 + levels) D), logits (R, V), caches: computed when it returns. The caches\n"
          "are written in place where no other array holds their memory; under a second name, this very array changes,\n"
          "too.");
}

void bind_head(nb::module_& m) {
  nb::class_<Head>(m, "Combine", "What an MTP head's layer reads: norms and projection of a state and an embedding.")
      .def(
          "__init__",
          [](Head* self, const Matrix& embedding, const std::vector<Matrix>& fc, const mx::array& embedding_norm,
             const mx::array& hidden_norm, float eps) {
            auto c = std::make_shared<mtplx::Combine>();
            c->embedding = embedding.weights;
            const int size = embedding.weights->view().k;
            for (const Matrix& part : fc) {
              if (part.weights->view().n != size || part.weights->view().k != size) {
                throw std::invalid_argument("each block of fc must be square and fit the embedding");
              }
              c->fc.push_back(part.weights);
            }
            if (c->fc.size() < 2) throw std::invalid_argument("fc has at least two blocks");
            c->embedding_norm = mtplx::to_vector(embedding_norm);
            c->hidden_norm = mtplx::to_vector(hidden_norm);
            for (const auto* norm : {&c->embedding_norm, &c->hidden_norm}) {
              if (static_cast<int>(norm->size()) != size) throw std::invalid_argument("a norm does not fit");
            }
            c->eps = eps;
            new (self) Head{c};
          },
          "embedding"_a, "fc"_a, "embedding_norm"_a, "hidden_norm"_a, "eps"_a)
      .def(
          "step",
          [](const Head& self, const Layers& layers, const mx::array& state, const std::vector<std::int32_t>& tokens,
             int offset, const mx::array& caches) {
            return mtplx::step_head(*self.combine, *layers.list, *layers.features, state, tokens, offset, caches);
          },
          "layers"_a, "state"_a, "tokens"_a, "offset"_a, "caches"_a, nb::call_guard<nb::gil_scoped_release>(),
          "state (R, F), tokens (R) -> (R, D), caches: computed when it returns. The caches are written in place where\n"
          "no other array holds their memory; under a second name, this very array changes, too.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "CPU kernels as MLX operations.";
  if (const char* asked = std::getenv("MTPLX_ISA"); asked != nullptr && *asked != '\0') {
    try {
      mtplx::choose(asked);
    } catch (const std::invalid_argument& e) {
      throw std::invalid_argument(std::string("MTPLX_ISA: ") + e.what());
    }
  }
  m.attr("mlx_version") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                          std::to_string(MLX_VERSION_PATCH);
  m.def("isa", [] { return std::string(mtplx::kernels().name); }, "The level of instructions in force.");
  m.def("levels", &mtplx::levels, "The levels that this machine has, best first.");
  m.def("choose", &mtplx::choose, "name"_a, "Takes a level from now on; ValueError for one that is not there.");
  m.def("set_threads", &mtplx::set_threads, "threads"_a);
  m.def("threads", &mtplx::threads);
  m.def("rows", &mtplx::rows_now, "x"_a, "first"_a, "last"_a, nb::call_guard<nb::gil_scoped_release>(),
        "x[first:last] as float32, computed when it returns.");
  m.def("raised", &mtplx::raise_now, "x"_a, "place"_a, "amount"_a, nb::call_guard<nb::gil_scoped_release>(),
        "x (..., n) as float32 with `amount` more at [..., place], computed when it returns.");
  bind_matrix(m);
  bind_layers(m);
  bind_head(m);
#ifdef MTPLX_WITH_LAW
  bind_law(m);
#endif
}

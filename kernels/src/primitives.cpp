#include "primitives.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"

namespace mtplx {
namespace {

mx::Stream cpu_stream() { return mx::default_stream(mx::Device::cpu); }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

class CpuPrimitive : public mx::Primitive {
 public:
  using Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + " has no GPU form");
  }
};

void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

// Row-contiguous x of a type; lazily, and itself where it is already.
mx::array plain(const mx::array& x, mx::Dtype type) {
  return mx::contiguous(mx::astype(x, type, cpu_stream()), false, cpu_stream());
}

class Multiply : public CpuPrimitive {
 public:
  Multiply(mx::Stream s, Weights weights, std::shared_ptr<const Vector> bias)
      : CpuPrimitive(s), weights_(std::move(weights)), bias_(std::move(bias)) {}
  const char* name() const override { return "MtplxMultiply"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    const int rows = static_cast<int>(inputs[0].size() / weights_->view().k);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([w = weights_, b = bias_, rows, x = inputs[0].data<float>(), out = outputs[0].data<float>()] {
      multiply(*w, *b, x, rows, out);
    });
  }

 private:
  Weights weights_;
  std::shared_ptr<const Vector> bias_;
};

class LookUp : public CpuPrimitive {
 public:
  LookUp(mx::Stream s, Weights weights) : CpuPrimitive(s), weights_(std::move(weights)) {}
  const char* name() const override { return "MtplxLookUp"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([w = weights_, rows = static_cast<int>(inputs[0].size()), ids = inputs[0].data<std::int32_t>(),
                      out = outputs[0].data<float>()] { look_up(*w, ids, rows, out); });
  }

 private:
  Weights weights_;
};

// Where the keys and values of each layer are in the array of them all, (layers, 2, sequences * kv_heads, room, dim).
std::vector<CacheView> views(float* caches, const mx::Shape& shape) {
  const std::size_t block = static_cast<std::size_t>(shape[2]) * shape[3] * shape[4];
  std::vector<CacheView> out;
  for (int i = 0; i < shape[0]; ++i) out.push_back({caches + 2 * i * block, caches + (2 * i + 1) * block, shape[3]});
  return out;
}

// The rows that are in use; the others hold nothing.
void copy_rows(const float* from, float* to, const mx::Shape& shape, int offset) {
  const std::size_t block = static_cast<std::size_t>(shape[3]) * shape[4];
  for (int i = 0; i < shape[0] * shape[1] * shape[2]; ++i) {
    std::memcpy(to + i * block, from + i * block, sizeof(float) * offset * shape[4]);
  }
}

int found_width(const LayerList& layers, const Features& features) {
  return layers.front()->hidden() * static_cast<int>(1 + features.levels.size());
}

// The caches go in and out alone: MLX lets an operation of several outputs write none of its inputs in place. What the
// layers give besides lies in `found` until `Found` takes it.
class Run : public CpuPrimitive {
 public:
  Run(mx::Stream s, std::shared_ptr<const LayerList> layers, std::shared_ptr<const Features> features, int offset,
      std::shared_ptr<Vector> found)
      : CpuPrimitive(s),
        layers_(std::move(layers)),
        features_(std::move(features)),
        offset_(offset),
        found_(std::move(found)) {}
  const char* name() const override { return "MtplxLayers"; }

  // inputs: x, the caches; output: the caches.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& before = inputs[1];
    const bool in_place = before.is_donatable() && before.flags().row_contiguous;
    if (in_place) {
      outputs[0].copy_shared_buffer(before);
    } else {
      allocate(outputs[0]);
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const Batch batch{inputs[0].shape(0), inputs[0].shape(1), offset_};
    encoder.dispatch([layers = layers_, features = features_, found = found_, batch, in_place, shape = before.shape(),
                      from = before.data<float>(), to = outputs[0].data<float>(),
                      x = inputs[0].data<float>()] {
      if (!in_place) copy_rows(from, to, shape, batch.offset);
      found->resize(static_cast<std::size_t>(batch.size()) * found_width(*layers, *features));
      run(*layers, x, batch, views(to, shape), *features, found->data());
    });
  }

 private:
  std::shared_ptr<const LayerList> layers_;
  std::shared_ptr<const Features> features_;
  int offset_;
  std::shared_ptr<Vector> found_;
};

class Found : public CpuPrimitive {
 public:
  Found(mx::Stream s, std::shared_ptr<const Vector> found) : CpuPrimitive(s), found_(std::move(found)) {}
  const char* name() const override { return "MtplxLayersFound"; }

  // input: the caches that `Run` has written.
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([found = found_, out = outputs[0].data<float>()] {
      std::memcpy(out, found->data(), sizeof(float) * found->size());
    });
  }

 private:
  std::shared_ptr<const Vector> found_;
};

mx::array ready(const mx::array& a) {
  mx::array out = mx::contiguous(a, false, cpu_stream());
  out.eval();
  return out;
}

// An array that is there, for the caller to fill.
mx::array empty(mx::Shape shape) {
  mx::array out(std::move(shape), mx::float32, nullptr, {});
  allocate(out);
  out.set_status(mx::array::Status::available);
  return out;
}

// Caches to write the rows behind `offset` of, on this thread: these where no other array holds their memory, else a copy.
mx::array own(const mx::array& caches, int offset) {
  mx::array(caches).eval();
  if (caches.is_donatable() && caches.flags().row_contiguous) return caches;
  const mx::array before = at_hand(caches);
  mx::array after = empty(caches.shape());
  copy_rows(before.data<float>(), after.data<float>(), after.shape(), offset);
  return after;
}

void check_caches(const LayerList& layers, const Batch& batch, const mx::array& caches) {
  const Layer& first = *layers.front();
  for (const auto& layer : layers) {
    if (layer->hidden() != first.hidden() || layer->kv_heads != first.kv_heads || layer->dim != first.dim) {
      refuse("the layers differ in their sizes");
    }
  }
  const auto fits = [&](int axis, int size) { return caches.shape(axis) == size; };
  if (caches.ndim() != 5 || !fits(0, static_cast<int>(layers.size())) || !fits(1, 2) || !fits(4, first.dim) || caches.dtype() != mx::float32) {
    refuse("the caches do not fit the layers");
  }
  if (!fits(2, batch.sequences * first.kv_heads)) {
    refuse("the caches are not of " + std::to_string(batch.sequences) + " sequences");
  }
  if (batch.offset < 0 || caches.shape(3) - batch.offset < batch.rows) refuse("the caches have no room for the rows");
}

void check_state(const Combine& head, const mx::array& state) {
  const int size = head.embedding->view().k;
  const int most = static_cast<int>(head.fc.size()) - 1;  // blocks of the state that fc has columns for
  const int width = state.ndim() == 0 ? 0 : state.shape(-1);
  if (width % size != 0 || width < size || width / size > most) refuse("the state does not fit the head");
}

ScaleType scale_type(mx::Dtype type) {
  if (type == mx::float32) return ScaleType::kFloat32;
  if (type == mx::float16) return ScaleType::kFloat16;
  if (type == mx::bfloat16) return ScaleType::kBfloat16;
  refuse("scales must be float32, float16 or bfloat16");
}

}  // namespace

mx::array at_hand(const mx::array& a) {
  if (a.is_tracer()) refuse("what is computed at once has no gradient");
  mx::array out = a.dtype() == mx::float32 ? a : mx::astype(a, mx::float32, cpu_stream());
  out.eval();
  return out.flags().row_contiguous ? out : ready(out);
}

Weights pack(const mx::array& w) {
  if (w.ndim() != 2) refuse("weights must be a matrix");
  const mx::array a = ready(w);
  Source s{};
  if (a.dtype() == mx::float32) {
    s.format = Format::kFloat32;
  } else if (a.dtype() == mx::float16) {
    s.format = Format::kFloat16;
  } else if (a.dtype() == mx::bfloat16) {
    s.format = Format::kBfloat16;
  } else {
    refuse("weights must be float32, float16 or bfloat16");
  }
  s.n = a.shape(0);
  s.k = a.shape(1);
  s.weights = a.data<void>();
  return std::make_shared<const Packed>(s);
}

Weights pack_quantized(const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits) {
  if (bits != 4 && bits != 8) refuse("only 4 and 8 bits can be packed");
  if (w.ndim() != 2 || w.dtype() != mx::uint32) refuse("packed weights must be a matrix of uint32");
  const mx::array a = ready(w), b = ready(scales), c = ready(biases);
  Source s{};
  s.format = bits == 4 ? Format::kQ4 : Format::kQ8;
  s.n = a.shape(0);
  s.k = a.shape(1) * (32 / bits);
  s.group = group;
  s.scale_type = scale_type(b.dtype());
  const mx::Shape expected{s.n, group > 0 ? s.k / group : 0};
  if (c.dtype() != b.dtype() || b.shape() != expected || c.shape() != expected) {
    refuse("scales and biases must have one number of one type for each group");
  }
  s.weights = a.data<void>();
  s.scales = b.data<void>();
  s.biases = c.data<void>();
  return std::make_shared<const Packed>(s);
}

Vector to_vector(const mx::array& a) {
  const mx::array ready_ = ready(mx::astype(a, mx::float32, cpu_stream()));
  return Vector(ready_.data<float>(), ready_.data<float>() + ready_.size());
}

mx::array multiply_op(const mx::array& x, const Weights& weights, const std::shared_ptr<const Vector>& bias) {
  if (x.ndim() == 0 || x.shape(-1) != weights->view().k) {
    refuse("the input's last axis must have " + std::to_string(weights->view().k) + " numbers");
  }
  mx::Shape shape = x.shape();
  shape.back() = weights->view().n;
  const auto s = cpu_stream();
  return mx::array(shape, mx::float32, std::make_shared<Multiply>(s, weights, bias), {plain(x, mx::float32)});
}

mx::array look_up_op(const Weights& weights, const mx::array& ids) {
  if (!mx::issubdtype(ids.dtype(), mx::integer)) refuse("ids must be integers");
  mx::Shape shape = ids.shape();
  shape.push_back(weights->view().k);
  const auto s = cpu_stream();
  return mx::array(shape, mx::float32, std::make_shared<LookUp>(s, weights), {plain(ids, mx::int32)});
}

std::pair<mx::array, mx::array> run_op(const std::shared_ptr<const LayerList>& layers,
                                       const std::shared_ptr<const Features>& features, const mx::array& x, int offset,
                                       const mx::array& caches) {
  const int hidden = layers->front()->hidden();
  if (x.ndim() != 3 || x.shape(2) != hidden) {
    refuse("x must be (sequences, rows, " + std::to_string(hidden) + ")");
  }
  check_caches(*layers, {x.shape(0), x.shape(1), offset}, caches);
  const mx::Shape out_shape{x.shape(0), x.shape(1), found_width(*layers, *features)};
  const auto found = std::make_shared<Vector>();
  const auto primitive = std::make_shared<Run>(cpu_stream(), layers, features, offset, found);
  const mx::array after(caches.shape(), mx::float32, primitive, {plain(x, mx::float32), caches});
  return {mx::array(out_shape, mx::float32, std::make_shared<Found>(cpu_stream(), found), {after}), after};
}

std::pair<mx::array, mx::array> step_head(const Combine& head, const LayerList& layers, const Features& features,
                                          const mx::array& state, const std::vector<std::int32_t>& tokens, int offset,
                                          const mx::array& caches) {
  check_state(head, state);
  const int rows = static_cast<int>(tokens.size()), size = head.embedding->view().k;
  if (state.ndim() != 2 || state.shape(0) != rows) refuse("one token a row of the state is needed");
  if (layers.front()->hidden() != size) refuse("the layers do not fit the head");
  const Batch batch{1, rows, offset};
  check_caches(layers, batch, caches);
  const mx::array from = at_hand(state);
  mx::array after = own(caches, offset), out = empty({rows, found_width(layers, features)});
  Vector x(static_cast<std::size_t>(rows) * size);
  combine(head, from.data<float>(), from.shape(1), tokens.data(), rows, x.data());
  run(layers, x.data(), batch, views(after.data<float>(), after.shape()), features, out.data<float>());
  return {out, after};
}

std::tuple<mx::array, mx::array, mx::array> step_trunk(const Packed& embedding, const Packed& output, const Vector& bias,
                                                       const LayerList& layers, const Features& features,
                                                       const std::vector<std::int32_t>& tokens, int offset,
                                                       const mx::array& caches) {
  const int rows = static_cast<int>(tokens.size()), hidden = layers.front()->hidden();
  if (embedding.view().k != hidden || output.view().k != hidden) refuse("embedding or output do not fit the layers");
  const Batch batch{1, rows, offset};
  check_caches(layers, batch, caches);
  mx::array after = own(caches, offset), found = empty({rows, found_width(layers, features)});
  mx::array logits = empty({rows, output.view().n});
  Vector x(static_cast<std::size_t>(rows) * hidden);
  look_up(embedding, tokens.data(), rows, x.data());
  run(layers, x.data(), batch, views(after.data<float>(), after.shape()), features, found.data<float>());
  multiply(output, bias, found.data<float>(), rows, logits.data<float>(), found.shape(1));
  return {found, logits, after};
}

mx::array multiply_now(const mx::array& x, const Weights& weights, const Vector& bias) {
  if (x.ndim() != 2 || x.shape(1) != weights->view().k) {
    refuse("x must be (rows, " + std::to_string(weights->view().k) + ")");
  }
  const mx::array from = at_hand(x);
  mx::array out = empty({x.shape(0), weights->view().n});
  multiply(*weights, bias, from.data<float>(), x.shape(0), out.data<float>());
  return out;
}

mx::array rows_now(const mx::array& x, int first, int last) {
  if (x.ndim() == 0 || first < 0 || last < first || last > x.shape(0)) refuse("there are no such rows");
  const mx::array from = at_hand(x);
  mx::Shape shape = from.shape();
  shape[0] = last - first;
  mx::array out = empty(std::move(shape));
  const std::size_t width = from.shape(0) > 0 ? from.size() / from.shape(0) : 0;
  std::memcpy(out.data<float>(), from.data<float>() + first * width, out.nbytes());
  return out;
}

mx::array raise_now(const mx::array& x, int place, float amount) {
  if (x.ndim() == 0 || place < 0 || place >= x.shape(-1)) refuse("there is no such place");
  const mx::array from = at_hand(x);
  mx::array out = empty(from.shape());
  std::memcpy(out.data<float>(), from.data<float>(), out.nbytes());
  for (std::size_t i = place; i < out.size(); i += out.shape(-1)) out.data<float>()[i] += amount;
  return out;
}

mx::array join_now(const mx::array& logits, const mx::array& x, const Weights& weights, int row) {
  const MatrixView& m = weights->view();
  if (row < 0 || row >= m.n) refuse("there is no such row");
  if (logits.ndim() != 2 || x.ndim() != 2 || x.shape(1) != m.k || x.shape(0) != logits.shape(0)) {
    refuse("logits must be (R, V) and x (R, " + std::to_string(m.k) + ")");
  }
  const mx::array from = at_hand(logits), states = at_hand(x);
  const std::size_t size = from.shape(1), k = m.k;
  Vector weight(k);
  const std::int32_t id = row;
  look_up(*weights, &id, 1, weight.data());
  mx::array out = empty({from.shape(0), from.shape(1) + 1});
  for (int r = 0; r < from.shape(0); ++r) {
    const float* state = states.data<float>() + r * k;
    float* to = std::copy_n(from.data<float>() + r * size, size, out.data<float>() + r * (size + 1));
    *to = static_cast<float>(std::inner_product(weight.begin(), weight.end(), state, 0.0));
  }
  return out;
}

}  // namespace mtplx

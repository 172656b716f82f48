#include "primitives.hpp"

#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

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

class Run : public CpuPrimitive {
 public:
  Run(mx::Stream s, std::shared_ptr<const LayerList> layers, std::shared_ptr<const Features> features, int offset)
      : CpuPrimitive(s), layers_(std::move(layers)), features_(std::move(features)), offset_(offset) {}
  const char* name() const override { return "MtplxLayers"; }

  // inputs: x, then keys and values of each layer in turn; outputs likewise.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    const int rows = inputs[0].shape(1);
    std::vector<CacheView> caches;
    struct Move {
      const float* from;
      float* to;
      mx::Shape shape;
      mx::Strides strides;
    };
    std::vector<Move> moves;
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      const mx::array& in = inputs[i];
      mx::array& out = outputs[i];
      if (in.is_donatable() && in.flags().row_contiguous) {
        out.copy_shared_buffer(in);
      } else {
        allocate(out);
        moves.push_back({in.data<float>(), out.data<float>(), in.shape(), in.strides()});
      }
      if (i % 2 == 1) caches.push_back({out.data<float>(), nullptr, in.shape(2)});
      if (i % 2 == 0) caches.back().values = out.data<float>();
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([layers = layers_, features = features_, offset = offset_, rows, caches = std::move(caches),
                      moves = std::move(moves), x = inputs[0].data<float>(), out = outputs[0].data<float>()] {
      for (const Move& m : moves) {  // rows that are in use; the others hold nothing
        for (int h = 0; h < m.shape[1]; ++h) {
          for (int t = 0; t < offset; ++t) {
            const float* from = m.from + h * m.strides[1] + t * m.strides[2];
            float* to = m.to + (static_cast<std::size_t>(h) * m.shape[2] + t) * m.shape[3];
            for (int d = 0; d < m.shape[3]; ++d) to[d] = from[d * m.strides[3]];
          }
        }
      }
      run(*layers, x, rows, offset, caches, *features, out);
    });
  }

 private:
  std::shared_ptr<const LayerList> layers_;
  std::shared_ptr<const Features> features_;
  int offset_;
};

class CombineOp : public CpuPrimitive {
 public:
  CombineOp(mx::Stream s, std::shared_ptr<const Combine> head) : CpuPrimitive(s), head_(std::move(head)) {}
  const char* name() const override { return "MtplxCombine"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([head = head_, rows = inputs[0].shape(1), width = inputs[0].shape(2),
                      state = inputs[0].data<float>(), tokens = inputs[1].data<std::int32_t>(),
                      out = outputs[0].data<float>()] { combine(*head, state, width, tokens, rows, out); });
  }

 private:
  std::shared_ptr<const Combine> head_;
};

mx::array ready(const mx::array& a) {
  mx::array out = mx::contiguous(a, false, cpu_stream());
  out.eval();
  return out;
}

ScaleType scale_type(mx::Dtype type) {
  if (type == mx::float32) return ScaleType::kFloat32;
  if (type == mx::float16) return ScaleType::kFloat16;
  if (type == mx::bfloat16) return ScaleType::kBfloat16;
  refuse("scales must be float32, float16 or bfloat16");
}

}  // namespace

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

RunResult run_op(const std::shared_ptr<const LayerList>& layers, const std::shared_ptr<const Features>& features,
                 const mx::array& x, int offset, const std::vector<mx::array>& keys,
                 const std::vector<mx::array>& values) {
  const std::size_t count = layers->size();
  if (count == 0 || keys.size() != count || values.size() != count) refuse("one cache a layer is needed");
  const int hidden = layers->front()->hidden();
  if (x.ndim() != 3 || x.shape(0) != 1 || x.shape(2) != hidden) {
    refuse("x must be (1, rows, " + std::to_string(hidden) + ")");
  }
  const int rows = x.shape(1);
  std::vector<mx::array> inputs{plain(x, mx::float32)};
  const mx::Shape out_shape{1, rows, hidden * static_cast<int>(1 + features->levels.size())};
  std::vector<mx::Shape> shapes{out_shape};
  for (std::size_t i = 0; i < count; ++i) {
    const Layer& l = *(*layers)[i];
    if (l.hidden() != hidden) refuse("the layers differ in their hidden size");
    for (const mx::array* a : {&keys[i], &values[i]}) {
      if (a->ndim() != 4 || a->shape(0) != 1 || a->shape(1) != l.kv_heads || a->shape(3) != l.dim ||
          a->dtype() != mx::float32 || a->shape(2) != keys[i].shape(2)) {
        refuse("a cache does not fit its layer");
      }
      if (offset < 0 || a->shape(2) - offset < rows) refuse("a cache has no room for the rows");
      inputs.push_back(*a);
      shapes.push_back(a->shape());
    }
  }
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  const auto primitive = std::make_shared<Run>(cpu_stream(), layers, features, offset);
  std::vector<mx::array> outputs = mx::array::make_arrays(std::move(shapes), types, primitive, inputs);
  RunResult result{outputs[0], {}, {}};
  for (std::size_t i = 1; i < outputs.size(); ++i) (i % 2 == 1 ? result.keys : result.values).push_back(outputs[i]);
  return result;
}

mx::array combine_op(const std::shared_ptr<const Combine>& head, const mx::array& state, const mx::array& tokens) {
  const int size = head->embedding->view().k;
  const int most = static_cast<int>(head->fc.size()) - 1;  // blocks of the state that fc has columns for
  if (state.ndim() != 3 || state.shape(0) != 1 || state.shape(2) % size != 0 || state.shape(2) < size ||
      state.shape(2) / size > most) {
    refuse("the state does not fit the head");
  }
  if (tokens.ndim() != 2 || tokens.shape(0) != 1 || tokens.shape(1) != state.shape(1)) {
    refuse("one token a row of the state is needed");
  }
  const auto s = cpu_stream();
  return mx::array(mx::Shape{1, state.shape(1), size}, mx::float32, std::make_shared<CombineOp>(s, head),
                   {plain(state, mx::float32), plain(tokens, mx::int32)});
}

}  // namespace mtplx

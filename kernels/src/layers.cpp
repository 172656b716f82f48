#include "layers.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention.hpp"
#include "dispatch.hpp"
#include "phases.hpp"

namespace mtplx {
namespace {

// Writes values + bias to out.
void put(const float* values, const Vector& bias, int first, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = bias.empty() ? values[i] : values[i] + bias[first + i];
}

void add(const float* values, const Vector& bias, int first, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] += bias.empty() ? values[i] : values[i] + bias[first + i];
}

void norm(const float* x, const Vector& weight, float eps, int n, float* y) {
  kernels().rms_norm(x, weight.empty() ? nullptr : weight.data(), eps, n, y);
}

// Gate and up in one phase: the tile that has the one has the other, too.
void gated(const Layer& l, const float* x, int rows, float* inner) {
  const int n = l.inner(), hidden = l.hidden();
  const MatrixView &gate = l.gate->view(), &up = l.up->view();
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  const std::uint64_t phase = next_phase();
  const auto source = [&](int r, float* to) {
    norm(x + static_cast<std::size_t>(r) * hidden, l.post_norm, l.eps, hidden, to);
  };
  share(gate.panels * blocks, [&](int tile) {
    const int block = tile / gate.panels, panel = tile % gate.panels;
    const int top = block * kRowBlock, height = std::min(rows - top, kRowBlock);
    const int first = panel * kPanel, count = std::min(n - first, kPanel);
    alignas(64) float out[2][kRowBlock * kPanel];
    const Prepared* p = &prepare_block(gate, phase, block, rows, source);
    kernels().product(gate, panel, 0, kPanel, height, p->inputs, p->sums, out[0]);
    p = &prepare_block(up, phase, block, rows, source);
    kernels().product(up, panel, 0, kPanel, height, p->inputs, p->sums, out[1]);
    for (int r = 0; r < height; ++r) {
      float *g = out[0] + r * kPanel, *u = out[1] + r * kPanel;
      put(g, l.gate_bias, first, count, g);
      put(u, l.up_bias, first, count, u);
      kernels().swiglu(g, u, count, inner + static_cast<std::size_t>(top + r) * n + first);
    }
  });
}

void one_layer(const Layer& l, float* x, const Batch& batch, const CacheView& cache, const Angles& angles,
               Workspace& w) {
  const int rows = batch.size();
  const int hidden = l.hidden(), queries = l.heads * l.dim, kv = l.kv_heads * l.dim, width = queries + 2 * kv;
  const auto normed = [&](int r, float* to) {
    norm(x + static_cast<std::size_t>(r) * hidden, l.input_norm, l.eps, hidden, to);
  };
  const int starts[] = {0, queries, queries + kv};
  const Vector* biases[] = {&l.q_bias, &l.k_bias, &l.v_bias};
  float* qkv = w.qkv.data();
  products({l.q.get(), l.k.get(), l.v.get()}, rows, normed, [&](int m, int r, int first, int count, const float* out) {
    put(out, *biases[m], first, count, qkv + static_cast<std::size_t>(r) * width + starts[m] + first);
  });
  const Attention attention(l, qkv, batch, cache, angles, w.partial);
  const auto attended = [&](int r, float* to) { attention.row(r, to); };
  const auto onto_x = [&](const Vector& bias) {
    return [&, b = &bias](int, int r, int first, int count, const float* out) {
      add(out, *b, first, count, x + static_cast<std::size_t>(r) * hidden + first);
    };
  };
  products({l.o.get()}, rows, attended, onto_x(l.o_bias));
  float* inner = w.inner.data();
  gated(l, x, rows, inner);
  const auto wide = [&](int r, float* to) {
    std::memcpy(to, inner + static_cast<std::size_t>(r) * l.inner(), sizeof(float) * l.inner());
  };
  products({l.down.get()}, rows, wide, onto_x(l.down_bias));
}

void expect(bool right, const char* what) {
  if (!right) throw std::invalid_argument(std::string("the layer's ") + what);
}

bool fits(const Vector& v, int n) { return v.empty() || static_cast<int>(v.size()) == n; }

}  // namespace

void Layer::check() const {
  for (const Weights* part : {&q, &k, &v, &o, &gate, &up, &down}) expect(*part != nullptr, "weights are incomplete");
  const int width = hidden();
  expect(heads > 0 && kv_heads > 0 && dim > 0 && heads % kv_heads == 0, "heads do not divide");
  expect(q->view().n == heads * dim, "q_proj does not fit its heads");
  for (const Weights* part : {&k, &v}) {
    expect((*part)->view().n == kv_heads * dim && (*part)->view().k == width, "k_proj or v_proj does not fit");
  }
  expect(o->view().k == heads * dim && o->view().n == width, "o_proj does not fit");
  expect(gate->view().k == width && up->view().k == width && up->view().n == inner(), "gate or up does not fit");
  expect(down->view().k == inner() && down->view().n == width, "down_proj does not fit");
  expect(fits(q_bias, heads * dim) && fits(k_bias, kv_heads * dim) && fits(v_bias, kv_heads * dim), "bias");
  expect(fits(o_bias, width) && fits(gate_bias, inner()) && fits(up_bias, inner()) && fits(down_bias, width), "bias");
  expect(fits(input_norm, width) && fits(post_norm, width), "norm does not fit");
  expect(fits(q_norm, dim) && fits(k_norm, dim), "head norm does not fit");
  expect(static_cast<int>(frequency.size()) * 2 <= dim && window >= 0, "rotation does not fit");
}

void multiply(const Packed& weights, const Vector& bias, const float* x, int rows, float* out, int stride) {
  const int k = weights.view().k;
  const std::size_t n = weights.view().n, apart = stride > 0 ? stride : k;
  const auto source = [&](int r, float* to) { std::memcpy(to, x + r * apart, sizeof(float) * k); };
  products({&weights}, rows, source, [&](int, int r, int first, int count, const float* values) {
    put(values, bias, first, count, out + r * n + first);
  });
}

void look_up(const Packed& weights, const std::int32_t* ids, int rows, float* out) {
  const MatrixView& m = weights.view();
  share(rows, [&](int r) {
    float* to = out + static_cast<std::size_t>(r) * m.k;
    if (ids[r] >= 0 && ids[r] < m.n) {
      kernels().unpack_row(m, ids[r], to);
    } else {
      for (int i = 0; i < m.k; ++i) to[i] = std::numeric_limits<float>::quiet_NaN();
    }
  });
}

void run(const std::vector<std::shared_ptr<const Layer>>& layers, const float* input, const Batch& batch,
         const std::vector<CacheView>& caches, const Features& features, float* out) {
  const int rows = batch.size();
  if (rows == 0) return;
  const int hidden = layers.front()->hidden();
  const std::size_t width = hidden * (1 + features.levels.size());
  Workspace w;
  std::vector<float> x(input, input + static_cast<std::size_t>(rows) * hidden);
  const Angles* angles = nullptr;
  std::vector<Angles> tables;
  tables.reserve(layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Layer& l = *layers[i];
    if (angles == nullptr || !angles->serves(l.frequency)) {
      angles = &tables.emplace_back(l.frequency, batch.offset, batch.rows);
    }
    w.fit(l, batch);
    one_layer(l, x.data(), batch, caches[i], *angles, w);
    for (std::size_t place = 0; place < features.levels.size(); ++place) {
      if (features.levels[place] != static_cast<int>(i) + 1) continue;
      for (int r = 0; r < rows; ++r) {
        kernels().rms_norm(x.data() + static_cast<std::size_t>(r) * hidden, nullptr, features.eps, hidden,
                           out + r * width + (1 + place) * hidden);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const float* row = x.data() + static_cast<std::size_t>(r) * hidden;
    if (features.final_norm.empty()) {
      std::memcpy(out + r * width, row, sizeof(float) * hidden);
    } else {
      norm(row, features.final_norm, features.eps, hidden, out + r * width);
    }
  }
}

void combine(const Combine& head, const float* state, int width, const std::int32_t* tokens, int rows, float* out) {
  const int size = head.embedding->view().k;
  std::vector<float> embedded(static_cast<std::size_t>(rows) * size);
  look_up(*head.embedding, tokens, rows, embedded.data());
  std::fill(out, out + static_cast<std::size_t>(rows) * size, 0.0f);
  // Block by block of the input, each added to the sum of those before.
  for (std::size_t part = 0; part < head.fc.size() && static_cast<int>(part) <= width / size; ++part) {
    const auto source = [&](int r, float* to) {
      if (part == 0) {
        norm(embedded.data() + static_cast<std::size_t>(r) * size, head.embedding_norm, head.eps, size, to);
      } else {
        const float* from = state + static_cast<std::size_t>(r) * width + (part - 1) * size;
        if (part == 1) {
          norm(from, head.hidden_norm, head.eps, size, to);
        } else {
          std::memcpy(to, from, sizeof(float) * size);
        }
      }
    };
    products({head.fc[part].get()}, rows, source, [&](int, int r, int first, int count, const float* values) {
      add(values, {}, first, count, out + static_cast<std::size_t>(r) * size + first);
    });
  }
}

}  // namespace mtplx

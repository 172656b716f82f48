// Runs the kernels without Python, for the sanitizers: odd shapes, every level, several threads; a row must have the same
// bits in any company. Exit status 0 if all is right.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "dispatch.hpp"
#include "layers.hpp"

namespace {

using mtplx::Format;
using mtplx::Packed;
using mtplx::ScaleType;
using mtplx::Source;
using mtplx::Weights;

int failures = 0;
std::mt19937 engine(1);

void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s\n", what.c_str());
}

std::vector<float> numbers(std::size_t n, float size = 1.0f) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> out(n);
  for (float& v : out) v = normal(engine);
  return out;
}

Weights quantized(int n, int k, Format format, int group) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(n) * k / elements_per_word(format));
  for (auto& w : words) w = static_cast<std::uint32_t>(engine());
  const std::vector<float> scales = numbers(static_cast<std::size_t>(n) * k / group, 0.01f);
  const std::vector<float> biases = numbers(scales.size(), 0.02f);
  return std::make_shared<Packed>(
      Source{format, n, k, words.data(), group, ScaleType::kFloat32, scales.data(), biases.data()});
}

Weights dense(int n, int k) {
  const std::vector<float> w = numbers(static_cast<std::size_t>(n) * k, 0.1f);
  return std::make_shared<Packed>(Source{Format::kFloat32, n, k, w.data()});
}

void check_product(const Weights& weights, int rows, const std::string& name) {
  const int n = weights->view().n, k = weights->view().k;
  const std::vector<float> x = numbers(static_cast<std::size_t>(rows) * k);
  std::vector<float> out(static_cast<std::size_t>(rows) * n), one(n), row(k);
  mtplx::multiply(*weights, {}, x.data(), rows, out.data());
  for (int r = 0; r < rows; ++r) {
    mtplx::multiply(*weights, {}, x.data() + static_cast<std::size_t>(r) * k, 1, one.data());
    expect(std::memcmp(one.data(), out.data() + static_cast<std::size_t>(r) * n, sizeof(float) * n) == 0,
           name + ": a row differs alone");
  }
  for (int j = 0; j < n; j += 7) {
    const std::int32_t id = j;
    mtplx::look_up(*weights, &id, 1, row.data());
    double sum = 0.0, size = 0.0;
    for (int i = 0; i < k; ++i) {
      sum += static_cast<double>(row[i]) * x[i];
      size += std::fabs(static_cast<double>(row[i]) * x[i]);
    }
    expect(std::fabs(sum - out[j]) <= 2e-5 * (size + 1.0), name + ": a product is wrong");
  }
}

std::shared_ptr<mtplx::Layer> layer(int hidden, int heads, int kv_heads, int dim, int inner, int window) {
  auto l = std::make_shared<mtplx::Layer>();
  l->heads = heads;
  l->kv_heads = kv_heads;
  l->dim = dim;
  l->window = window;
  l->scale = 1.0f / std::sqrt(static_cast<float>(dim));
  l->q = quantized(heads * dim, hidden, Format::kQ4, 32);
  l->k = quantized(kv_heads * dim, hidden, Format::kQ8, 32);
  l->v = dense(kv_heads * dim, hidden);
  l->o = dense(hidden, heads * dim);
  l->gate = quantized(inner, hidden, Format::kQ4, 32);
  l->up = quantized(inner, hidden, Format::kQ8, 64);
  l->down = quantized(hidden, inner, Format::kQ4, 32);
  l->q_bias = numbers(heads * dim);
  l->input_norm = numbers(hidden);
  l->q_norm = l->k_norm = numbers(dim);
  for (int i = 0; i < dim / 2; ++i) l->frequency.push_back(std::pow(10000.0, -2.0 * i / dim));
  l->check();
  return l;
}

// The same rows in steps of other sizes, in a cache with other room: the same bits.
void check_layers(int window, const std::string& name) {
  const int hidden = 128, length = 300;
  std::vector<std::shared_ptr<const mtplx::Layer>> layers;
  for (int i = 0; i < 2; ++i) layers.push_back(layer(hidden, 6, 2, 24, 192, window));
  const std::vector<float> x = numbers(static_cast<std::size_t>(length) * hidden);
  const mtplx::Features features{{1}, 1e-5f, numbers(hidden)};
  std::vector<std::vector<float>> results;
  for (const int step : {300, 1, 5, 8, 9, 64}) {
    const int capacity = length + step;
    std::vector<std::vector<float>> memory(4, std::vector<float>(static_cast<std::size_t>(2) * capacity * 24, NAN));
    std::vector<mtplx::CacheView> caches;
    for (int i = 0; i < 2; ++i) caches.push_back({memory[2 * i].data(), memory[2 * i + 1].data(), capacity});
    std::vector<float> out(static_cast<std::size_t>(length) * hidden * 2);
    for (int at = 0; at < length; at += step) {
      const int rows = std::min(step, length - at);
      mtplx::run(layers, x.data() + static_cast<std::size_t>(at) * hidden, rows, at, caches, features,
                 out.data() + static_cast<std::size_t>(at) * hidden * 2);
    }
    results.push_back(out);
    bool finite = true;
    for (const float v : out) finite = finite && std::isfinite(v);
    expect(finite, name + ": not finite in steps of " + std::to_string(step));
    expect(std::memcmp(out.data(), results[0].data(), sizeof(float) * out.size()) == 0,
           name + ": differs in steps of " + std::to_string(step));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 4, rounds = argc > 2 ? std::atoi(argv[2]) : 1;
  mtplx::set_threads(threads);
  for (int round = 0; round < rounds; ++round) {
    for (const std::string& level : mtplx::levels()) {
      mtplx::choose(level);
      for (const int rows : {1, 2, 3, 4, 5, 7, 8, 33}) {
        for (const int group : {32, 64, 128}) {
          check_product(quantized(70, 256, Format::kQ4, group), rows, level + " 4 bits");
          check_product(quantized(129, 128, Format::kQ8, group), rows, level + " 8 bits");
        }
        check_product(dense(65, 37), rows, level + " float32");
      }
      check_layers(0, level + " layers");
      check_layers(50, level + " window");
    }
  }
  // Two callers at once: the second does its work alone.
  const Weights weights = quantized(640, 256, Format::kQ4, 32);
  std::thread other([&] {
    for (int i = 0; i < 50; ++i) mtplx::multiply(*weights, {}, std::vector<float>(256, 1.0f).data(), 1, std::vector<float>(640).data());
  });
  const std::vector<float> x(256, 1.0f);
  std::vector<float> out(640);
  for (int i = 0; i < 50; ++i) mtplx::multiply(*weights, {}, x.data(), 1, out.data());
  other.join();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

// Runs the kernels without Python, for the sanitizers and on emulated processors: odd shapes, every level, several
// threads; a row must have the same bits in any company, and nearly the same numbers on every level. Exit status 0 if
// all is right.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "dispatch.hpp"
#include "law.cpp"  // no library has it without MLX
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

// The nearest bfloat16, or a float16 that is close: both are only inputs here.
std::uint16_t bfloat_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
}

std::uint16_t half_of(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000u : 0u);
  const float size = std::fabs(value);
  if (size < 0x1p-14f) return sign | static_cast<std::uint16_t>(size * 0x1p24f);  // subnormal
  int exponent;
  const float fraction = std::frexp(size, &exponent) * 2.0f - 1.0f;
  return sign | static_cast<std::uint16_t>(((exponent + 14) << 10) + static_cast<int>(fraction * 1024.0f));
}

std::vector<std::uint16_t> halves(const std::vector<float>& values, std::uint16_t (*narrow)(float)) {
  std::vector<std::uint16_t> out(values.size());
  std::transform(values.begin(), values.end(), out.begin(), narrow);
  return out;
}

Weights quantized(int n, int k, Format format, int group, ScaleType type = ScaleType::kFloat32) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(n) * k / elements_per_word(format));
  for (auto& w : words) w = static_cast<std::uint32_t>(engine());
  const std::vector<float> scales = numbers(static_cast<std::size_t>(n) * k / group, 0.01f);
  const std::vector<float> biases = numbers(scales.size(), 0.02f);
  if (type == ScaleType::kFloat32) {
    return std::make_shared<Packed>(Source{format, n, k, words.data(), group, type, scales.data(), biases.data()});
  }
  const auto narrow = type == ScaleType::kFloat16 ? half_of : bfloat_of;
  const std::vector<std::uint16_t> s = halves(scales, narrow), b = halves(biases, narrow);
  return std::make_shared<Packed>(Source{format, n, k, words.data(), group, type, s.data(), b.data()});
}

Weights dense(int n, int k, Format format = Format::kFloat32) {
  const std::vector<float> w = numbers(static_cast<std::size_t>(n) * k, 0.1f);
  if (format == Format::kFloat32) return std::make_shared<Packed>(Source{format, n, k, w.data()});
  const std::vector<std::uint16_t> narrow = halves(w, format == Format::kFloat16 ? half_of : bfloat_of);
  return std::make_shared<Packed>(Source{format, n, k, narrow.data()});
}

// whole: over whole numbers with the largest of 16 bits in every group, which are not rounded, so that sums are closer.
void check_product(const Weights& weights, int rows, const std::string& name, bool whole = false) {
  const int n = weights->view().n, k = weights->view().k;
  std::vector<float> x = numbers(static_cast<std::size_t>(rows) * k);
  for (std::size_t i = 0; whole && i < x.size(); ++i) {
    x[i] = i % 32 == 5 ? std::copysign(32767.0f, x[i]) : std::nearbyint(std::clamp(1e4f * x[i], -32767.0f, 32767.0f));
  }
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
    expect(std::fabs(sum - out[j]) <= (whole ? 1e-6 : 2e-5) * (size + 1.0), name + ": a product is wrong");
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

using Layers = std::vector<std::shared_ptr<const mtplx::Layer>>;

// The outputs and features of `length` rows of each sequence, `step` at a time, in caches whose room depends on it.
std::vector<float> run_layers(const Layers& layers, const std::vector<float>& x, int length, int step, int sequences = 1) {
  const int hidden = layers[0]->hidden(), dim = layers[0]->dim, capacity = length + step;
  const mtplx::Features features{{1}, 1e-5f, mtplx::Vector(hidden, 1.5f)};
  std::vector<std::vector<float>> memory(4, std::vector<float>(static_cast<std::size_t>(2) * sequences * capacity * dim, NAN));
  std::vector<mtplx::CacheView> caches;
  for (int i = 0; i < 2; ++i) caches.push_back({memory[2 * i].data(), memory[2 * i + 1].data(), capacity});
  std::vector<float> out(static_cast<std::size_t>(sequences) * length * hidden * 2);
  for (int at = 0; at < length; at += step) {
    const int rows = std::min(step, length - at), size = rows * hidden;
    std::vector<float> part, found(static_cast<std::size_t>(sequences) * size * 2);
    for (int s = 0; s < sequences; ++s) {
      const auto from = x.begin() + (s * length + at) * hidden;
      part.insert(part.end(), from, from + size);
    }
    mtplx::run(layers, part.data(), {sequences, rows, at}, caches, features, found.data());
    for (int s = 0; s < sequences; ++s) {
      std::copy_n(found.begin() + s * size * 2, size * 2, out.begin() + (s * length + at) * hidden * 2);
    }
  }
  return out;
}

// The same rows in steps of other sizes, or beside other sequences: the same bits. On another level: nearly the same numbers. With NaN in a row:
// NaN in all that see it, and the same bits before it.
void check_layers(int window, int dim, const std::string& level) {
  const std::string name = level + (window == 0 ? " layers" : " window") + " of heads of " + std::to_string(dim);
  const int hidden = 128, length = 300, broken = 130;
  static std::map<std::pair<int, int>, std::vector<float>> first;
  engine.seed(7);  // the same numbers for every level
  Layers layers;
  for (int i = 0; i < 2; ++i) layers.push_back(layer(hidden, 6, 2, dim, 192, window));
  std::vector<float> x = numbers(static_cast<std::size_t>(length) * hidden);
  const std::vector<float> expected = run_layers(layers, x, length, 300);
  for (const float v : expected) {
    if (!std::isfinite(v)) return expect(false, name + ": not finite");
  }
  for (const int step : {1, 5, 8, 9, 64}) {
    const std::vector<float> out = run_layers(layers, x, length, step);
    expect(std::memcmp(out.data(), expected.data(), sizeof(float) * out.size()) == 0,
           name + ": differs in steps of " + std::to_string(step));
  }
  for (const int step : {1, 20}) {  // the same rows as three sequences
    const std::vector<float> out = run_layers(layers, x, length / 3, step, 3);
    for (int s = 0; s < 3; ++s) {
      const auto from = x.begin() + s * length / 3 * hidden;
      const std::vector<float> alone = run_layers(layers, {from, from + length / 3 * hidden}, length / 3, length);
      expect(std::memcmp(out.data() + s * alone.size(), alone.data(), sizeof(float) * alone.size()) == 0,
             name + ": a sequence differs alone, in steps of " + std::to_string(step));
    }
  }
  std::vector<float>& other = first[{window, dim}];
  if (other.empty()) other = expected;
  float largest = 0.0f, size = 0.0f;
  for (std::size_t i = 0; i < other.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i] - other[i]));
    size = std::max(size, std::fabs(other[i]));
  }
  // A last place more or less can round an activation to the next whole number.
  expect(largest < 3e-4f * size, name + ": off the first level by " + std::to_string(largest));

  x[static_cast<std::size_t>(broken) * hidden + 3] = NAN;
  for (const int step : {300, 8}) {
    const std::vector<float> out = run_layers(layers, x, length, step);
    const std::size_t before = static_cast<std::size_t>(broken) * hidden * 2;
    expect(std::memcmp(out.data(), expected.data(), sizeof(float) * before) == 0, name + ": NaN reached earlier rows");
    const std::size_t seen = before + (window == 0 ? length - broken : window) * static_cast<std::size_t>(hidden) * 2;
    expect(std::all_of(out.begin() + before, out.begin() + seen, [](float v) { return std::isnan(v); }),
           name + ": a row that sees NaN is a number");
  }
}

// Candidates in exact order, enough of them, and the mass, for one row of logits.
void check_law_row(const std::vector<float>& row, const mtplx::LawRequest& request, mtplx::LawIsa isa,
                   const std::string& name) {
  static mtplx::LawScratch scratch;
  mtplx::LawRow found;
  mtplx::law_row(row.data(), row.size(), request, isa, scratch, found);
  std::vector<std::uint32_t> order(row.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return row[a] > row[b]; });
  expect(!found.ids.empty() && std::equal(found.ids.begin(), found.ids.end(), order.begin()), name + ": wrong order");
  double mass = 0.0, kept = 0.0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const double weight = std::exp((static_cast<double>(row[order[i]]) - row[order[0]]) / request.temperature);
    mass += weight;
    if (i < found.ids.size()) kept += weight;
  }
  expect(std::fabs(found.mass - mass) <= 2e-7 * mass, name + ": the mass is wrong");
  const bool all = request.top_k > 0 && static_cast<std::size_t>(request.top_k) == found.ids.size();
  expect(all || kept >= request.top_p * mass, name + ": too few candidates");
  mtplx::Law law;
  mtplx::finish_law(found, request, scratch, law);
  const double sum = std::accumulate(law.probs.begin(), law.probs.end(), 0.0);
  const bool positive = std::all_of(law.probs.begin(), law.probs.end(), [](double p) { return p > 0.0; });
  expect(positive && std::fabs(sum - 1.0) <= 1e-12, name + ": the law is none");
  expect(std::adjacent_find(law.ids.begin(), law.ids.end(), std::greater_equal<>()) == law.ids.end(),
         name + ": ids do not ascend");
}

void check_law() {
  using mtplx::LawIsa;
  for (const LawIsa isa : {LawIsa::portable, LawIsa::avx2, LawIsa::avx512}) {
    if (!mtplx::law_isa_available(isa)) continue;
    const std::string name = "law " + std::to_string(static_cast<int>(isa));
    for (const int size : {1, 63, 64, 65, 127, 4101}) {
      for (const double temperature : {0.02, 0.6, 1.0, 3.0, 1e-35}) {
        const std::vector<float> row = numbers(size, 4.0f);
        for (const mtplx::LawRequest& request : {mtplx::LawRequest{temperature, 0.9, 0.0, 0},
                                                 mtplx::LawRequest{temperature, 0.95, 0.0, 20},
                                                 mtplx::LawRequest{temperature, 1.0, 1e-30, 0}}) {
          check_law_row(row, request, isa, name + ", size " + std::to_string(size));
        }
      }
      std::vector<float> row = numbers(size, 4.0f);
      row[size / 2] = NAN;
      mtplx::LawScratch scratch;
      mtplx::LawRow found;
      mtplx::law_row(row.data(), row.size(), {}, isa, scratch, found);
      expect(found.nan == 1 && found.inf == 0 && found.ids.empty(), name + ": NaN was missed");
    }
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
          for (const bool whole : {false, true}) {
            check_product(quantized(70, 256, Format::kQ4, group), rows, level + " 4 bits", whole);
            check_product(quantized(129, 128, Format::kQ8, group), rows, level + " 8 bits", whole);
          }
        }
        check_product(quantized(70, 64, Format::kQ4, 32, ScaleType::kFloat16), rows, level + " float16 scales");
        check_product(quantized(70, 64, Format::kQ8, 64, ScaleType::kBfloat16), rows, level + " bfloat16 scales");
        check_product(dense(65, 37), rows, level + " float32");
        check_product(dense(65, 37, Format::kFloat16), rows, level + " float16");
        check_product(dense(65, 37, Format::kBfloat16), rows, level + " bfloat16");
      }
      for (const int window : {0, 50}) {
        for (const int dim : {24, 22}) check_layers(window, dim, level);  // 22: vectors of any length end before a head does
      }
    }
    check_law();
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
  for (const std::string& level : mtplx::levels()) std::printf("%s ", level.c_str());
  std::printf("levels, %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

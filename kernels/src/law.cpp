#include "law.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

namespace mtplx {
namespace {

constexpr std::size_t kBlock = 64;  // logits under one maximum: a whole number of vectors
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kLeastPower = -126.0F;   // below 2^-126 a weight counts as 0
constexpr float kPower[7] = {0x1p0F,        0x1.62e43p-1F,   0x1.ebfbep-3F, 0x1.c6aeccp-5F,
                             0x1.3b2a1cp-7F, 0x1.5f48cp-10F, 0x1.444p-13F};

constexpr double kLeastLog = -708.0;     // below it exp is no normal float64

#define MTPLX_LAW_NAME portable
#define MTPLX_LAW_TARGET
#define MTPLX_LAW_BYTES 16
#include "law_sweep.inl"

#if defined(__x86_64__)
#define MTPLX_LAW_NAME avx2
#define MTPLX_LAW_TARGET __attribute__((target("avx2,fma")))
#define MTPLX_LAW_BYTES 32
#include "law_sweep.inl"

#define MTPLX_LAW_NAME avx512
#define MTPLX_LAW_TARGET __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma")))
#define MTPLX_LAW_BYTES 64
#include "law_sweep.inl"
#endif

struct Sweeps {
  bool (*scan)(const float*, std::size_t, float*);
  double (*weigh)(const float*, std::size_t, float, float, float, float*);
  bool (*exponentials)(const float*, std::size_t, double, double, double*, double*);
  void (*divide)(double*, std::size_t, double);
  bool (*noise)(std::uint32_t, std::uint32_t, std::uint32_t, const std::int64_t*, const double*, double, double*);
};

Sweeps sweeps([[maybe_unused]] LawIsa isa) {
#if defined(__x86_64__)
  if (isa == LawIsa::avx2) return {avx2::scan, avx2::weigh, avx2::exponentials, avx2::divide, avx2::noise};
  if (isa == LawIsa::avx512) return {avx512::scan, avx512::weigh, avx512::exponentials, avx512::divide, avx512::noise};
#endif
  return {portable::scan, portable::weigh, portable::exponentials, portable::divide, portable::noise};
}

// log2(e) / temperature in two floats.
struct Scale {
  float high, low;
};

// Outside these float32 cannot hold the scale, or its low part: weights are then computed in float64.
bool fits_float(double temperature) { return temperature > 1e-30 && temperature < 1e28; }

Scale scale_of(double temperature) {
  const double exact = 1.4426950408889634 / temperature;
  const float high = static_cast<float>(exact);
  return {high, static_cast<float>(exact - high)};
}

double weigh_slowly(const float* row, std::size_t size, float highest, double temperature, float* weights) {
  double sum = 0.0;
  for (std::size_t i = 0; i < size; ++i) {
    const double w = std::exp((static_cast<double>(row[i]) - highest) / temperature);
    if (weights != nullptr) weights[i] = static_cast<float>(w);
    sum += w;
  }
  return sum;
}

// The row's whole blocks, then what is left of it, padded with -inf to a block.
template <typename Use>
void in_blocks(const float* row, std::size_t size, Use use) {
  const std::size_t whole = size / kBlock * kBlock;
  use(row, std::size_t{0}, whole);
  if (whole == size) return;
  float rest[kBlock];
  std::fill(rest, rest + kBlock, -kInfinity);
  std::copy(row + whole, row + size, rest);
  use(rest, whole, kBlock);
}

// Maxima of all blocks, and whether every logit is < +inf.
bool scan_row(const float* row, std::size_t size, const Sweeps& run, std::vector<float>& maxima) {
  maxima.resize((size + kBlock - 1) / kBlock);
  bool good = true;
  in_blocks(row, size, [&](const float* part, std::size_t at, std::size_t count) {
    good &= run.scan(part, count, maxima.data() + at / kBlock);
  });
  return good;
}

double mass_of(const float* row, std::size_t size, float highest, double temperature, const Sweeps& run,
               float* weights) {
  if (!fits_float(temperature)) return weigh_slowly(row, size, highest, temperature, weights);
  const Scale scale = scale_of(temperature);
  double sum = 0.0;
  in_blocks(row, size, [&](const float* part, std::size_t at, std::size_t count) {
    sum += run.weigh(part, count, highest, scale.high, scale.low, weights == nullptr ? nullptr : weights + at);
  });
  return sum;
}

// The bits of a float order as floats do once negative ones are flipped; here they ascend as values descend.
std::uint64_t key_of(float value, std::uint32_t id) {
  value += 0.0F;  // -0.0 becomes 0.0
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits >> 31) != 0 ? bits : ~(bits | 0x80000000U);
  return static_cast<std::uint64_t>(bits) << 32 | id;
}

// Least significant digits first, 11 bits at a time, of the upper half: `keys` come with ids ascending.
void radix_sort(std::vector<std::uint64_t>& keys, std::vector<std::uint64_t>& spare) {
  constexpr int kDigits = 11;
  spare.resize(keys.size());
  std::vector<std::size_t> places(std::size_t{1} << kDigits);
  for (int shift = 32; shift < 64; shift += kDigits) {
    const std::uint64_t mask = (1U << kDigits) - 1;
    std::fill(places.begin(), places.end(), 0);
    for (const std::uint64_t key : keys) ++places[key >> shift & mask];
    std::size_t total = 0;
    for (std::size_t& place : places) {
      const std::size_t count = place;
      place = total;
      total += count;
    }
    for (const std::uint64_t key : keys) spare[places[key >> shift & mask]++] = key;
    keys.swap(spare);
  }
}

void sort_keys(LawScratch& scratch) {
  constexpr std::size_t kManyKeys = 2048;
  if (scratch.keys.size() > kManyKeys) return radix_sort(scratch.keys, scratch.spare);
  std::sort(scratch.keys.begin(), scratch.keys.end());
}

// The first `limit` tokens in order of those with a logit >= lowest. Blocks whose maximum is lower are not read.
void collect(const float* row, std::size_t size, float lowest, std::size_t limit, LawScratch& scratch, LawRow& out) {
  std::vector<std::uint64_t>& keys = scratch.keys;
  keys.clear();
  for (std::size_t block = 0; block < scratch.maxima.size(); ++block) {
    if (scratch.maxima[block] < lowest) continue;
    const std::size_t end = std::min(size, (block + 1) * kBlock);
    for (std::size_t i = block * kBlock; i < end; ++i) {
      if (row[i] >= lowest) keys.push_back(key_of(row[i], static_cast<std::uint32_t>(i)));
    }
  }
  limit = std::min(limit, keys.size());
  if (limit < keys.size() && limit > 0) {
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(limit) - 1, keys.end());
    keys.resize(limit);
    std::sort(keys.begin(), keys.end());
  } else {
    sort_keys(scratch);
  }
  out.ids.resize(limit);
  out.values.resize(limit);
  for (std::size_t i = 0; i < limit; ++i) {
    out.ids[i] = static_cast<std::uint32_t>(keys[i]);
    out.values[i] = row[out.ids[i]];
  }
}

// A value that at least `count` tokens reach, `count` <= V: the count-th highest block maximum, if there are so many.
float reached_by(std::size_t count, const std::vector<float>& maxima) {
  if (count > maxima.size()) return -kInfinity;
  constexpr std::size_t kFew = 64;
  if (count > kFew) {
    std::vector<float> copy(maxima);
    std::nth_element(copy.begin(), copy.begin() + static_cast<std::ptrdiff_t>(count) - 1, copy.end(), std::greater<>());
    return copy[count - 1];
  }
  float best[kFew];  // descending
  std::fill(best, best + count, -kInfinity);
  for (const float m : maxima) {
    if (!(m > best[count - 1])) continue;
    std::size_t i = count - 1;
    for (; i > 0 && best[i - 1] < m; --i) best[i] = best[i - 1];
    best[i] = m;
  }
  return best[count - 1];
}

// A value such that top-p keeps no token below it: weights are binned by their bits (16 bins an octave), and the bins
// are added up from the highest. One bin more than needed is taken, for the rounding of the weights.
float nucleus_edge(const float* row, std::size_t size, double wanted, const std::vector<float>& weights) {
  constexpr int kShift = 19;
  constexpr std::size_t kBins = (0x3f800000U >> kShift) + 2;  // weights are <= 1, but for rounding
  std::vector<double> mass(kBins, 0.0);
  std::vector<float> least(kBins, kInfinity);
  for (std::size_t i = 0; i < size; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &weights[i], sizeof bits);
    const std::size_t bin = std::min<std::size_t>(bits >> kShift, kBins - 1);
    mass[bin] += weights[i];
    least[bin] = std::min(least[bin], row[i]);
  }
  double sum = 0.0;
  float edge = kInfinity;
  bool enough = false;
  for (std::size_t bin = kBins; bin-- > 0;) {
    if (least[bin] == kInfinity) continue;
    sum += mass[bin];
    edge = std::min(edge, least[bin]);
    if (enough) return edge;
    enough = sum >= wanted;
  }
  return -kInfinity;
}

void count_broken(const float* row, std::size_t size, LawRow& out) {
  for (std::size_t i = 0; i < size; ++i) {
    out.nan += std::isnan(row[i]) ? 1 : 0;
    out.inf += row[i] == kInfinity ? 1 : 0;
  }
}

// The lowest logit that top-p and min-p can keep, or lower; fills in the mass.
float lowest_kept(const float* row, std::size_t size, float highest, const LawRequest& request, const Sweeps& run,
                  LawScratch& scratch, LawRow& out) {
  const bool nucleus = request.top_p < 1.0;
  if (nucleus) scratch.weights.resize((size + kBlock - 1) / kBlock * kBlock);
  out.mass = mass_of(row, size, highest, request.temperature, run, nucleus ? scratch.weights.data() : nullptr);
  float edge = -kInfinity;
  if (nucleus) edge = nucleus_edge(row, size, request.top_p * (1.0 + 1e-6) * out.mass, scratch.weights);
  if (request.min_p > 0.0) {
    // The host compares quotients in float64: as good as exact, so a little room and a rounding down are enough.
    const double least = highest + request.temperature * (std::log(request.min_p) - 1e-9);
    edge = std::max(edge, std::nextafter(static_cast<float>(least), -kInfinity));
  }
  return edge;
}

}  // namespace

void check_law(std::size_t size, const LawRequest& request) {
  if (size == 0 || size > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("a row of logits must have 1 to 2^32 - 1 of them");
  }
  if (!std::isfinite(request.temperature)) throw std::invalid_argument("temperature must be finite");
  if (!(request.top_p > 0.0 && request.top_p <= 1.0)) throw std::invalid_argument("top_p must be in (0, 1]");
  if (!(request.min_p >= 0.0 && request.min_p <= 1.0)) throw std::invalid_argument("min_p must be in [0, 1]");
  if (request.top_k < 0) throw std::invalid_argument("top_k must be >= 0");
}

bool law_isa_available(LawIsa isa) {
#if defined(__x86_64__)
  if (isa == LawIsa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == LawIsa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  }
#endif
  return isa == LawIsa::portable;
}

LawIsa law_isa_best() {
  for (const LawIsa isa : {LawIsa::avx512, LawIsa::avx2}) {
    if (law_isa_available(isa)) return isa;
  }
  return LawIsa::portable;
}

void law_row(const float* row, std::size_t size, const LawRequest& request, LawIsa isa, LawScratch& scratch,
             LawRow& out) {
  check_law(size, request);
  const Sweeps run = sweeps(isa);
  out = LawRow{std::move(out.ids), std::move(out.values)};
  out.ids.clear();
  out.values.clear();
  if (!scan_row(row, size, run, scratch.maxima)) {
    count_broken(row, size, out);
    return;
  }
  const float highest = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
  if (highest == -kInfinity) return;
  const bool greedy = request.temperature <= 0.0;
  const bool filters = request.top_p < 1.0 || request.min_p > 0.0;
  std::size_t limit = size;
  if (greedy) limit = 1;
  if (!greedy && request.top_k > 0) limit = std::min(size, static_cast<std::size_t>(request.top_k));
  float lowest = -kInfinity;
  if (limit < size) {
    if (filters && !greedy) out.mass = mass_of(row, size, highest, request.temperature, run, nullptr);
    lowest = reached_by(limit, scratch.maxima);
  } else if (filters && !greedy) {
    lowest = lowest_kept(row, size, highest, request, run, scratch, out);
  }
  collect(row, size, lowest, limit, scratch, out);
}

void whole_law(const float* row, std::size_t size, double temperature, LawIsa isa, LawScratch& scratch, WholeLaw& out) {
  check_law(size, {temperature});
  if (!(temperature > 0.0)) throw std::invalid_argument("temperature must be positive");
  const Sweeps run = sweeps(isa);
  out = {};
  if (!scan_row(row, size, run, scratch.maxima)) return;
  const float highest = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
  if (highest == -kInfinity) return;
  const std::size_t room = (size + kBlock - 1) / kBlock * kBlock;
  out.probs.reset(new double[room]);
  double* w = out.probs.get();
  double total = 0.0;
  bool below = false;
  in_blocks(row, size, [&](const float* part, std::size_t at, std::size_t count) {
    double sum = 0.0;
    below |= run.exponentials(part, count, highest, temperature, w + at, &sum);
    total += sum;
  });
  out.positive = size;
  if (below) {
    for (std::size_t i = 0; i < size; ++i) {
      const double x = (static_cast<double>(row[i]) - highest) / temperature;
      if (x < kLeastLog) w[i] = std::exp(x);  // next to nothing, so not in the sum
    }
  }
  run.divide(w, room, total);
  if (below) out.positive = static_cast<std::size_t>(std::count_if(w, w + size, [](double p) { return p > 0.0; }));
}

double uniform(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, std::uint32_t id, LawIsa isa) {
  const std::int64_t ids[kBlock] = {id};
  const double probs[kBlock] = {};
  double u[kBlock];
  sweeps(isa).noise(key0, key1, position, ids, probs, 0.0, u);
  return u[0];
}

std::size_t race(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, const std::int64_t* ids,
                 const double* probs, std::size_t size, LawIsa isa) {
  constexpr double kRoom = 1.0 + 1e-9;
  const Sweeps run = sweeps(isa);
  std::size_t winner = 0;
  double earliest = std::numeric_limits<double>::infinity();
  double u[kBlock], rest_probs[kBlock];
  std::int64_t rest_ids[kBlock];
  for (std::size_t at = 0; at < size; at += kBlock) {
    const std::size_t count = std::min(kBlock, size - at);
    const std::int64_t* some = ids + at;
    const double* p = probs + at;
    if (count < kBlock) {
      some = std::fill_n(std::copy_n(some, count, rest_ids), kBlock - count, 0) - kBlock;
      p = std::fill_n(std::copy_n(p, count, rest_probs), kBlock - count, 0.0) - kBlock;
    }
    // -log(1 - u) >= u: whoever comes late by that need not be timed.
    if (!run.noise(key0, key1, position, some, p, earliest * kRoom, u)) continue;
    for (std::size_t i = 0; i < count; ++i) {
      if (!(u[i] <= p[i] * (earliest * kRoom))) continue;
      const double time = -std::log1p(-u[i]) / p[i];
      if (time < earliest) {
        earliest = time;
        winner = at + i;
      }
    }
  }
  return winner;
}

void finish_law(const LawRow& row, const LawRequest& request, LawScratch& scratch, Law& out) {
  std::vector<std::uint64_t>& keys = scratch.keys;
  keys.clear();
  scratch.kept.clear();
  // Both filters keep a first part of the order. The sum is as good as exact: weights descend.
  double before = 0.0, sum = 0.0, lost = 0.0;
  for (std::size_t i = 0; i < row.ids.size(); ++i) {
    // Nothing stands between a weight and the highest one of 1, at any temperature.
    const double gap = static_cast<double>(row.values[i]) - static_cast<double>(row.values[0]);
    const double weight = gap < 0.0 ? std::exp(gap / request.temperature) : 1.0;
    const double share = row.mass > 0.0 ? weight / row.mass : 0.0;
    if (weight == 0.0 || (request.top_p < 1.0 && before >= request.top_p)) break;
    if (row.mass > 0.0 && share < request.min_p * (1.0 / row.mass)) break;
    keys.push_back(static_cast<std::uint64_t>(row.ids[i]) << 32 | i);
    scratch.kept.push_back(weight);
    before += share;
    const double next = sum + weight;
    lost += weight - (next - sum);
    sum = next;
  }
  sort_keys(scratch);
  out.ids.reserve(keys.size());
  out.probs.reserve(keys.size());
  for (const std::uint64_t key : keys) {
    const double probability = scratch.kept[key & 0xffffffffU] / (sum + lost);
    if (probability == 0.0) continue;
    out.ids.push_back(static_cast<std::int64_t>(key >> 32));
    out.probs.push_back(probability);
  }
}

}  // namespace mtplx

// Part of kernels.inl: norms, activations and attention, one row or one head at a time.

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  F acc[4] = {V::set(0.0f), V::set(0.0f), V::set(0.0f), V::set(0.0f)};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (int a = 0; a < 4; ++a) {
      const F v = V::load(x + i + a * W);
      acc[a] = V::fma(v, v, acc[a]);
    }
  }
  float sum = V::sum(V::add(V::add(acc[0], acc[1]), V::add(acc[2], acc[3])));
  for (; i < n; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
  for (i = 0; i < n; ++i) y[i] = weight != nullptr ? x[i] * factor * weight[i] : x[i] * factor;
}

// e^x to about 2 units in the last place, for x clamped to [-87, 88]; NaN stays NaN.
inline F exponential(F x) {
  x = V::max(V::set(-87.0f), x);
  x = V::min(V::set(88.0f), x);
  const F magic = V::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F n = V::sub(V::fma(x, V::set(1.44269504f), magic), magic);
  F r = V::fma(n, V::set(-0.693359375f), x);  // ln 2 in two parts
  r = V::fma(n, V::set(2.12194440e-4f), r);
  F p = V::set(1.0f / 5040.0f);  // Taylor's series: |r| <= ln 2 / 2 leaves 1e-8 after the 7th power
  p = V::fma(p, r, V::set(1.0f / 720.0f));
  p = V::fma(p, r, V::set(1.0f / 120.0f));
  p = V::fma(p, r, V::set(1.0f / 24.0f));
  p = V::fma(p, r, V::set(1.0f / 6.0f));
  p = V::fma(p, r, V::set(0.5f));
  p = V::fma(p, r, V::set(1.0f));
  p = V::fma(p, r, V::set(1.0f));
  return V::mul(p, V::pow2(n));
}

void swiglu(const float* gate, const float* up, int n, float* y) {
  float tail[3][W];
  for (int i = 0; i < n; i += W) {
    const float *g = gate + i, *u = up + i;
    float* out = y + i;
    const int count = n - i < W ? n - i : W;
    if (count < W) {
      for (int j = 0; j < W; ++j) {
        tail[0][j] = j < count ? g[j] : 0.0f;
        tail[1][j] = j < count ? u[j] : 0.0f;
      }
      g = tail[0];
      u = tail[1];
      out = tail[2];
    }
    const F x = V::load(g);
    const F e = exponential(V::sub(V::set(0.0f), x));
    V::store(out, V::mul(V::div(x, V::add(V::set(1.0f), e)), V::load(u)));
    if (count < W) {
      for (int j = 0; j < count; ++j) y[i + j] = out[j];
    }
  }
}

void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = a * sines[i] + b * cosines[i];
  }
}

constexpr int kScores = kChunk + 64;

// In a register for all Q queries: compilers load it again for each, and a load takes as long as a multiply-add.
template <int Q>
inline F held(F v) {
  return Q > 1 ? V::hold(v) : v;
}

// What 4 keys have behind their last whole vector.
[[gnu::noinline]] void add_rest(const float* q, int d, int dim, const float* const* key, float* score) {
  for (int t = 0; t < 4; ++t) {
    for (int e = d; e < dim; ++e) score[t] += q[e] * key[t][e];
  }
}

// The scores of Q queries, `kScores` apart, and 4 keys; the same order of sums as for any other Q.
template <int Q>
inline void scores_of(const float* q, int dim, const float* const* key, float* score) {
  F acc[Q][4];
#pragma GCC unroll 2
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) acc[i][t] = V::set(0.0f);
  }
  int d = 0;
  for (; d + W <= dim; d += W) {
    F k[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) k[t] = held<Q>(V::load(key[t] + d));
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i) {
      const F v = V::load(q + i * dim + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[i][t] = V::fma(v, k[t], acc[i][t]);
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < Q; ++i) {
    V::sum4(acc[i], score + i * kScores);
    if (d < dim) add_rest(q + i * dim, d, dim, key, score + i * kScores);
  }
}

// out[i] = sum_t p[i][t] values[t] for Q queries, B vectors at a time: one pass over the values for all of them. The sums
// of a query run in the order of t, whatever Q, and start from what `out` holds if t does not start at 0.
template <int Q, int B>
inline int weigh(const float* const* p, int start, int limit, const float* values, int dim, int d, float* const* out) {
  for (; d + B * W <= dim; d += B * W) {
    F acc[Q][B];
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
      for (int a = 0; a < B; ++a) acc[i][a] = start == 0 ? V::set(0.0f) : V::load(out[i] + d + a * W);
    }
    const float* v = values + static_cast<std::size_t>(start) * dim + d;
    for (int t = start; t < limit; ++t, v += dim) {
      F value[B];
#pragma GCC unroll 8
      for (int a = 0; a < B; ++a) value[a] = held<Q>(V::load(v + a * W));
#pragma GCC unroll 2
      for (int i = 0; i < Q; ++i) {
        const F w = V::set(p[i][t]);
#pragma GCC unroll 8
        for (int a = 0; a < B; ++a) acc[i][a] = V::fma(w, value[a], acc[i][a]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
      for (int a = 0; a < B; ++a) V::store(out[i] + d + a * W, acc[i][a]);
    }
  }
  return d;
}

template <int Q>
inline void weighted_values(const float* const* p, int start, int limit, const float* values, int dim,
                            float* const* out) {
  int d = weigh<Q, 8 / Q>(p, start, limit, values, dim, 0, out);
  d = weigh<Q, 1>(p, start, limit, values, dim, d, out);
  for (; d < dim; ++d) {
    for (int i = 0; i < Q; ++i) {
      float sum = start == 0 ? 0.0f : out[i][d];
      for (int t = start; t < limit; ++t) sum += p[i][t] * values[static_cast<std::size_t>(t) * dim + d];
      out[i][d] = sum;
    }
  }
}

void attend(const float* q, int queries, const int* limit, const float* keys, const float* values, int dim,
            float* const* out) {
  alignas(64) float scores[kQueries][kScores];
  int longest = 0;
  for (int i = 0; i < queries; ++i) longest = limit[i] > longest ? limit[i] : longest;
  for (int t = 0; t < longest; t += 4) {
    const float* key[4];
    for (int j = 0; j < 4; ++j) {  // past the end the last key stands again: its scores are overwritten below
      key[j] = keys + static_cast<std::size_t>(t + j < longest ? t + j : longest - 1) * dim;
    }
    int i = 0;
    for (; i + 2 <= queries; i += 2) scores_of<2>(q + i * dim, dim, key, scores[i] + t);
    if (i < queries) scores_of<1>(q + i * dim, dim, key, scores[i] + t);
  }
  for (int i = 0; i < queries; ++i) {
    const float minus_infinity = -__builtin_inff();
    const int n = limit[i];
    for (int t = n; t < (n + W - 1) / W * W; ++t) scores[i][t] = minus_infinity;
    F top = V::set(minus_infinity);
    for (int t = 0; t < n; t += W) top = V::max(top, V::load(scores[i] + t));
    const float largest = V::largest(top);
    F sum = V::set(0.0f);
    for (int t = 0; t < n; t += W) {
      const F score = V::load(scores[i] + t);
      const F e = V::zero_below(exponential(V::sub(score, V::set(largest))), score, minus_infinity);
      V::store(scores[i] + t, e);
      sum = V::add(sum, e);
    }
    out[i][0] = largest;
    out[i][1] = V::sum(sum);
  }
  for (int i = 0; i < queries; i += 2) {
    const float* p[2] = {scores[i], scores[i + 1 < queries ? i + 1 : i]};
    float* to[2] = {out[i] + 2, out[i + 1 < queries ? i + 1 : i] + 2};
    if (i + 1 == queries) {
      weighted_values<1>(p, 0, limit[i], values, dim, to);
      continue;
    }
    const int both = limit[i] < limit[i + 1] ? limit[i] : limit[i + 1];
    weighted_values<2>(p, 0, both, values, dim, to);
    for (int j = 0; j < 2; ++j) {  // one that sees more goes on alone
      if (limit[i + j] > both) weighted_values<1>(p + j, both, limit[i + j], values, dim, to + j);
    }
  }
}

void merge(float* sum, const float* part, int dim) {
  if (part[1] == 0.0f) return;
  if (sum[1] == 0.0f) {
    for (int d = 0; d < dim + 2; ++d) sum[d] = part[d];
    return;
  }
  const float largest = sum[0] > part[0] ? sum[0] : part[0];
  alignas(64) float factor[W];
  V::store(factor, exponential(V::sub(V::set(sum[0]), V::set(largest))));
  const float mine = factor[0];
  V::store(factor, exponential(V::sub(V::set(part[0]), V::set(largest))));
  const float its = factor[0];
  sum[0] = largest;
  for (int d = 1; d < dim + 2; ++d) sum[d] = sum[d] * mine + part[d] * its;
}

void finish(const float* sum, int dim, float* out) {
  const float factor = 1.0f / sum[1];
  for (int d = 0; d < dim; ++d) out[d] = sum[2 + d] * factor;
}

// Part of kernels.inl: products of a few rows with a repacked matrix.

// What the steps of one word multiply and add up: whole numbers for quantised weights, else floats.
template <Format kFormat>
constexpr bool kWhole = has_scales(kFormat);

template <Format kFormat>
inline auto zero() {
  if constexpr (kWhole<kFormat>) {
    return V::words(0);
  } else {
    return V::set(0.0f);
  }
}

// Step `E` of a word's weights: two whole numbers of 16 bits in each lane, or a float.
template <Format kFormat, int E>
inline auto element(const std::uint8_t* words) {
  if constexpr (kFormat == Format::kFloat32) {
    return V::from_bits(V::load_words(words));
  } else if constexpr (kFormat == Format::kBfloat16) {
    const auto word = V::load_words(words);
    if constexpr (E == 0) return V::from_bits(V::template left<16>(word));
    if constexpr (E == 1) return V::from_bits(V::keep(word, V::words(0xffff0000u)));
  } else if constexpr (kFormat == Format::kFloat16) {
    auto word = V::load_words(words);
    if constexpr (E == 1) word = V::template right<16>(word);
    const auto sign = V::template left<16>(V::keep(word, V::words(0x8000u)));
    const auto size = V::from_bits(V::template left<13>(V::keep(word, V::words(0x7fffu))));
    return V::from_bits(V::either(V::bits(V::mul(size, V::set(float_of(0x77800000u)))), sign));
  } else {
    constexpr int kBits = kFormat == Format::kQ4 ? 4 : 8;
    auto word = V::load_words(words);
    if constexpr (E == 16 / kBits - 1) return V::template right_of_halves<16 - kBits>(word);
    if constexpr (E > 0) word = V::template right<kBits * E>(word);
    return V::keep(word, V::words(kFormat == Format::kQ4 ? 0x000f000fu : 0x00ff00ffu));
  }
}

// The activation that belongs to it, in every lane.
template <Format kFormat>
inline auto activation(std::uint32_t word) {
  if constexpr (kWhole<kFormat>) {
    return V::words(word);
  } else {
    return V::from_bits(V::words(word));
  }
}

template <Format kFormat, class T>
inline T multiply_add(T sum, T weight, T input) {
  if constexpr (kWhole<kFormat>) {
    return V::dot(sum, weight, input);
  } else {
    return V::fma(weight, input, sum);
  }
}

inline F scale_vector(const std::uint8_t* p, ScaleType type, int at) {
  switch (type) {
    case ScaleType::kFloat16:
      return V::widen16(p + 2 * at);
    case ScaleType::kBfloat16:
      return V::widen_bfloat(p + 2 * at);
    default:
      return V::load(reinterpret_cast<const float*>(p) + at);
  }
}

// Rows and vectors have their sums in registers, beside one step's weights or activations and what else it needs.
template <Format kFormat>
constexpr bool fits(int rows, int vectors, int kept) {
  return rows * vectors + kept + (kWhole<kFormat> ? 2 : 1) <= V::kRegisters;
}

// out[r][0 .. 16 S) = sums of R rows over S strips, which lie `apart` bytes from one another.
template <Format kFormat, int R, int S>
inline void strips(const MatrixView& m, const std::uint8_t* words, std::size_t apart, const std::uint32_t* x,
                   const float* sums, float* out) {
  constexpr int kSteps = steps_per_word(kFormat);
  constexpr int kPart = kStrip / W;  // vectors of a strip
  constexpr int B = S * kPart;
  using T = decltype(zero<kFormat>());
  const int words_a_group = m.group / elements_per_word(kFormat);
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) V::store(out + r * kPanel + b * W, V::set(0.0f));
  }
  for (int g = 0; g < m.groups; ++g) {
    T acc[R][B];
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) acc[r][b] = zero<kFormat>();
    }
    // The same place a few groups on; behind the strip's end, in the strip that comes S further.
    const std::size_t ahead = kAhead * m.group_bytes + (g + kAhead < m.groups ? 0 : (S - 1) * apart);
    const auto fetch = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) __builtin_prefetch(words + s * apart + ahead);
    };
    for (int w = 0; w < words_a_group; ++w, words += 4 * kStrip, x += kSteps * R) {
      fetch();  // a word of 16 outputs is a line
      const auto step = [&]<int E>() __attribute__((always_inline)) {
        const auto weight = [&](int b) __attribute__((always_inline)) {
          return element<kFormat, E>(words + (b / kPart) * apart + 4 * W * (b % kPart));
        };
        if constexpr (fits<kFormat>(R, B, B)) {
          T weights[B];
#pragma GCC unroll 16
          for (int b = 0; b < B; ++b) weights[b] = weight(b);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const T input = activation<kFormat>(x[E * R + r]);
#pragma GCC unroll 16
            for (int b = 0; b < B; ++b) acc[r][b] = multiply_add<kFormat>(acc[r][b], weights[b], input);
          }
        } else {
          T inputs[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) inputs[r] = activation<kFormat>(x[E * R + r]);
#pragma GCC unroll 16
          for (int b = 0; b < B; ++b) {
            const T one = weight(b);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][b] = multiply_add<kFormat>(acc[r][b], one, inputs[r]);
          }
        }
      };
      step.template operator()<0>();
      if constexpr (kSteps > 1) step.template operator()<1>();
      if constexpr (kSteps > 2) {
        step.template operator()<2>();
        step.template operator()<3>();
      }
    }
    if constexpr (kWhole<kFormat>) {
      fetch();
      F scale[B], bias[B];
#pragma GCC unroll 16
      for (int b = 0; b < B; ++b) {
        const std::uint8_t* scales = words + (b / kPart) * apart;
        scale[b] = scale_vector(scales, m.scale_type, W * (b % kPart));
        bias[b] = scale_vector(scales + kStrip * bytes_of(m.scale_type), m.scale_type, W * (b % kPart));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F unit = V::set(sums[2 * (g * R + r)]), sum = V::set(sums[2 * (g * R + r) + 1]);
        float* total = out + r * kPanel;
#pragma GCC unroll 16
        for (int b = 0; b < B; ++b, total += W) {
          const F scaled = V::fma(V::mul(scale[b], unit), V::from_int(acc[r][b]), V::load(total));
          V::store(total, V::fma(bias[b], sum, scaled));
        }
      }
      words += 2 * kStrip * bytes_of(m.scale_type);
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* total = out + r * kPanel;
#pragma GCC unroll 16
        for (int b = 0; b < B; ++b, total += W) V::store(total, V::add(V::load(total), acc[r][b]));
      }
    }
  }
}

// How many strips R rows go through at once: as many as there are registers for, but from four rows on no more than two,
// which AVX-512 alone has room to exceed (Zen 4: 4, 5, 6 rows 7, 11, 13 % faster so).
template <Format kFormat>
constexpr int strips_at_once(int rows) {
  for (int s = rows < 4 ? kPanel / kStrip : 2; s > 1; s /= 2) {
    const int vectors = s * kStrip / W;
    if (fits<kFormat>(rows, vectors, rows < vectors ? rows : vectors)) return s;
  }
  return 1;
}

// R rows through `count` strips, 2 or 4.
template <Format kFormat, int R>
inline void chunk_product(const MatrixView& m, const std::uint8_t* words, int count, const std::uint32_t* x,
                          const float* sums, float* out) {
  constexpr int kMost = strips_at_once<kFormat>(R);
  const std::size_t apart = m.strip_bytes;
  if constexpr (kMost == 4) {
    if (count == 4) return strips<kFormat, R, 4>(m, words, apart, x, sums, out);
  }
  constexpr int S = kMost == 1 ? 1 : 2;
  for (int s = 0; s < count; s += S) strips<kFormat, R, S>(m, words + s * apart, apart, x, sums, out + s * kStrip);
}

template <Format kFormat>
inline void product_of(const MatrixView& m, int panel, int first, int last, int rows, const std::uint32_t* inputs,
                       const float* sums, float* out) {
  const std::uint8_t* data = m.data + static_cast<std::size_t>(panel) * (kPanel / kStrip) * m.strip_bytes;
  const int chunks = chunks_of(rows), end = last / kStrip;
  // Several chunks of rows go through two strips before the next two are read.
  const int step = chunks > 1 ? 2 : end - first / kStrip;
  for (int s = first / kStrip; s < end; s += step) {
    for (int c = 0; c < chunks; ++c) {
      const RowChunk chunk = chunk_of(rows, c);
      const std::uint32_t* x = inputs + chunk.first * words_of_inputs(m);
      const float* sum = sums + static_cast<std::size_t>(chunk.first) * 2 * m.groups;
      const std::uint8_t* words = data + s * m.strip_bytes;
      float* to = out + chunk.first * kPanel + s * kStrip;
      switch (chunk.size) {
        case 1:
          chunk_product<kFormat, 1>(m, words, step, x, sum, to);
          break;
        case 2:
          chunk_product<kFormat, 2>(m, words, step, x, sum, to);
          break;
        case 3:
          chunk_product<kFormat, 3>(m, words, step, x, sum, to);
          break;
        case 4:
          chunk_product<kFormat, 4>(m, words, step, x, sum, to);
          break;
        case 5:
          chunk_product<kFormat, 5>(m, words, step, x, sum, to);
          break;
        default:
          chunk_product<kFormat, 6>(m, words, step, x, sum, to);
      }
    }
  }
}

void product(const MatrixView& m, int panel, int first, int last, int rows, const std::uint32_t* inputs,
             const float* sums, float* out) {
  switch (m.format) {
    case Format::kQ4:
      return product_of<Format::kQ4>(m, panel, first, last, rows, inputs, sums, out);
    case Format::kQ8:
      return product_of<Format::kQ8>(m, panel, first, last, rows, inputs, sums, out);
    case Format::kBfloat16:
      return product_of<Format::kBfloat16>(m, panel, first, last, rows, inputs, sums, out);
    case Format::kFloat16:
      return product_of<Format::kFloat16>(m, panel, first, last, rows, inputs, sums, out);
    case Format::kFloat32:
      return product_of<Format::kFloat32>(m, panel, first, last, rows, inputs, sums, out);
  }
}

// Whole numbers of one group, their unit in sums[0], and unit times sum in sums[1]; both NaN if a number is not finite.
inline void round_group(const float* x, int count, std::uint32_t* whole, float* sums) {
  F largest = V::set(0.0f), poison = V::set(0.0f), sum = V::set(0.0f);
  for (int i = 0; i < count; i += W) {
    const F v = V::load(x + i);
    largest = V::max(V::from_bits(V::keep(V::bits(v), V::words(0x7fffffffu))), largest);
    poison = V::fma(v, V::set(0.0f), poison);
  }
  const float most = V::largest(largest);
  const F inverse = V::set(most > kSmallest ? kMostWhole / most : 0.0f);
  for (int i = 0; i < count; i += W) {
    const auto n = V::nearest(V::mul(V::load(x + i), inverse));
    V::store_words(whole + i, n);
    sum = V::add(sum, V::from_int(n));  // exact: below 2^24
  }
  sums[0] = most / kMostWhole + V::sum(poison);
  sums[1] = sums[0] * V::sum(sum);
}

void prepare(const MatrixView& m, const float* x, int rows, std::uint32_t* inputs, float* sums) {
  if (!has_scales(m.format)) {
    for (int i = 0; i < m.padded; ++i, inputs += rows) __builtin_memcpy(inputs, i < m.k ? x + i : &kZero, 4);
    return;
  }
  std::uint32_t whole[kMostGroup];
  const int half = steps_per_word(m.format);
  for (int g = 0; g < m.groups; ++g, x += m.group) {
    round_group(x, m.group, whole, sums + static_cast<std::size_t>(2 * g) * rows);
    for (const std::uint32_t* low = whole; low < whole + m.group; low += half) {
      for (int e = 0; e < half; ++e, ++low, inputs += rows) *inputs = (low[0] & 0xffffu) | low[half] << 16;
    }
  }
}

void unpack_row(const MatrixView& m, int row, float* out) {
  const int elements = elements_per_word(m.format);
  const int lane = row % kStrip;
  const std::uint8_t* words = m.data + static_cast<std::size_t>(row / kStrip) * m.strip_bytes;
  const int words_a_group = m.group / elements;
  for (int g = 0; g < m.groups; ++g, words += m.group_bytes) {
    const std::uint8_t* scales = words + static_cast<std::size_t>(words_a_group) * 4 * kStrip;
    float factor[2] = {1.0f, 0.0f};
    for (int part = 0; part < 2 && has_scales(m.format); ++part) {
      const std::uint8_t* p = scales + (part * kStrip + lane) * bytes_of(m.scale_type);
      std::uint16_t half;
      __builtin_memcpy(&half, p, 2);
      factor[part] = m.scale_type == ScaleType::kFloat32   ? float_of(word_at(p))
                     : m.scale_type == ScaleType::kFloat16 ? float_of_half(half)
                                                           : float_of(static_cast<std::uint32_t>(half) << 16);
    }
    for (int i = 0; i < m.group && g * m.group + i < m.k; ++i) {
      const std::uint32_t word = word_at(words + 4 * (static_cast<std::size_t>(i / elements) * kStrip + lane));
      const int e = i % elements;
      float value;
      switch (m.format) {
        case Format::kQ4:
          value = static_cast<float>(word >> (4 * e) & 0xfu) * factor[0] + factor[1];
          break;
        case Format::kQ8:
          value = static_cast<float>(word >> (8 * e) & 0xffu) * factor[0] + factor[1];
          break;
        case Format::kBfloat16:
          value = float_of(e == 0 ? word << 16 : word & 0xffff0000u);
          break;
        case Format::kFloat16:
          value = float_of_half(static_cast<std::uint16_t>(word >> (16 * e)));
          break;
        default:
          value = float_of(word);
      }
      out[g * m.group + i] = value;
    }
  }
}

// Part of kernels.inl: products of a few rows with a repacked matrix.

// Element `E` of each word, as a float times its place value.
template <Format kFormat, int E>
inline F element(const std::uint8_t* words) {
  if constexpr (kFormat == Format::kFloat32) {
    return V::from_bits(V::load_words(words));
  } else if constexpr (kFormat == Format::kBfloat16) {
    const auto word = V::load_words(words);
    if constexpr (E == 0) return V::from_bits(V::template left<16>(word));
    return V::from_bits(V::keep(word, V::words(0xffff0000u)));
  } else if constexpr (kFormat == Format::kFloat16) {
    auto word = V::load_words(words);
    if constexpr (E == 1) word = V::template right<16>(word);
    const auto sign = V::template left<16>(V::keep(word, V::words(0x8000u)));
    const auto size = V::from_bits(V::template left<13>(V::keep(word, V::words(0x7fffu))));
    return V::from_bits(V::either(V::bits(V::mul(size, V::set(float_of(0x77800000u)))), sign));
  } else {
    constexpr int kBits = kFormat == Format::kQ4 ? 4 : 8;
    const auto word = V::load_words(words);
    // The place value is taken out of the activations, so that only the last element needs a shift.
    if constexpr (E == 32 / kBits - 1) return V::from_int(V::template right<32 - kBits>(word));
    return V::from_int(V::keep(word, V::load_words(kBits == 4 ? kMasks4[E] : kMasks8[E % 4])));
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

// out[r][0 .. 16 S) = sums of R rows over S strips, which lie `apart` bytes from one another.
template <Format kFormat, int R, int S>
inline void strips(const MatrixView& m, const std::uint8_t* words, std::size_t apart, const float* x, const float* sums,
                   float* out) {
  constexpr int kElements = elements_per_word(kFormat);
  constexpr int kPart = kStrip / W;  // vectors of a strip
  constexpr int B = S * kPart;
  const int words_a_group = m.group / kElements, row = m.padded;
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) V::store(out + r * kPanel + b * W, V::set(0.0f));
  }
  for (int g = 0; g < m.groups; ++g) {
    F acc[R][B];
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) acc[r][b] = V::set(0.0f);
    }
    // The same place a few groups on; behind the strip's end, in the strip that comes S further.
    const std::uint8_t* ahead = words + kAhead * m.group_bytes + (g + kAhead < m.groups ? 0 : (S - 1) * apart);
    for (int s = 0; s < S; ++s) {
      for (std::size_t line = 0; line < m.group_bytes; line += 64) __builtin_prefetch(ahead + s * apart + line);
    }
    for (int w = 0; w < words_a_group; ++w, words += 4 * kStrip, x += kElements) {
      const auto step = [&]<int E>() __attribute__((always_inline)) {
        const auto weight = [&](int b) __attribute__((always_inline)) {
          return element<kFormat, E>(words + (b / kPart) * apart + 4 * W * (b % kPart));
        };
        // Weights stay in registers if there is room for them, else activations.
        if constexpr (R * B + B < V::kRegisters) {
          F weights[B];
#pragma GCC unroll 16
          for (int b = 0; b < B; ++b) weights[b] = weight(b);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const F activation = V::set(x[r * row + E]);
#pragma GCC unroll 16
            for (int b = 0; b < B; ++b) acc[r][b] = V::fma(weights[b], activation, acc[r][b]);
          }
        } else {
          F activation[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) activation[r] = V::set(x[r * row + E]);
#pragma GCC unroll 16
          for (int b = 0; b < B; ++b) {
            const F one = weight(b);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][b] = V::fma(one, activation[r], acc[r][b]);
          }
        }
      };
      step.template operator()<0>();
      if constexpr (kElements > 1) step.template operator()<1>();
      if constexpr (kElements > 2) {
        step.template operator()<2>();
        step.template operator()<3>();
      }
      if constexpr (kElements > 4) {
        step.template operator()<4>();
        step.template operator()<5>();
        step.template operator()<6>();
        step.template operator()<7>();
      }
    }
    if constexpr (has_scales(kFormat)) {
      F scale[B], bias[B];
#pragma GCC unroll 16
      for (int b = 0; b < B; ++b) {
        const std::uint8_t* scales = words + (b / kPart) * apart;
        scale[b] = scale_vector(scales, m.scale_type, W * (b % kPart));
        bias[b] = scale_vector(scales + kStrip * bytes_of(m.scale_type), m.scale_type, W * (b % kPart));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F sum = V::set(sums[r * m.groups + g]);
        float* total = out + r * kPanel;
#pragma GCC unroll 16
        for (int b = 0; b < B; ++b, total += W) {
          V::store(total, V::fma(bias[b], sum, V::fma(scale[b], acc[r][b], V::load(total))));
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

// The most strips that R rows have registers for: their sums, weights or activations, and one more.
constexpr int most_strips(int rows) {
  for (int s = kPanel / kStrip; s > 1; s /= 2) {
    const int vectors = s * kStrip / W;
    if (rows * vectors + (rows < vectors ? rows : vectors) + 1 <= V::kRegisters) return s;
  }
  return 1;
}

// R rows through `count` strips, 2 or 4.
template <Format kFormat, int R>
inline void chunk_product(const MatrixView& m, const std::uint8_t* words, int count, const float* x, const float* sums,
                          float* out) {
  constexpr int kMost = most_strips(R);
  const std::size_t apart = m.strip_bytes;
  if constexpr (kMost == 4) {
    if (count == 4) return strips<kFormat, R, 4>(m, words, apart, x, sums, out);
  }
  constexpr int S = kMost == 1 ? 1 : 2;
  for (int s = 0; s < count; s += S) strips<kFormat, R, S>(m, words + s * apart, apart, x, sums, out + s * kStrip);
}

template <Format kFormat>
inline void product_of(const MatrixView& m, int panel, int first, int last, int rows, const float* scaled,
                       const float* sums, float* out) {
  const std::uint8_t* data = m.data + static_cast<std::size_t>(panel) * (kPanel / kStrip) * m.strip_bytes;
  const int chunks = chunks_of(rows), end = last / kStrip;
  // Several chunks of rows go through two strips before the next two are read.
  const int step = chunks > 1 ? 2 : end - first / kStrip;
  for (int s = first / kStrip; s < end; s += step) {
    for (int c = 0; c < chunks; ++c) {
      const RowChunk chunk = chunk_of(rows, c);
      const float* x = scaled + static_cast<std::size_t>(chunk.first) * m.padded;
      const float* sum = sums + static_cast<std::size_t>(chunk.first) * m.groups;
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

void product(const MatrixView& m, int panel, int first, int last, int rows, const float* scaled, const float* sums,
             float* out) {
  switch (m.format) {
    case Format::kQ4:
      return product_of<Format::kQ4>(m, panel, first, last, rows, scaled, sums, out);
    case Format::kQ8:
      return product_of<Format::kQ8>(m, panel, first, last, rows, scaled, sums, out);
    case Format::kBfloat16:
      return product_of<Format::kBfloat16>(m, panel, first, last, rows, scaled, sums, out);
    case Format::kFloat16:
      return product_of<Format::kFloat16>(m, panel, first, last, rows, scaled, sums, out);
    case Format::kFloat32:
      return product_of<Format::kFloat32>(m, panel, first, last, rows, scaled, sums, out);
  }
}

void prepare(const MatrixView& m, const float* x, float* scaled, float* sums) {
  if (!has_scales(m.format)) {
    for (int i = 0; i < m.k; ++i) scaled[i] = x[i];
    for (int i = m.k; i < m.padded; ++i) scaled[i] = 0.0f;
    return;
  }
  float place[16];
  const int elements = elements_per_word(m.format);
  for (int e = 0; e < 16; ++e) {
    const int bits = e % elements == elements - 1 ? 0 : (e % elements) * (32 / elements);
    place[e] = float_of(static_cast<std::uint32_t>(127 - bits) << 23);  // 2^-bits
  }
  for (int g = 0; g < m.groups; ++g, x += m.group, scaled += m.group) {
    F sum = V::set(0.0f);
    for (int i = 0; i < m.group; i += W) {
      const F v = V::load(x + i);
      V::store(scaled + i, V::mul(v, V::load(place + i % 16)));
      sum = V::add(sum, v);
    }
    sums[g] = V::sum(sum);
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

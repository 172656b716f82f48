#include "packed.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>

#include "dispatch.hpp"

namespace mtplx {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kBlock = std::size_t{1} << 25;

// Weights lie one after the other in large blocks of huge pages: a step reads them all, in this order.
struct Arena {
  std::mutex lock;
  std::shared_ptr<void> block;
  std::size_t used = 0, size = 0;

  std::shared_ptr<void> take(std::size_t bytes, std::uint8_t*& where) {
    bytes = (bytes + 63) / 64 * 64;
    const std::lock_guard<std::mutex> guard(lock);
    if (block == nullptr || used + bytes > size) {
      size = (std::max(bytes, kBlock) + kHugePage - 1) / kHugePage * kHugePage;
      void* memory = std::aligned_alloc(kHugePage, size);
      if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(memory, size, MADV_HUGEPAGE);  // a wish: without it everything works
#endif
      block = std::shared_ptr<void>(memory, [](void* p) { std::free(p); });
      used = 0;
    }
    where = static_cast<std::uint8_t*>(block.get()) + used;
    used += bytes;
    return block;
  }
};

Arena& arena() {
  static Arena* instance = new Arena;
  return *instance;
}

MatrixView layout(const Source& s) {
  if (s.n < 1 || s.k < 1) throw std::invalid_argument("a matrix without rows or columns cannot be packed");
  MatrixView v{};
  v.n = s.n;
  v.k = s.k;
  v.format = s.format;
  v.scale_type = s.scale_type;
  const int elements = elements_per_word(s.format);
  if (has_scales(s.format)) {
    if ((s.group != 32 && s.group != 64 && s.group != 128) || s.k % s.group != 0) {
      throw std::invalid_argument("groups must have 32, 64 or 128 inputs and divide the number of inputs");
    }
    v.group = s.group;
  } else {
    v.group = 32;
  }
  v.groups = (s.k + v.group - 1) / v.group;
  v.padded = v.groups * v.group;
  v.panels = (s.n + kPanel - 1) / kPanel;
  v.group_bytes = static_cast<std::size_t>(v.group / elements) * 4 * kStrip;
  if (has_scales(s.format)) v.group_bytes += 2 * kStrip * bytes_of(s.scale_type);
  v.strip_bytes = v.group_bytes * v.groups;
  return v;
}

// The word at `index` of row `row`; 0 outside the matrix.
std::uint32_t source_word(const Source& s, int row, int index) {
  std::uint32_t word = 0;
  if (row >= s.n) return word;
  const int element_bytes = s.format == Format::kFloat32 ? 4 : 2;
  if (has_scales(s.format)) {
    const std::size_t words_a_row = s.k / elements_per_word(s.format);
    std::memcpy(&word, static_cast<const std::uint32_t*>(s.weights) + row * words_a_row + index, 4);
    return word;
  }
  const int first = index * elements_per_word(s.format);
  const int count = std::min(elements_per_word(s.format), s.k - first);
  if (count > 0) {
    const auto* bytes = static_cast<const std::uint8_t*>(s.weights);
    std::memcpy(&word, bytes + (static_cast<std::size_t>(row) * s.k + first) * element_bytes, count * element_bytes);
  }
  return word;
}

bool finite_halves(std::uint32_t word) { return (word & 0x7c00u) != 0x7c00u && (word & 0x7c000000u) != 0x7c000000u; }

}  // namespace

Packed::Packed(const Source& source) : view_(layout(source)) {
  std::uint8_t* data = nullptr;
  memory_ = arena().take(bytes(), data);
  view_.data = data;
  std::atomic<bool> finite{true};
  share(view_.panels * (kPanel / kStrip), [&](int strip) {
    const int words = view_.group / elements_per_word(view_.format);
    std::uint8_t* out = data + strip * view_.strip_bytes;
    for (int g = 0; g < view_.groups; ++g) {
      for (int w = 0; w < words; ++w) {
        for (int lane = 0; lane < kStrip; ++lane, out += 4) {
          const std::uint32_t word = source_word(source, strip * kStrip + lane, g * words + w);
          if (view_.format == Format::kFloat16 && !finite_halves(word)) finite = false;
          std::memcpy(out, &word, 4);
        }
      }
      if (!has_scales(view_.format)) continue;
      const int size = bytes_of(view_.scale_type);
      for (const void* table : {source.scales, source.biases}) {
        for (int lane = 0; lane < kStrip; ++lane, out += size) {
          const int row = strip * kStrip + lane;
          if (row >= view_.n) {
            std::memset(out, 0, size);
          } else {
            const auto* bytes = static_cast<const std::uint8_t*>(table);
            std::memcpy(out, bytes + (static_cast<std::size_t>(row) * view_.groups + g) * size, size);
          }
        }
      }
    }
  });
  if (!finite) throw std::invalid_argument("a float16 weight is not finite");
}

}  // namespace mtplx

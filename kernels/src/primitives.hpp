// The kernels as MLX operations on the CPU stream. They have no gradient and no GPU form: both throw.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "layers.hpp"
#include "mlx/array.h"

namespace mtplx {

namespace mx = mlx::core;

// Copies arrays into the kernels' layout; evaluates them first. w: (n, k) of a floating type, or packed words (n, k *
// bits / 32) uint32 with scales and biases (n, k / group) of one floating type. Throws std::invalid_argument.
Weights pack(const mx::array& w);
Weights pack_quantized(const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits);

// An array of float32 in one piece, computed; without an operation where there is nothing to do: one takes longer than a
// small product. Throws std::invalid_argument while a gradient or a compilation is traced.
mx::array at_hand(const mx::array& a);

// A vector as float32.
Vector to_vector(const mx::array& a);

// (..., k) -> (..., n) float32.
mx::array multiply_op(const mx::array& x, const Weights& weights, const std::shared_ptr<const Vector>& bias);

// ids (...) of an integer type -> (..., k) float32; a row of NaN for an id out of range.
mx::array look_up_op(const Weights& weights, const mx::array& ids);

using LayerList = std::vector<std::shared_ptr<const Layer>>;

// x (B, R, D), caches (layers, 2, B * kv_heads, T, dim): keys and values, sequence by sequence -> out (B, R, (1 + levels)
// D) and the caches with rows [offset, offset + R) written: in place where nothing else holds the array, else in a copy.
// Throws std::invalid_argument for shapes that do not fit.
std::pair<mx::array, mx::array> run_op(const std::shared_ptr<const LayerList>& layers,
                                       const std::shared_ptr<const Features>& features, const mx::array& x, int offset,
                                       const mx::array& caches);

// A head's step on the calling thread, at once: a step is so small that MLX's way to its thread and back would take as
// long. state (R, F), tokens (R), caches of one sequence as in `run_op` -> (R, D) and the caches: in place where no other array holds
// their memory. Whoever holds this very array sees it change.
std::pair<mx::array, mx::array> step_head(const Combine& head, const LayerList& layers, const Features& features,
                                          const mx::array& state, const std::vector<std::int32_t>& tokens, int offset,
                                          const mx::array& caches);

// A trunk's step in the same way: tokens (R) -> what the layers give (R, (1 + levels) D), the logits of its first D numbers
// (R, V), and the caches. Throws std::invalid_argument for parts that do not fit.
std::tuple<mx::array, mx::array, mx::array> step_trunk(const Packed& embedding, const Packed& output, const Vector& bias,
                                                       const LayerList& layers, const Features& features,
                                                       const std::vector<std::int32_t>& tokens, int offset,
                                                       const mx::array& caches);

// `multiply_op` in the same way: x (R, k) -> (R, n).
mx::array multiply_now(const mx::array& x, const Weights& weights, const Vector& bias);

// Rows [first, last) of x, and x with `amount` more at one place of its last axis, as float32, in the same way.
mx::array rows_now(const mx::array& x, int first, int last);
mx::array raise_now(const mx::array& x, int place, float amount);

// logits (R, V) and, behind each row, the product of x (R, k) with one row of the weights: (R, V + 1), in the same way.
mx::array join_now(const mx::array& logits, const mx::array& x, const Weights& weights, int row);

}  // namespace mtplx

// Decoder layers and products over the pool. Rows are independent of one another, and no sum depends on how many there
// are, on the threads or on the room in a cache: a row has the same bits in any company.
#pragma once

#include <memory>
#include <vector>

#include "packed.hpp"

namespace mtplx {

using Weights = std::shared_ptr<const Packed>;
using Vector = std::vector<float>;  // empty where the layer has none

// out (rows, n) = x (rows, k) W^T + bias; the rows of x are `stride` numbers apart, 0 for k.
void multiply(const Packed& weights, const Vector& bias, const float* x, int rows, float* out, int stride = 0);

// out (rows, k): the dequantised rows with these ids; NaN for an id out of range.
void look_up(const Packed& weights, const std::int32_t* ids, int rows, float* out);

// One layer of the Llama kind: x += o(attention(norm(x))); x += down(swiglu(gate, up)(norm(x))).
struct Layer {
  Weights q, k, v, o, gate, up, down;
  Vector q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  Vector input_norm, post_norm;
  Vector q_norm, k_norm;  // of one head each (Qwen3), or empty
  float eps = 1e-5f;
  int heads = 1, kv_heads = 1, dim = 64;
  float scale = 0.125f;
  int window = 0;                // positions that a query sees, itself included; 0 for all
  std::vector<double> frequency;  // radians a position, of the first 2 * size() numbers of a head

  int hidden() const { return q->view().k; }
  int inner() const { return gate->view().n; }
  // Throws std::invalid_argument if the sizes of the parts do not fit each other.
  void check() const;
};

// Where the keys and values of one layer are: (sequences * kv_heads, capacity, dim), rows before `offset` in use.
struct CacheView {
  float* keys;
  float* values;
  int capacity;
};

// What `run` leaves besides x: the layers, counted from 1, whose output divided by its root mean square is wanted.
struct Features {
  std::vector<int> levels;
  float eps = 1e-5f;
  Vector final_norm;  // empty: the last layer's output as it is
};

// What runs together: the same number of rows of each sequence, at its positions offset, offset + 1, ...; the rows of one
// sequence follow one another.
struct Batch {
  int sequences, rows, offset;
  int size() const { return sequences * rows; }
};

// Runs a batch through the layers. x: (batch.size(), hidden). out: (batch.size(), (1 + levels) hidden), the final output
// first. Writes the rows' keys and values into the caches.
void run(const std::vector<std::shared_ptr<const Layer>>& layers, const float* x, const Batch& batch,
         const std::vector<CacheView>& caches, const Features& features, float* out);

// What a head reads: fc [norm(embedding); norm(state[:D]); state[D:]] (or the first two the other way round), as many
// columns as the state gives.
struct Combine {
  Weights embedding;
  std::vector<Weights> fc;  // by blocks of D columns: embedding, hidden, further levels
  Vector embedding_norm, hidden_norm;
  float eps = 1e-5f;
};

// out (rows, D) from state (rows, width) and the tokens' embeddings.
void combine(const Combine& head, const float* state, int width, const std::int32_t* tokens, int rows, float* out);

}  // namespace mtplx

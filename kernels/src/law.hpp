// From a row of logits to the law of a token: its candidates in exact order and the mass of the row, and from these the
// law, in float64 as mtplx/sampling.py defines it. No MLX and no Python here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mtplx {

enum class LawIsa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The best of them that this processor has. On AArch64 "portable" is NEON, which every compiler may use there.
LawIsa law_isa_best();
bool law_isa_available(LawIsa isa);

// temperature > 0, or <= 0 for greedy.  top_p: on if 0 < top_p < 1.  min_p: on if > 0.  top_k: on if 0 < top_k < V.
struct LawRequest {
  double temperature = 1.0;
  double top_p = 1.0;
  double min_p = 0.0;
  std::int64_t top_k = 0;
};

// What one row gives. The order of tokens is: logit descending, then id ascending; -0.0 equals 0.0.
//
// ids, values: the first tokens of that order and their logits. Greedy: one. With top-k: top_k. Otherwise all that
// top-p and min-p can keep, and a few more; without any filter the whole row.
// mass: the sum over the row of exp((logit - highest) / temperature), terms in float32, sums in float64; 0 if neither
// top-p nor min-p asks for it.
// nan, inf: how many logits are NaN, +inf. If there is one, or all are -inf, there are no candidates.
struct LawRow {
  std::vector<std::uint32_t> ids;
  std::vector<float> values;
  double mass = 0.0;
  std::uint64_t nan = 0;
  std::uint64_t inf = 0;
};

// The law: ids, ascending, and their probabilities, which are positive; empty where there are no candidates.
struct Law {
  std::vector<std::int64_t> ids;
  std::vector<double> probs;
};

// The law of a row without filters: the probability of each token. None where the row is broken or all are -inf.
struct WholeLaw {
  std::unique_ptr<double[]> probs;
  std::size_t positive = 0;  // how many are not 0
};

// Memory that rows of one thread share.
struct LawScratch {
  std::vector<float> maxima, weights;
  std::vector<double> kept;
  std::vector<std::uint64_t> keys, spare;
};

// Throws std::invalid_argument for a size or a request out of range, as `law_row` does.
void check_law(std::size_t size, const LawRequest& request);

// size: V, 1 <= V < 2^32.  A row's result does not depend on other rows, threads or what `scratch` held before.
void law_row(const float* row, std::size_t size, const LawRequest& request, LawIsa isa, LawScratch& scratch,
             LawRow& out);

// exp((logit - highest) / temperature) over their sum, in float64: what `law_row` and `finish_law` give without filters.
void whole_law(const float* row, std::size_t size, double temperature, LawIsa isa, LawScratch& scratch, WholeLaw& out);

// The number in (0, 1) of an id, as mtplx/rng.py has it.
double uniform(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, std::uint32_t id, LawIsa isa);

// The place of the first of the lowest -log(1 - u) / p, u an id's `uniform`; size >= 1.
std::size_t race(std::uint32_t key0, std::uint32_t key1, std::uint32_t position, const std::int64_t* ids,
                 const double* probs, std::size_t size, LawIsa isa);

// Steps 4 to 6 of the law, on what `law_row` gave for the same request. out: empty.
void finish_law(const LawRow& row, const LawRequest& request, LawScratch& scratch, Law& out);

}  // namespace mtplx

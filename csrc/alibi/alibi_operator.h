// The ALiBi operators, as C++ code calls them and as their kernels are registered.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "alibi/alibi.h"
#include "dispatcher/operator.h"
#include "posembed/alibi.h"

namespace posembed::alibi {

using at::Tensor;
using Text = std::string_view;
using MaybeTensor = std::optional<Tensor>;
using MaybeType = std::optional<at::ScalarType>;

/// An ALiBiCall as the operators take it: its fields in the order of the schemas. Scale is not
/// among them, because only some operators have scores.
struct Call : ALiBiCall {
  Call() = default;
  /* implicit */ Call(ALiBiCall call) : ALiBiCall(std::move(call)) {}

  POSEMBED_FIELDS(self.causal(), self.query_offset(), self.attention_mask(),
                  self.positions_from_mask(), self.query_positions(), self.key_positions(),
                  self.cu_seqlens(), self.apply_mask(), self.query_offsets())
};

/// Those fields in a schema, those of a generation step first.
inline std::string call_schema(const char* causal) {
  return std::string("bool causal=") + causal +
         ", SymInt? query_offset=None, "
         "Tensor? attention_mask=None, "
         "bool positions_from_mask=False, "
         "Tensor? query_positions=None, "
         "Tensor? key_positions=None, "
         "Tensor? cu_seqlens=None, "
         "bool apply_mask=True, "
         "Tensor? query_offsets=None";
}

/// The slopes of a head, of [heads], [sides, heads] or [batch, sides, heads].
inline int64_t sides_of(const Tensor& slopes) {
  return slopes.dim() < 2 ? 1 : slopes.sym_size(-2).guard_int(__FILE__, __LINE__);
}

/// Whether each sample has its own slopes.
inline bool has_samples(const Tensor& slopes) { return slopes.dim() == 3; }

/// Throws c10::ValueError unless `scores` has a matrix for each head, or for each batch and head.
void check_matrix_shape(const Tensor& scores, const char* argument);

/// Operators that take a Call after the arguments of `Function`.
template <typename Function>
using Operator = dispatcher::Operator<Function, Call>;

/// num_heads, kind, max_bias, total_heads, head_start, values, factor, device.
inline const dispatcher::Operator<Tensor(int64_t, Text, double, std::optional<int64_t>, int64_t,
                                         at::ArrayRef<double>, double, std::optional<at::Device>)>
    alibi_slopes{"alibi_slopes"};

/// The slopes for a key length beyond that of training.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymInt, int64_t)> alibi_scaled_slopes{
    "alibi_scaled_slopes"};

/// The positions of keys that an attention mask does not hide.
inline const dispatcher::Operator<Tensor(const Tensor&)> alibi_positions{"alibi_positions"};

/// slopes, query length, key length, dtype of the result (none: that of slopes).
inline const Operator<Tensor(const Tensor&, c10::SymInt, c10::SymInt, MaybeType)> alibi_bias{
    "alibi_bias"};
inline const Operator<void(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt)> alibi_bias_out{
    "alibi_bias_out"};

/// The gradient of slopes: grad, two_sided, by_sample, dtype of the slopes (none: that of `grad`).
inline const Operator<Tensor(const Tensor&, bool, bool, MaybeType)> alibi_bias_backward{
    "alibi_bias_backward"};

/// scores, slopes, and scale, which multiplies the scores and not the bias.
template <typename Result>
using OnScores = Operator<Result(const Tensor&, const Tensor&, double)>;
inline const OnScores<Tensor> alibi_add{"alibi_add"};
inline const OnScores<void> alibi_add_{"alibi_add_"};
inline const OnScores<Tensor> alibi_softmax{"alibi_softmax"};
inline const OnScores<void> alibi_softmax_{"alibi_softmax_"};

/// grad, weights, scale, sides, by_sample, dtype of the slopes. sides: slopes per head; 0: their
/// gradient is not requested, and the second result is empty.
inline const Operator<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, int64_t,
                                                 bool, MaybeType)>
    alibi_softmax_backward{"alibi_softmax_backward"};

/// query, key, value, slopes, scale (none: 1 / sqrt(head_dim)), dropout.
inline const Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             std::optional<double>, double)>
    alibi_attention{"alibi_attention"};
inline const dispatcher::Operator<void(const Tensor&, const Tensor&, const Tensor&, double)>
    alibi_check_attention{"alibi_check_attention"};

/// slopes, query length, query start, key start, form, causal.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, Text,
                                         bool)>
    alibi_lse_correction{"alibi_lse_correction"};

// -------------------------------------------------------------------------- checks and preparation

using MaybeSize = std::optional<c10::SymInt>;

/// Checks shapes and dtypes; Meta kernels run it too.
/// @param batch  std::nullopt if there is no batch, as in scores [heads, query, key]
void check_call(const Call& call, const MaybeSize& batch, const c10::SymInt& queries,
                const c10::SymInt& keys);

/// The batch size of positions, offsets or mask; none if none of them has a batch dimension.
MaybeSize batch_of_positions(const Call& call);

/// The call with positions in place of `query_offsets`, and with those that `positions_from_mask`
/// asks for; a call that has positions, or neither, does not change. Autograd kernels resolve too,
/// so that a backward pass uses the same positions and a compiler sees how they are computed.
Call with_positions(Call call, const c10::SymInt& queries, const c10::SymInt& keys);

/// A call's positions as kernels read them, and the tensors that own the memory.
class ScorePositions {
 public:
  /// Checks values: that distances fit in 31 bits and, on the CPU, positions and document
  /// boundaries.
  ScorePositions(const Call& call, int64_t queries, int64_t keys);

  const Distances& distances() const { return distances_; }

 private:
  const Tensor& keep(Tensor tensor);
  void set_positions(const MaybeTensor& positions, core::IndexView* view, int64_t* stride);
  void set_documents(const Tensor& cu_seqlens);
  void set_mask(const Tensor& attention_mask);

  Distances distances_;
  std::vector<Tensor> kept_;
};

}  // namespace posembed::alibi

// Checks a call's positions of queries and keys, documents and mask, and converts them to the form
// that kernels read.
#pragma once

#include <optional>
#include <vector>

#include "alibi/alibi.h"
#include "alibi/alibi_operator.h"

namespace posembed::alibi {

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

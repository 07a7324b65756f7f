// A call's positions, documents and masks: their checks, and the form that kernels read.
#pragma once

#include <optional>
#include <vector>

#include "alibi/kernel.h"
#include "alibi/operator.h"

namespace posembed::alibi {

using MaybeSize = std::optional<c10::SymInt>;

/// Checks shapes, dtypes and devices; Meta kernels run it too. Positions and mask: [length] or
/// [batch, length], documents: [documents + 1].
/// @param batch  none: there is no batch, as in scores [heads, query, key]
void check_places(const Places& places, const MaybeSize& batch, const c10::SymInt& queries,
                  const c10::SymInt& keys, c10::Device device);

/// The batch size of positions or mask; none if neither has a batch dimension.
MaybeSize batch_of_places(const Places& places);

/// The places of a call as kernels read them, and the tensors that own the memory.
class Layout {
 public:
  /// Checks values: that lengths and distances fit in 31 bits and, on the CPU, positions and
  /// document boundaries. Meta kernels must not, because a bound on symbolic lengths would become a
  /// guard of compiled graphs.
  Layout(const Places& places, bool hide, int64_t queries, int64_t keys);

  const Distances& distances() const { return distances_; }

 private:
  const Tensor& keep(Tensor tensor);
  void set_positions(const MaybeTensor& positions, core::IndexView* view, int64_t* stride);

  Distances distances_;
  std::vector<Tensor> kept_;
};

}  // namespace posembed::alibi

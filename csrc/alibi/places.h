// Positions, documents and masks of a call: checks, and their form for kernels.
#pragma once

#include <optional>
#include <vector>

#include "alibi/kernel.h"
#include "alibi/operator.h"

namespace posembed::alibi {

using MaybeSize = std::optional<c10::SymInt>;

/// Checks of shapes, dtypes and devices, which a Meta kernel can run too.
/// Positions and mask: [length] or [batch, length], documents: [documents + 1].
/// @param batch  none: there is no batch, as in scores [heads, query, key]
void check_places(const Places& places, const MaybeSize& batch, const c10::SymInt& queries,
                  const c10::SymInt& keys, c10::Device device);

/// The batch size of positions or mask; none if none of them has that dimension.
MaybeSize batch_of_places(const Places& places);

/// The places of a call as kernels read them, and the tensors that own the memory.
class Layout {
 public:
  /// Checks what depends on values: lengths and distances of 31 bits, and on the CPU positions and
  /// boundaries of documents. Meta kernels must not: a bound on symbolic lengths would be a guard
  /// of compiled graphs.
  Layout(const Places& places, bool hide, int64_t queries, int64_t keys);

  const Distances& distances() const { return distances_; }

 private:
  const Tensor& keep(Tensor tensor);
  void set_positions(const MaybeTensor& positions, core::IndexView* view, int64_t* stride);

  Distances distances_;
  std::vector<Tensor> kept_;
};

}  // namespace posembed::alibi

// Turns tensors into the rotary kernels' arguments. All operators that rotate share these checks
// and the reading of layouts, positions and strides.
#pragma once

#include "rotary/kernel.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed::rotary {

/// The index of each dimension of a layout; batch is -1 if it has none.
struct Dimensions {
  int64_t rank, batch, seq, heads;
  const char* shape;
  Layout layout;
};

Dimensions dimensions(Layout layout);

/// The positions of a call, which has a layout: those given or, if each sample has its own offset
/// or there are documents, those counted from it.
template <typename Call>
MaybeTensor positions_of(const Call& call, const Tensor& query,
                         const MaybeTensor& cu_seqlens = std::nullopt) {
  const Dimensions where = dimensions(call.layout());
  if (cu_seqlens.has_value() && !call.offset().of_samples().has_value()) {
    const c10::SymInt offset = call.offset().number();
    TORCH_CHECK_VALUE(offset >= 0, "offset: expected 0 or more, got ", offset);
  }
  return call.offset().positions(call.positions(), query, where.batch, where.seq, cu_seqlens);
}

/// An operator's names for the arguments that check() reads.
struct Names {
  const char* query = "query";
  const char* key = "key";
  const char* positions = "positions";
};

/// The checks that need no values. Eager and Meta kernels share them. Returns the specification.
SpecificationPointer check(const Tensor& query, const Tensor* key, const Rotation& rotation,
                           const Names& names = {});

/// Checks that a key's dtype, batch and seq are those of `query`.
void check_key(const Tensor& key, const char* name, const Tensor& query, const Dimensions& where);

/// Checks the memory of results for query and key: each may share memory only with its own input,
/// and only if it is that input.
void check_pair_memory(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                       const Tensor& key);

/// Throws c10::IndexError for integers below -1 in a contiguous CPU tensor, and for -1 on some axes
/// of a token but not on all.
void check_position_values(const Tensor& positions, const char* argument, Layout layout);

/// The optional tensors of a RotaryCall as kernels read them: contiguous where kernels need it,
/// undefined if not given.
struct Inputs {
  Tensor positions, cu_seqlens, frequencies;
};

/// Checks the values of CPU tensors before anything is written; CUDA kernels record bad positions.
Inputs checked_inputs(const RotaryCall& call, int64_t tokens);

/// @param out  nullptr if rows are only read: asking for a mutable pointer would copy copy-on-write
///             memory
HeadView head_view(const Tensor& in, const Tensor* out, const Dimensions& where);

/// One or two tensors to rotate, each with the destination of its result, if any.
struct Job {
  const Tensor* in[2];
  const Tensor* out[2];
  int64_t count;
};

/// The kernel's arguments, which point into the others.
Arguments arguments(const Job& job, const Inputs& inputs, const Rotation& rotation,
                    const Specification& spec);

/// Runs the rotation kernel on the device of `query`, one of the tensors that `call` rotates.
void launch_rotation(Arguments& call, const Tensor& query);

/// Throws c10::ValueError for xPos and for numerics other than exact. For operators whose kernels
/// compute only exact angles.
void check_exact_angles(const Specification& spec, const char* operator_name);

/// Like at::empty_like in the dtype `type`, but always with the contiguous last dimension that
/// kernels need.
Tensor empty_result(const Tensor& input, at::ScalarType type);
inline Tensor empty_result(const Tensor& input) { return empty_result(input, input.scalar_type()); }

}  // namespace posembed::rotary

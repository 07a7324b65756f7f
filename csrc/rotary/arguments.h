// From tensors to the rotary kernels' arguments: the checks, and the reading of layouts, positions
// and strides, that all operators that rotate share.
#pragma once

#include "rotary/kernel.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed::rotary {

/// The index of each dimension of a layout; batch is -1 if it has none.
struct Dimensions {
  int64_t rank, batch, seq, heads;
  const char* shape;
};

/// Throws c10::ValueError for an unknown layout.
Dimensions dimensions(Text layout);

/// How an operator's users know what check() reads.
struct Names {
  const char* query = "query";
  const char* key = "key";
  const char* positions = "positions";
};

/// The checks that need no values, which eager and Meta kernels share.
void check(const Tensor& query, const Tensor* key, const Rotation& by, const Names& names = {});

/// Throws c10::IndexError for positions below -1 in a contiguous CPU tensor.
void check_position_values(const Tensor& positions, const char* argument);

/// The optional tensors of a Rotation as kernels read them: contiguous where they must be,
/// undefined where not given.
struct Inputs {
  Tensor positions, cu_seqlens, frequencies;
};

/// Checks the values of CPU tensors, before anything is written; CUDA kernels record bad positions
/// as they meet them.
Inputs checked_inputs(const Rotation& by, int64_t tokens);

/// @param out  nullptr where rows are only read: asking for memory to write would copy it if it is
///             shared until it is written
Rows rows(const Tensor& in, const Tensor* out, const Dimensions& where);

/// What to rotate: one or two tensors, each with the place of its result, if it has one.
struct Job {
  const Tensor* in[2];
  const Tensor* out[2];
  int64_t count;
};

Arguments arguments(const Job& job, const Inputs& inputs, const Rotation& by);

/// Runs the rotation kernel of the device of `query`, which is among what `call` rotates.
void launch_rotation(Arguments& call, const Tensor& query);

/// For operators whose kernels compute only exact angles: throws c10::ValueError for xPos and for
/// numerics other than exact.
void check_exact_angles(Text spec, const char* operator_name);

/// Like at::empty_like, but always with the contiguous last dimension that kernels need.
Tensor empty_result(const Tensor& input);

}  // namespace posembed::rotary

// What the input operators are given: checked, and as the kernel reads it.
#pragma once

#include "input/kernel.h"
#include "input/operator.h"

namespace posembed::input {

/// Everything that eager and Meta kernels check alike. Raises c10::ValueError for shapes and
/// options, c10::TypeError for dtypes.
void check(const Input& in);

/// The part of it that is about dropout of `x`.
void check_dropout(const Tensor& x, const MaybeTensor& seed, double probability);

/// The arguments as the kernel reads them, and the tensors that they point into.
struct Prepared {
  Arguments arguments;
  Tensor token, ids, position, positions, token_type, types, weight, bias, encoding;
};

/// Requires check(in). On the CPU ids, positions and types are looked at: raises c10::IndexError.
Prepared prepare(const Input& in);

}  // namespace posembed::input

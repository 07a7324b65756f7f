// The arguments of the input operators: their checks, and their form for kernels.
#pragma once

#include "input/kernel.h"
#include "input/operator.h"

namespace posembed::input {

/// Whether types are few enough that the table's gradient is a sum for each type.
inline bool has_few_types(const Input& in) {
  return in.token_type.has_value() && in.token_type->sym_size(0) <= most_types;
}

/// The checks that need no data, so that Meta kernels run them too. Raises c10::ValueError for
/// shapes and options, c10::TypeError for dtypes.
void check(const Input& in);

/// The checks of dropout of `x` alone; `first`, named `argument`, is where its part of the mask
/// begins.
void check_dropout(const Tensor& x, const MaybeTensor& seed, double probability,
                   const c10::SymInt& first, const char* argument);

/// The arguments as the kernel reads them, and the tensors that they point into.
struct Prepared {
  Arguments arguments;
  Tensor token, ids, position, positions, token_type, types, weight, bias, encoding;
};

/// Requires check(in). On the CPU also checks the values of ids, positions and types: raises
/// c10::IndexError.
Prepared prepare(const Input& in);

}  // namespace posembed::input

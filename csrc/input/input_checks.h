// Checks the arguments of the input operators and converts them to the form that kernels read.
#pragma once

#include "input/input.h"
#include "input/input_operator.h"
#include "sinusoidal/sinusoidal_specification.h"

namespace posembed::input {

/// Whether there are so few types that the kernel sums the table's gradient per type.
inline bool has_few_types(const Input& in) {
  return in.token_type().has_value() && in.token_type()->sym_size(0) <= max_types;
}

/// The checks that need no data; Meta kernels run them too. Raises c10::ValueError for shapes and
/// options, c10::TypeError for dtypes.
void check(const Input& in);

/// The checks for dropout alone. `first`, named `argument`, is the index of the first element in
/// the mask.
void check_dropout(const MaybeTensor& seed, double probability, const c10::SymInt& first,
                   const char* argument);

/// The arguments as kernels read them, and the tensors that they point into.
struct Prepared {
  Arguments arguments;
  Tensor token, ids, position, positions, token_type, types, weight, bias, encoding;
  sinusoidal::SpecificationPointer sinusoid;
};

/// The pass that a kernel computes.
enum class Pass { forward, backward };

/// Requires check(in). On the CPU also checks the values of ids, positions and types: raises
/// c10::IndexError.
Prepared prepare(const Input& in, Pass pass);

}  // namespace posembed::input

// From tensors to the rotary kernels' arguments: what every operator that rotates checks, and how
// it reads layouts, positions and strides.
#pragma once

#include "rotary/kernel.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed::rotary {

/// Where a layout keeps its dimensions; batch -1: there is none.
struct Dimensions {
  int64_t rank, batch, seq, heads;
  const char* shape;
};

/// Raises ValueError for a layout that is not known.
Dimensions dimensions(Text layout);

/// Everything that eager and Meta kernels check alike.
void check(const Tensor& query, const Tensor* key, const Rotation& by);

/// Dtype, device and shape of memory for the rotated `in`.
void check_out(const Tensor& out, const char* argument, const Tensor& in, const char* in_argument);

/// The tensors that say where tokens are and how fast they turn, as the kernel reads them;
/// undefined where not given.
struct Given {
  Tensor positions, cu_seqlens, frequencies;
};

/// Values are looked at where the CPU can see them, before anything is written; a CUDA kernel
/// records bad positions that it meets.
Given look_at(const Rotation& by, int64_t tokens);

Rows rows(const Tensor& in, const Tensor& out, const Dimensions& where);

/// What to rotate: one or two tensors, each with the place of its result.
struct Job {
  const Tensor* in[2];
  const Tensor* out[2];
  int64_t count;
};

Arguments arguments(const Job& job, const Given& given, const Rotation& by);

/// For operators whose kernels know exact angles and nothing else: raises ValueError for xPos, and
/// for numerics that reproduce a program's bits.
void check_exact_angles(Text spec, const char* operator_name);

/// Strides as the input's where they leave the last dimension contiguous, which the kernel asks
/// for.
Tensor empty_result(const Tensor& input);

/// The kernel asks for a contiguous last dimension; gradients come expanded now and then.
Tensor with_dense_rows(const Tensor& tensor);

/// What is written in place: a contiguous last dimension, and no element twice.
void check_writable(const Tensor& tensor, const char* argument);

/// Raises ValueError where an element belongs to both: exact also for views that interleave.
void check_apart(const Tensor& tensor, const char* argument, const Tensor& other,
                 const char* other_argument);

/// The same for an output that may be its input, which is then rotated in place.
void check_apart_or_same(const Tensor& out, const char* argument, const Tensor& in,
                         const char* in_argument);

}  // namespace posembed::rotary

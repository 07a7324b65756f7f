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
void check(const Tensor& query, const Tensor* key, const MaybeTensor& positions, Text spec,
           Text layout, const c10::SymInt& offset);

/// Positions as the kernel reads them, undefined where there are none. CPU positions are looked at
/// before anything is written; a CUDA kernel records what it meets.
Tensor checked_positions(const MaybeTensor& positions);

Rows rows(const Tensor& in, const Tensor& out, const Dimensions& where);

/// What to rotate: one or two tensors, each with the place of its result.
struct Job {
  const Tensor* in[2];
  const Tensor* out[2];
  int64_t count;
};

Arguments arguments(const Job& job, const Tensor& positions, const Specification& spec,
                    const Dimensions& where, int64_t offset, bool inverse, bool transpose);

/// Strides as the input's where they leave the last dimension contiguous, which the kernel asks
/// for.
Tensor empty_result(const Tensor& input);

/// The kernel asks for a contiguous last dimension; gradients come expanded now and then.
Tensor with_dense_rows(const Tensor& tensor);

/// What is written in place: a contiguous last dimension, and no element twice.
void check_writable(const Tensor& tensor, const char* argument);

/// Raises ValueError where the two are known to share memory.
void check_apart(const Tensor& tensor, const char* argument, const Tensor& other,
                 const char* other_argument);

}  // namespace posembed::rotary

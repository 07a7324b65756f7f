// Parts of a rotation, which are rotations too: the window of one axis, or one head. Kernels that
// rotate one window, or all heads alike, so rotate several windows, or each head in its own way.
// Internal to each file that includes it, because files are compiled for several instruction sets.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rotary/kernel.h"

namespace posembed::rotary {
namespace {

/// Moves the address of an array by a number of elements.
template <typename Address>
void advance(Address*& address, core::Scalar scalar, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<Address>, const char, char>;
  if (address != nullptr) address = static_cast<Byte*>(address) + elements * core::size_of(scalar);
}

/// The first pair of window `w`.
[[maybe_unused]] inline int64_t first_pair(const Arguments& arguments, int64_t w) {
  return arguments.windows == nullptr ? 0 : arguments.windows[w];
}

/// A call for the pairs of window `w` alone, with the rows of the whole call.
[[maybe_unused]] inline Arguments pairs_of_window(const Arguments& arguments, int64_t w) {
  Arguments part = arguments;
  const int64_t first = arguments.windows[w];
  part.windows = nullptr;
  part.window_count = 1;
  part.pairs = arguments.windows[w + 1] - first;
  part.start += 2 * first;
  if (part.axis_of_pair != nullptr) part.axis_of_pair += first;
  if (part.turns != nullptr) part.turns += first;
  if (part.wide_turns != nullptr) part.wide_turns += first;
  if (part.radians != nullptr) part.radians += first;
  if (part.decay != nullptr) part.decay += first;
  advance(part.cosines, part.table_scalar, first * part.table_stride[2]);
  advance(part.sines, part.table_scalar, first * part.table_stride[2]);
  advance(part.frequencies.data, part.frequencies.scalar, first);
  return part;
}

/// The rotation of window `w` of tensor `r`. The first copies what is beside it; the others rotate
/// the result in place. A tangent's windows are all read from the input.
[[maybe_unused]] inline Arguments window_of(const Arguments& arguments, int64_t r, int64_t w) {
  Arguments part = pairs_of_window(arguments, w);
  HeadView& view = part.views[0] = arguments.views[r];
  if (w > 0 && !arguments.tangent && view.out != nullptr) {
    view.in = view.out;
    std::copy_n(view.out_stride, 3, view.in_stride);
  }
  part.count = 1;
  part.start = window_start(arguments, view) + 2 * arguments.windows[w];
  part.head_dim = row_dim(arguments, view);
  view.window_only = false;
  if (r > 0) part.decay_sign = -part.decay_sign;
  return part;
}

/// Calls rotate(part) for the window of each axis, of each tensor.
template <typename Rotate>
void for_each_window(const Arguments& arguments, const Rotate& rotate) {
  for (int64_t r = 0; r < arguments.count; ++r) {
    for (int64_t w = 0; w < arguments.window_count; ++w) rotate(window_of(arguments, r, w));
  }
}

/// A call with the tables, or the frequencies on `axis`, of one head for all rows.
[[maybe_unused]] inline Arguments angles_of_head(const Arguments& arguments, int64_t head,
                                                 int64_t axis = 0) {
  Arguments part = arguments;
  Frequencies& frequencies = part.frequencies;
  advance(frequencies.data, frequencies.scalar,
          head * frequencies.head_stride + axis * frequencies.axis_stride);
  frequencies.head_stride = 0;
  advance(part.cosines, part.table_scalar, head * part.table_head_stride);
  advance(part.sines, part.table_scalar, head * part.table_head_stride);
  part.table_head_stride = 0;
  return part;
}

/// The rotation of one head of every tensor, by its own frequencies.
[[maybe_unused]] inline Arguments head_of(const Arguments& arguments, int64_t head) {
  Arguments part = angles_of_head(arguments, head);
  for (int64_t r = 0; r < arguments.count; ++r) {
    HeadView& view = part.views[r];
    advance(view.in, arguments.scalar, head * view.in_stride[2]);
    advance(view.out, arguments.scalar, head * view.out_stride[2]);
    view.heads = 1;
  }
  return part;
}

/// Calls sum(part, first) for each window in a gradient of frequencies: `views` are x and its
/// gradient, and `first` is the index of the window's first pair.
template <typename Sum>
void for_each_window_sum(const Arguments& arguments, const Sum& sum) {
  if (arguments.windows == nullptr) return sum(arguments, 0);
  for (int64_t w = 0; w < arguments.window_count; ++w) {
    Arguments part = window_of(arguments, 0, w);
    part.views[1] = window_of(arguments, 1, w).views[0];
    part.count = 2;
    sum(part, arguments.windows[w]);
  }
}

}  // namespace
}  // namespace posembed::rotary

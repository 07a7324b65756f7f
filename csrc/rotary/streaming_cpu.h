// Chooses which rows are written with non-temporal stores. Included only by kernel_cpu.cpp files.
#pragma once

#include <cstdint>

#include "core/instruction_set.h"
#include "rotary/kernel.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// Outputs of this size or more would not stay in the caches and use non-temporal stores.
constexpr int64_t uncached_bytes = int64_t{8} << 20;

template <typename T>
bool in_whole_lines(int64_t elements) {
  return elements * static_cast<int64_t>(sizeof(T)) % 64 == 0;
}

/// Whether to write `elements` to rows at `out` with non-temporal stores: if they are many and all
/// rows are aligned.
template <typename T>
bool can_stream(int64_t elements, const void* out, const int64_t (&stride)[3]) {
  return elements * static_cast<int64_t>(sizeof(T)) >= uncached_bytes &&
         reinterpret_cast<uintptr_t>(out) % 64 == 0 && in_whole_lines<T>(stride[0]) &&
         in_whole_lines<T>(stride[1]) && in_whole_lines<T>(stride[2]);
}

/// Whether the rotated window can be streamed vector by vector: see stream_rest().
template <typename T>
bool can_stream_window(const Arguments& arguments) {
  using core::lanes;
  if (std::is_same_v<T, double>) return false;
  if (arguments.interleaved || std::is_same_v<T, float>) return arguments.pairs % lanes == 0;
  return arguments.pairs % (2 * lanes) == 0 || arguments.pairs == lanes;
}

inline int64_t elements_of(const Arguments& arguments, const HeadView& view) {
  return arguments.batch * arguments.seq * view.heads * row_dim(arguments, view);
}

template <typename T>
bool can_stream(const Arguments& arguments, const HeadView& view) {
  const int64_t dim = row_dim(arguments, view);
  const bool in_part = 2 * arguments.pairs < dim;
  return view.in != view.out && !(in_part && arguments.tangent) && in_whole_lines<T>(dim) &&
         in_whole_lines<T>(window_start(arguments, view)) && can_stream_window<T>(arguments) &&
         can_stream<T>(elements_of(arguments, view), view.out, view.out_stride);
}

/// Rows that are rotated in part are assembled in a buffer of this size and streamed from there,
/// because cache lines that are partly streamed and partly copied are slow.
constexpr int64_t buffer_bytes = 4096;

/// Whether rows that cannot be streamed directly are streamed from a buffer: large results whose
/// rows are aligned or contiguous. Rows rotated as a whole use the buffer only on Intel processors,
/// and not for rotation by tables, which it slows down.
template <typename T>
bool can_stream_from_buffer(const Arguments& arguments, const HeadView& view) {
  constexpr int64_t size = sizeof(T);
  const int64_t dim = row_dim(arguments, view), elements = elements_of(arguments, view);
  const bool pays = 2 * arguments.pairs < dim || (core::is_intel && arguments.cosines == nullptr);
  return view.in != view.out && !arguments.tangent && pays && dim * size <= buffer_bytes &&
         elements * size >= uncached_bytes &&
         (view.out_stride[2] == dim || can_stream<T>(elements, view.out, view.out_stride));
}

/// How results are written.
enum class Stores { ordinary, streaming, streaming_from_buffer };

template <typename T>
Stores choose_stores(const Arguments& arguments, const HeadView& view) {
  if (can_stream<T>(arguments, view)) return Stores::streaming;
  return can_stream_from_buffer<T>(arguments, view) ? Stores::streaming_from_buffer
                                                    : Stores::ordinary;
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA

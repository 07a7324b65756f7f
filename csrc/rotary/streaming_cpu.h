// Which rows are written past the caches. Included by kernel_cpu.cpp files only.
#pragma once

#include <cstdint>

#include "rotary/kernel.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// Outputs of this size or more would not stay in the caches and are written past them.
constexpr int64_t streaming_bytes = int64_t{8} << 20;

template <typename T>
bool in_whole_lines(int64_t elements) {
  return elements * static_cast<int64_t>(sizeof(T)) % 64 == 0;
}

/// Whether `elements` are worth writing past the caches to rows at `out`, all of them aligned.
template <typename T>
bool can_stream(int64_t elements, const void* out, const int64_t (&stride)[3]) {
  return elements * static_cast<int64_t>(sizeof(T)) >= streaming_bytes &&
         reinterpret_cast<uintptr_t>(out) % 64 == 0 && in_whole_lines<T>(stride[0]) &&
         in_whole_lines<T>(stride[1]) && in_whole_lines<T>(stride[2]);
}

/// Whether every vector of the rotated window is aligned where rows are.
template <typename T>
bool is_window_aligned(const Arguments& arguments, const Rows& rows) {
  return in_whole_lines<T>(window_start(arguments, rows)) && in_whole_lines<T>(arguments.pairs);
}

inline int64_t elements_of(const Arguments& arguments, const Rows& rows) {
  return arguments.batch * arguments.seq * rows.heads * row_dim(arguments, rows);
}

template <typename T>
bool can_stream(const Arguments& arguments, const Rows& rows) {
  return rows.in != rows.out && is_window_aligned<T>(arguments, rows) &&
         can_stream<T>(elements_of(arguments, rows), rows.out, rows.out_stride);
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA

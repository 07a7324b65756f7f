// Sums and products of numbers that callers give, in checks too: one that wraps may look right.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <cstdint>

namespace posembed::dispatcher {

inline int64_t product(int64_t a, int64_t b, const char* argument) {
  int64_t result = 0;
  TORCH_CHECK_VALUE(!c10::mul_overflows(a, b, &result), argument,
                    ": expected a product below 2^63, got ", a, " x ", b);
  return result;
}

inline int64_t sum(int64_t a, int64_t b, const char* argument) {
  int64_t result = 0;
  TORCH_CHECK_VALUE(!c10::add_overflows(a, b, &result), argument,
                    ": expected a sum below 2^63, got ", a, " + ", b);
  return result;
}

/// The least multiple that is not below `size`, which is not negative.
inline int64_t rounded_up(int64_t size, int64_t multiple, const char* argument) {
  return product(size / multiple + (size % multiple != 0), multiple, argument);
}

/// Symbolic sizes are not checked.
inline c10::SymInt product(const c10::SymInt& a, const c10::SymInt& b, const char* argument) {
  const auto left = a.maybe_as_int(), right = b.maybe_as_int();
  return left && right ? c10::SymInt(product(*left, *right, argument)) : a * b;
}

inline c10::SymInt sum(const c10::SymInt& a, const c10::SymInt& b, const char* argument) {
  const auto left = a.maybe_as_int(), right = b.maybe_as_int();
  return left && right ? c10::SymInt(sum(*left, *right, argument)) : a + b;
}

}  // namespace posembed::dispatcher

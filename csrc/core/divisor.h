// Division by a number that is known at launch. GPUs have no division instruction, so a division
// would delay the first load of a short kernel.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/macros.h"
#include "core/turn.h"

namespace posembed::core {

/// Divides nonnegative int or int64_t numbers.
template <typename Word>
struct Divisor {
  using Unsigned = std::make_unsigned_t<Word>;

  static Divisor of(Word value) {
    return {value, std::numeric_limits<Unsigned>::max() / static_cast<Unsigned>(value)};
  }

  Word value;
  Unsigned inverse;  // the largest Unsigned / value, rounded down
};

template <typename Word>
struct Quotient {
  Word quotient, remainder;
};

template <typename Word>
POSEMBED_INLINE Quotient<Word> divide(Word number, const Divisor<Word>& divisor) {
  using Unsigned = typename Divisor<Word>::Unsigned;
  // The quotient is exact or one too small.
  const auto quotient =
      static_cast<Word>(multiply_high(static_cast<Unsigned>(number), divisor.inverse));
  const Word remainder = number - quotient * divisor.value;
  if (remainder < divisor.value) return {quotient, remainder};
  return {quotient + 1, remainder - divisor.value};
}

}  // namespace posembed::core

// Positions of tokens: integers in the user's int32 or int64, or floating numbers, which are
// converted to fixed point so that angles of fractional positions are as exact as those of
// integers.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/index.h"
#include "core/macros.h"
#include "core/scalar.h"
#include "core/turn.h"

namespace posembed::core {

/// A view of positions in int32, int64 or a floating type.
struct PositionView {
  const void* data = nullptr;
  bool floating = false;
  Index index = Index::int64;
  Scalar scalar = Scalar::float32;
};

/// A position in fixed point: whole + part * 2^-64.
struct Position {
  int64_t whole = 0;
  uint64_t part = 0;
  double scale = 1.0;  // NaN if the position is not finite or too large for `whole`
};

/// The position in fixed point, its magnitude truncated to a multiple of 2^-64.
POSEMBED_INLINE Position split(double position) {
  const double size = fabs(position), floored = floor(size);
  if (!(floored < 0x1p63)) return {0, 0, static_cast<double>(NAN)};
  const auto whole = static_cast<int64_t>(floored);
  const auto part = static_cast<uint64_t>((size - floored) * 0x1p64);
  if (position >= 0) return {whole, part, 1.0};
  return {part == 0 ? -whole : -whole - 1, uint64_t{0} - part, 1.0};
}

POSEMBED_INLINE Position read(const PositionView& view, int64_t index) {
  if (!view.floating) return {read({view.data, view.index}, index), 0, 1.0};
  return split(read_floating<double>(view.data, view.scalar, index));
}

POSEMBED_INLINE double to_double(int64_t position) { return static_cast<double>(position); }

POSEMBED_INLINE double to_double(const Position& position) {
  const double part = static_cast<double>(position.part) * 0x1p-64;
  return position.scale * (static_cast<double>(position.whole) + part);
}

/// The whole turns per position, which `turn` lacks. Only fractional positions need them. 0 for
/// frequencies in [0, 2 pi), in radians per position.
POSEMBED_INLINE int64_t whole_turns(double radians, Turn64 turn) {
  constexpr double turn_of_radian = 0.15915494309189535;  // 1 / (2 pi)
  const double turns = radians * turn_of_radian - static_cast<double>(turn) * 0x1p-64;
  return static_cast<int64_t>(turns < 0 ? turns - 0.5 : turns + 0.5);
}

POSEMBED_INLINE int64_t whole_turns(double radians, Turn128 turn) {
  return whole_turns(radians, turn.high);
}

/// The angle at `position` for `turn` turns per position, and `whole_turns` more.
POSEMBED_INLINE Turn64 phase(const Position& position, Turn64 turn, int64_t whole_turns = 0) {
  return phase(position.whole, turn) + multiply_high(position.part, turn) +
         position.part * static_cast<uint64_t>(whole_turns);
}

POSEMBED_INLINE Turn128 phase(const Position& position, Turn128 turn, int64_t whole_turns = 0) {
  const Turn128 whole = phase(position.whole, turn);
  // part * turn / 2^64, where the product with turn.low only gives a carry.
  const uint64_t carried = multiply_high(position.part, turn.low);
  const uint64_t low = position.part * turn.high + carried;
  const uint64_t high = multiply_high(position.part, turn.high) + (low < carried) +
                        position.part * static_cast<uint64_t>(whole_turns);
  const uint64_t sum = whole.low + low;
  return {whole.high + high + (sum < low), sum};
}

}  // namespace posembed::core

// Computes encodings in blocks of pairs and adds each block at once to all rows of a group that
// share its position.
#include <algorithm>
#include <vector>

#include "core/stream.h"
#include "core/vector.h"
#include "sinusoidal/sinusoidal.h"

namespace posembed::sinusoidal::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;

/// The number of neighbouring elements that take their values from a block. Small, so that the
/// rows' next elements arrive from memory while sines are computed; not smaller, because loads of
/// the next row may falsely depend on the last stores (see loads_meet_stores).
constexpr int64_t block_run = 512;

/// The number of pairs in a block, a multiple of two vectors.
template <bool interleaved>
constexpr int64_t block_pairs = interleaved ? block_run / 2 : block_run;

/// The pair in a slot of a block, in the order in which vectors of T hold pairs (core/vector.h), so
/// that adding needs no shuffles.
template <typename T>
int64_t pair_of_slot(int64_t slot, bool interleaved) {
  if constexpr (std::is_same_v<T, double>) {
    return slot;
  } else {
    const int64_t width = interleaved ? lanes : 2 * lanes, index = slot % width;
    return slot - index +
           (interleaved ? core::pair_of_lane<T>(index) : core::element_of_slot<T>(index));
  }
}

/// Turns in the order of slots, padded with zeros to whole vectors.
template <typename T>
std::vector<TurnOf<T>> slot_turns(const Sinusoid& sinusoid) {
  const int64_t slots = (sinusoid.pairs + 2 * lanes - 1) / (2 * lanes) * (2 * lanes);
  std::vector<TurnOf<T>> turns(static_cast<size_t>(slots));
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t pair = pair_of_slot<T>(slot, sinusoid.layout.interleaved);
    if (pair < sinusoid.pairs) turns[static_cast<size_t>(slot)] = turns_of<T>(sinusoid)[pair];
  }
  return turns;
}

/// The values of a block of pairs, in slots.
template <typename T, bool interleaved>
struct Block {
  alignas(64) Compute<T> sines[block_pairs<interleaved>];
  alignas(64) Compute<T> cosines[block_pairs<interleaved>];
};

template <typename T, bool interleaved>
POSEMBED_INLINE void fill_block(const Sinusoid& sinusoid, const Position& position,
                                const TurnOf<T>* turns, int64_t count,
                                Block<T, interleaved>& block) {
  using C = Compute<T>;
  if (sinusoid.order == 0 && position.part == 0) {
    const auto scale = static_cast<C>(scale_of(sinusoid) * position.scale);
    // The compiler optimises the usual block with constant lengths and factors.
    constexpr int64_t whole = block_pairs<interleaved>;
    if (count < whole) {
      fill_waves(position.whole, turns, count, scale, block.sines, block.cosines);
    } else if (scale == 1) {
      fill_waves(position.whole, turns, whole, C(1), block.sines, block.cosines);
    } else {
      fill_waves(position.whole, turns, whole, scale, block.sines, block.cosines);
    }
    return;
  }
  const double scale = scale_of(sinusoid);
  for (int64_t i = 0; i < count; ++i) {
    const auto factor = static_cast<C>(position.scale * amplitude(scale, sinusoid.order, turns[i]));
    sincos_at(position, turns[i], sinusoid.order, factor, block.sines + i, block.cosines + i);
  }
}

/// Rows that share a position: the first, and the step from one to the next. `in` is null if
/// encodings are only written.
template <typename T>
struct StridedRows {
  const T* in;
  T* out;
  int64_t in_step, out_step;
  int64_t count;

  StridedRows at(int64_t column) const { return moved(column, column, count); }
  StridedRows from(int64_t row) const { return moved(row * in_step, row * out_step, count - row); }

 private:
  StridedRows moved(int64_t read, int64_t written, int64_t left) const {
    return {in == nullptr ? nullptr : in + read, out + written, in_step, out_step, left};
  }
};

FloatPair sum(FloatPair a, FloatPair b) { return {a.first + b.first, a.second + b.second}; }

/// Adds two vectors to `count` rows. All loads come before the first store: rows are often whole
/// pages apart, and processors delay a load until an earlier store at the same offset in another
/// page is done.
template <int64_t count, bool streaming, typename T>
POSEMBED_INLINE void add_vectors(FloatPair value, const StridedRows<T>& rows) {
  FloatPair sums[count];
  T* outs[count];
  for (int64_t r = 0; r < count; ++r) {
    sums[r] = rows.in == nullptr ? value : sum(core::load_pair(rows.in + r * rows.in_step), value);
    outs[r] = rows.out + r * rows.out_step;
  }
  core::store_pairs<streaming>(sums, outs);
}

/// Adds the first `size` elements of two vectors to a row.
template <typename T>
void add_rest(FloatPair value, int64_t size, const StridedRows<T>& row) {
  core::store_pair(row.in == nullptr ? value : sum(core::load_pair(row.in, size), value), row.out,
                   size);
}

/// Adds `size` neighbouring elements to `count` rows; value_at(i) returns two vectors of values
/// from i on.
template <int64_t count, bool streaming, typename T, typename Size, typename ValueAt>
POSEMBED_INLINE void add_to(Size size, const StridedRows<T>& rows, const ValueAt& value_at) {
  int64_t i = 0;
  for (; i + 2 * lanes <= size; i += 2 * lanes) {
    add_vectors<count, streaming>(value_at(i), rows.at(i));
  }
  for (int64_t r = 0; i < size && r < count; ++r) {
    add_rest(value_at(i), size - i, rows.from(r).at(i));
  }
}

/// Whether the next loads are at the same page offset as these stores, in another page. If so,
/// several rows at a time are slower than one by one.
template <typename T>
bool loads_meet_stores(const StridedRows<T>& rows) {
  const auto from = reinterpret_cast<uintptr_t>(rows.in);
  const uintptr_t ahead = (reinterpret_cast<uintptr_t>(rows.out) - from) % core::page;
  return 0 < ahead && ahead <= 2 * sizeof(core::Words);
}

/// The same for all rows.
template <bool streaming, typename T, typename Size, typename ValueAt>
POSEMBED_INLINE void add_to_all(Size size, StridedRows<T> rows, const ValueAt& value_at) {
  if (!loads_meet_stores(rows)) {
    for (; rows.count >= 4; rows = rows.from(4)) add_to<4, streaming>(size, rows, value_at);
    for (; rows.count >= 2; rows = rows.from(2)) add_to<2, streaming>(size, rows, value_at);
  }
  for (; rows.count >= 1; rows = rows.from(1)) add_to<1, streaming>(size, rows, value_at);
}

/// Whether the vectors of all rows are aligned.
template <typename T>
bool is_aligned_to_vector(const StridedRows<T>& rows) {
  constexpr auto width = static_cast<int64_t>(sizeof(core::Words) / sizeof(T));
  return core::is_aligned_to_vector(rows.out) && rows.out_step % width == 0;
}

/// The same; with non-temporal stores if `streamed` and the rows are aligned.
template <typename T, typename ValueAt>
POSEMBED_INLINE void add_span(int64_t size, const StridedRows<T>& rows, bool streamed,
                              const ValueAt& value_at) {
  const auto add = [&](auto known_size) {
    if (streamed && is_aligned_to_vector(rows)) {
      add_to_all<true>(known_size, rows, value_at);
    } else {
      add_to_all<false>(known_size, rows, value_at);
    }
  };
  if (size == block_run) {
    add(std::integral_constant<int64_t, block_run>{});
  } else {
    add(size);
  }
}

/// Adds a block whose first pair is `pair` to rows.
template <typename T, bool interleaved>
POSEMBED_INLINE void add_block(const Layout& layout, const Block<T, interleaved>& block,
                               int64_t pair, int64_t count, const StridedRows<T>& rows,
                               bool streamed) {
  const auto vector = [](const float* values) { return core::load_vector<Floats>(values); };
  const float* firsts = layout.cos_first ? block.cosines : block.sines;
  const float* seconds = layout.cos_first ? block.sines : block.cosines;
  if constexpr (interleaved) {
    const int64_t size = std::min(2 * count, layout.filled - 2 * pair);
    add_span(size, rows.at(2 * pair), streamed, [&](int64_t i) {
      return core::join_neighbours<T>({vector(firsts + i / 2), vector(seconds + i / 2)});
    });
  } else {
    const int64_t second = second_column(layout, pair);
    const auto add_half = [&](const float* values, int64_t column, int64_t size) {
      add_span(size, rows.at(column), streamed, [&](int64_t i) {
        return FloatPair{vector(values + i), vector(values + i + lanes)};
      });
    };
    add_half(firsts, pair, count);
    add_half(seconds, second, std::min(count, layout.filled - second));
  }
}

template <bool interleaved>
void add_block(const Layout& layout, const Block<double, interleaved>& block, int64_t pair,
               int64_t count, const StridedRows<double>& rows, bool) {
  const auto add = [&](int64_t column, double value) {
    if (column >= layout.filled) return;
    for (int64_t r = 0; r < rows.count; ++r) {
      const StridedRows<double> row = rows.from(r).at(column);
      *row.out = (row.in == nullptr ? 0 : *row.in) + value;
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = first_column(layout, pair + i), second = second_column(layout, pair + i);
    add(layout.cos_first ? second : first, block.sines[i]);
    add(layout.cos_first ? first : second, block.cosines[i]);
  }
}

/// Fills the columns after the last pair with x or zeros.
template <typename T>
void finish_rows(const Layout& layout, const StridedRows<T>& rows) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const StridedRows<T> row = rows.from(r);
    for (int64_t c = layout.filled; c < layout.columns; ++c) {
      if (row.in == nullptr) {
        core::store(Compute<T>(0), row.out + c);
      } else {
        row.out[c] = row.in[c];
      }
    }
  }
}

/// Rows [batch, batch + count) of the batch at `seq`.
template <typename T>
StridedRows<T> rows_of(const Arguments& arguments, int64_t batch, int64_t seq, int64_t count) {
  const auto offset = [&](const int64_t* stride) { return batch * stride[0] + seq * stride[1]; };
  const T* in = static_cast<const T*>(arguments.in);
  return {in == nullptr ? nullptr : in + offset(arguments.in_stride),
          static_cast<T*>(arguments.out) + offset(arguments.out_stride), arguments.in_stride[0],
          arguments.out_stride[0], count};
}

/// Applies the encoding of `position` to rows.
template <typename T, bool interleaved>
void encode_position(const Sinusoid& sinusoid, const std::vector<TurnOf<T>>& turns,
                     const Position& position, const StridedRows<T>& rows, bool streamed) {
  constexpr int64_t max_count = block_pairs<interleaved>;
  Block<T, interleaved> block;
  const auto slots = static_cast<int64_t>(turns.size());
  for (int64_t pair = 0; pair < sinusoid.pairs; pair += max_count) {
    fill_block(sinusoid, position, turns.data() + pair, std::min(max_count, slots - pair), block);
    const int64_t count = std::min(max_count, sinusoid.pairs - pair);
    add_block(sinusoid.layout, block, pair, count, rows, streamed);
  }
  finish_rows(sinusoid.layout, rows);
}

/// A thread that writes at least this many bytes uses non-temporal stores; fewer bytes stay in its
/// share of the caches for the next reader.
constexpr int64_t streamed_bytes = int64_t{8} << 20;

template <typename T>
void encode_range(const Arguments& arguments, int64_t begin, int64_t end) {
  const int64_t groups = groups_of(arguments), row = arguments.sinusoid.layout.columns;
  const int64_t bytes = (end - begin) * arguments.batch / groups * row * int64_t{sizeof(T)};
  const bool streamed = arguments.in != arguments.out && bytes >= streamed_bytes;
  const std::vector<TurnOf<T>> turns = slot_turns<T>(arguments.sinusoid);
  const auto encode =
      arguments.sinusoid.layout.interleaved ? encode_position<T, true> : encode_position<T, false>;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t group = i / arguments.seq, seq = i % arguments.seq;
    const int64_t first = group * arguments.batch / groups;
    const int64_t last = (group + 1) * arguments.batch / groups;
    const int64_t index = first * arguments.position_stride[0] + seq * arguments.position_stride[1];
    const Position position =
        placed(arguments.sinusoid, position_of(arguments.positions, arguments.offset, seq, index));
    const StridedRows<T> rows = rows_of<T>(arguments, first, seq, last - first);
    encode(arguments.sinusoid, turns, position, rows, streamed);
  }
  if (streamed) core::stream_fence();
}

}  // namespace

void encode(const Arguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    encode_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::sinusoidal::POSEMBED_ISA

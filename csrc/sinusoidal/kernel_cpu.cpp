// An encoding is made block by block of pairs, in registers and cache, and applied to the rows of
// the whole batch at once: one sine and cosine serve all sequences that share a position.
#include <algorithm>
#include <vector>

#include "core/stream.h"
#include "core/vector.h"
#include "sinusoidal/kernel.h"

namespace posembed::sinusoidal::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;

/// Pairs whose values are in the first-level cache at a time; a multiple of two vectors. Few, so
/// that memory brings the rows' next elements while sines are worked out: worth a quarter of the
/// time with four bytes each. With two, memory takes less of the time and more blocks cost more.
template <typename T>
constexpr int64_t block_pairs = sizeof(T) == 2 ? 256 : 64;

/// Which pair stands in a slot of a block: the order in which vectors of T take them
/// (core/vector.h), so that values meet their elements without shuffles.
template <typename T>
int64_t pair_of_slot(int64_t slot, bool interleaved) {
  if constexpr (std::is_same_v<T, double>) {
    return slot;
  } else {
    const int64_t width = interleaved ? lanes : 2 * lanes, place = slot % width;
    return slot - place +
           (interleaved ? core::pair_of_lane<T>(place) : core::element_of_slot<T>(place));
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

/// The values of a block of pairs, in slots; `first` belongs to the pairs' first columns.
template <typename T>
struct Block {
  alignas(64) Compute<T> first[block_pairs<T>];
  alignas(64) Compute<T> second[block_pairs<T>];
};

template <typename T>
void fill_block(const Sinusoid& sinusoid, const Position& position, const TurnOf<T>* turns,
                int64_t count, Block<T>& block) {
  using C = Compute<T>;
  const bool cos_first = sinusoid.layout.cos_first;
  C* sines = cos_first ? block.second : block.first;
  C* cosines = cos_first ? block.first : block.second;
  if (sinusoid.order == 0 && position.part == 0) {
    const auto scale = static_cast<C>(scale_of(sinusoid) * position.scale);
    fill_waves(position.whole, turns, count, scale, sines, cosines);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto factor = static_cast<C>(position.scale * amplitude(sinusoid, turns[i]));
    sincos_at(position, turns[i], sinusoid.order, factor, sines + i, cosines + i);
  }
}

template <bool streaming, typename T>
void add_vectors(FloatPair value, const T* in, T* out) {
  if (in != nullptr) {
    const FloatPair before = core::load_pair(in);
    value = {before.first + value.first, before.second + value.second};
  }
  core::store_pair<streaming>(value, out);
}

/// The first `count` of two vectors' elements.
template <typename T>
void add_vectors(FloatPair value, int64_t count, const T* in, T* out) {
  T before[2 * lanes], after[2 * lanes];
  if (in != nullptr) memcpy(before, in, static_cast<size_t>(count) * sizeof(T));
  add_vectors<false>(value, in == nullptr ? nullptr : before, after);
  memcpy(out, after, static_cast<size_t>(count) * sizeof(T));
}

/// Adds to `count` neighbouring elements; value_at(i) gives those from i on, two vectors of them.
template <bool streaming, typename T, typename ValueAt>
void add_run(int64_t count, const T* in, T* out, ValueAt value_at) {
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    add_vectors<streaming>(value_at(i), in == nullptr ? nullptr : in + i, out + i);
  }
  if (i < count) add_vectors(value_at(i), count - i, in == nullptr ? nullptr : in + i, out + i);
}

template <typename T, typename ValueAt>
void add_run(int64_t count, const T* in, T* out, bool streamed, ValueAt value_at) {
  if (streamed && core::is_aligned_to_vector(out)) {
    add_run<true>(count, in, out, value_at);
  } else {
    add_run<false>(count, in, out, value_at);
  }
}

/// One row of the batch and where it goes; `in` is null where there is nothing to add to.
template <typename T>
struct Row {
  const T* in;
  T* out;

  Row at(int64_t column) const { return {in == nullptr ? nullptr : in + column, out + column}; }
};

/// Adds a block whose first pair is `pair` to a row.
template <typename T>
void add_block(const Layout& layout, const Block<T>& block, int64_t pair, int64_t count, Row<T> row,
               bool streamed) {
  const auto vector = [](const float* values) { return core::load_vector<Floats>(values); };
  if (layout.interleaved) {
    const Row<T> to = row.at(2 * pair);
    add_run(std::min(2 * count, layout.filled - 2 * pair), to.in, to.out, streamed, [&](int64_t i) {
      return core::join_neighbours<T>({vector(block.first + i / 2), vector(block.second + i / 2)});
    });
    return;
  }
  const int64_t second = second_column(layout, pair);
  const auto add_half = [&](const float* values, int64_t column, int64_t size) {
    const Row<T> to = row.at(column);
    add_run(size, to.in, to.out, streamed, [&](int64_t i) {
      return FloatPair{vector(values + i), vector(values + i + lanes)};
    });
  };
  add_half(block.first, pair, count);
  add_half(block.second, second, std::min(count, layout.filled - second));
}

void add_block(const Layout& layout, const Block<double>& block, int64_t pair, int64_t count,
               Row<double> row, bool) {
  const auto add = [&](int64_t column, double value) {
    if (column < layout.filled) row.out[column] = (row.in == nullptr ? 0 : row.in[column]) + value;
  };
  for (int64_t i = 0; i < count; ++i) {
    add(first_column(layout, pair + i), block.first[i]);
    add(second_column(layout, pair + i), block.second[i]);
  }
}

/// The columns that no pair fills: copied, or zero.
template <typename T>
void finish_row(const Layout& layout, Row<T> row) {
  for (int64_t c = layout.filled; c < layout.columns; ++c) {
    if (row.in == nullptr) {
      core::store(Compute<T>(0), row.out + c);
    } else {
      row.out[c] = row.in[c];
    }
  }
}

template <typename T>
Row<T> row_of(const Arguments& arguments, int64_t batch, int64_t seq) {
  const auto place = [&](const int64_t* stride) { return batch * stride[0] + seq * stride[1]; };
  const T* in = static_cast<const T*>(arguments.in);
  return {in == nullptr ? nullptr : in + place(arguments.in_stride),
          static_cast<T*>(arguments.out) + place(arguments.out_stride)};
}

/// Applies the encoding of `position` to rows [batch, last) at `seq`.
template <typename T>
void encode_position(const Arguments& arguments, const std::vector<TurnOf<T>>& turns,
                     const Position& position, int64_t batch, int64_t last, int64_t seq,
                     bool streamed) {
  const Sinusoid& sinusoid = arguments.sinusoid;
  Block<T> block;
  const auto slots = static_cast<int64_t>(turns.size());
  for (int64_t begin = 0; begin < slots; begin += block_pairs<T>) {
    const int64_t filled = std::min(block_pairs<T>, slots - begin);
    fill_block<T>(sinusoid, position, turns.data() + begin, filled, block);
    const int64_t count = std::min(block_pairs<T>, sinusoid.pairs - begin);
    for (int64_t b = batch; b < last; ++b) {
      add_block(sinusoid.layout, block, begin, count, row_of<T>(arguments, b, seq), streamed);
    }
  }
  for (int64_t b = batch; b < last; ++b) finish_row(sinusoid.layout, row_of<T>(arguments, b, seq));
}

template <typename T>
void encode_range(const Arguments& arguments, int64_t begin, int64_t end) {
  const int64_t columns = arguments.sinusoid.layout.columns;
  const int64_t bytes = arguments.batch * arguments.seq * columns * int64_t{sizeof(T)};
  const bool streamed = arguments.in != arguments.out && bytes >= core::stream_bytes;
  const bool shared = arguments.position_stride[0] == 0;
  const std::vector<TurnOf<T>> turns = slot_turns<T>(arguments.sinusoid);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / arguments.seq, seq = i % arguments.seq;
    const int64_t place = batch * arguments.position_stride[0] + seq * arguments.position_stride[1];
    const Position position = position_of(arguments.positions, arguments.offset, seq, place);
    encode_position<T>(arguments, turns, position, batch, shared ? arguments.batch : batch + 1, seq,
                       streamed);
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

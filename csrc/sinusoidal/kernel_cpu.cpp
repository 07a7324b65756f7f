// An encoding is made block by block of pairs, in registers and cache, and applied to the rows of
// the whole batch at once: one sine and cosine serve all sequences that share a position.
#include <algorithm>

#include "core/stream.h"
#include "sinusoidal/kernel.h"

namespace posembed::sinusoidal::POSEMBED_ISA {
namespace {

using core::Compute;

constexpr int64_t block_pairs = 256;

/// Values for `count` neighbouring columns, beginning with column `start`.
template <typename C>
struct Segment {
  const C* values;
  int64_t start;
  int64_t count;
};

/// One row of the batch and where it goes; `in` is null where there is nothing to add to.
template <typename T>
struct Row {
  const T* in;
  T* out;
};

template <typename T>
void apply(const Segment<Compute<T>>& segment, Row<T> row, bool streamed) {
  T result[2 * block_pairs];
  T* out = streamed ? result : row.out + segment.start;
  if (row.in == nullptr) {
    for (int64_t i = 0; i < segment.count; ++i) core::store(segment.values[i], out + i);
  } else {
    const T* in = row.in + segment.start;
#pragma GCC ivdep  // out is apart from the segment, and apart from in or the same
    for (int64_t i = 0; i < segment.count; ++i) {
      core::store(core::load(in[i]) + segment.values[i], out + i);
    }
  }
  if (streamed) {
    core::stream_copy(row.out + segment.start, result, segment.count * int64_t{sizeof(T)});
  }
}

/// The values of up to `block_pairs` pairs.
template <typename C>
struct Block {
  alignas(64) C sine[block_pairs];
  alignas(64) C cosine[block_pairs];
  alignas(64) C mixed[2 * block_pairs];  // neighbours
};

/// The common case, which compilers can vectorise: a whole position, one amplitude.
template <typename C, typename Turn>
void fill_block(int64_t position, const Turn* turns, int64_t count, C amplitude, Block<C>& block) {
  for (int64_t i = 0; i < count; ++i) {
    C sine, cosine;
    core::sincos_turn(core::phase(position, turns[i]), &sine, &cosine);
    block.sine[i] = sine * amplitude;
    block.cosine[i] = cosine * amplitude;
  }
}

template <typename C, typename Turn>
void fill_block(const Sinusoid& sinusoid, const Position& position, const Turn* turns,
                int64_t count, Block<C>& block) {
  const double scale = sinusoid.scale * position.scale;
  if (sinusoid.order == 0 && position.part == 0) {
    fill_block(position.whole, turns, count, static_cast<C>(scale), block);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto factor = static_cast<C>(position.scale * amplitude(sinusoid, turns[i]));
    sincos_at(position, turns[i], sinusoid.order, factor, block.sine + i, block.cosine + i);
  }
}

/// Calls visit(segment) for every run of columns of an encoding.
template <typename T, typename Visit>
void for_each_segment(const Sinusoid& sinusoid, const Position& position, Visit visit) {
  using C = Compute<T>;
  const Layout& layout = sinusoid.layout;
  Block<C> block;
  const C* first_values = layout.cos_first ? block.cosine : block.sine;
  const C* second_values = layout.cos_first ? block.sine : block.cosine;
  for (int64_t begin = 0; begin < sinusoid.pairs; begin += block_pairs) {
    const int64_t count = std::min(block_pairs, sinusoid.pairs - begin);
    fill_block(sinusoid, position, turns_of<T>(sinusoid) + begin, count, block);
    const int64_t second = second_column(layout, begin);
    if (layout.interleaved) {
      for (int64_t i = 0; i < count; ++i) {
        block.mixed[2 * i] = first_values[i];
        block.mixed[2 * i + 1] = second_values[i];
      }
      visit(Segment<C>{block.mixed, 2 * begin, std::min(2 * count, layout.filled - 2 * begin)});
    } else {
      visit(Segment<C>{first_values, begin, count});
      visit(Segment<C>{second_values, second, std::min(count, layout.filled - second)});
    }
  }
  const C zero = 0;
  for (int64_t i = layout.filled; i < layout.columns; ++i) visit(Segment<C>{&zero, i, 1});
}

template <typename T>
void encode_range(const Arguments& arguments, int64_t begin, int64_t end) {
  const int64_t bytes =
      arguments.batch * arguments.seq * arguments.sinusoid.layout.columns * int64_t{sizeof(T)};
  const bool streamed = arguments.in != arguments.out && bytes >= core::stream_bytes;
  const bool shared = arguments.position_stride[0] == 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / arguments.seq, place = i % arguments.seq;
    const Position position =
        position_of(arguments.positions, arguments.offset, place,
                    batch * arguments.position_stride[0] + place * arguments.position_stride[1]);
    const int64_t last = shared ? arguments.batch : batch + 1;
    for_each_segment<T>(arguments.sinusoid, position, [&](const Segment<Compute<T>>& segment) {
      const T* in = static_cast<const T*>(arguments.in);
      T* out = static_cast<T*>(arguments.out);
      for (int64_t b = batch; b < last; ++b) {
        const T* from = in + b * arguments.in_stride[0] + place * arguments.in_stride[1];
        T* to = out + b * arguments.out_stride[0] + place * arguments.out_stride[1];
        apply(segment, Row<T>{in == nullptr ? nullptr : from, to}, streamed);
      }
    });
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

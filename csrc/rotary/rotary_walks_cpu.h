// How CPU kernels walk rows: which are streamed, which bytes are fetched ahead, and the rotation of
// a group of rows. Included only by *_cpu.cpp files; everything is internal to each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/instruction_set.h"
#include "core/macros.h"
#include "core/stream.h"
#include "core/vector.h"
#include "rotary/rotary.h"
#include "rotary/rotary_angles_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {

/// Elements beside the windows of rows that are streamed or fetched.
struct Margins {
  int64_t before, behind;  // in a row, streamed with its window
  int64_t gap;             // before the next row, fetched
};

/// Rotates rows by the angles of their token. Takes the members of a RowGroup one by one, in
/// registers: reading a struct just after it was written, with other access widths, would wait for
/// all earlier stores.
template <typename T>
using RotateGroup = void (*)(const T* in, T* out, int64_t count, int64_t in_step, int64_t out_step,
                             const Angles<T>& angles, int64_t pairs, const Margins& margins);

/// The rotation for `pairs` and angles of any kind but xPos and tables. rotary_cpu.cpp has the only
/// copy.
template <typename T>
RotateGroup<T> choose_rotation(bool interleaved, bool streaming, int64_t pairs);

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

// -------------------------------------------------------------------------------------------- gaps
// Prefetches gaps between the rows that a kernel reads: values of a packed projection between
// tokens, and columns between heads that are not rotated. Some hardware prefetchers restart after a
// gap; fetching the gap keeps them going.

/// Whether to prefetch gaps: for data larger than the caches, on processors other than Intel's.
template <typename T>
bool fetches_gaps(const Arguments& arguments) {
  int64_t elements = 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    elements += elements_of(arguments, arguments.views[r]);
  }
  return !core::is_intel && elements * static_cast<int64_t>(sizeof(T)) >= uncached_bytes;
}

/// Fetches the cache lines in [begin, end). Always inlined, because GCC drops calls of functions
/// that only prefetch.
POSEMBED_INLINE void fetch(const void* begin, const void* end) {
  constexpr uintptr_t line = 64;
  const auto stop = reinterpret_cast<uintptr_t>(end);
  for (auto at = reinterpret_cast<uintptr_t>(begin); at < stop; at += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(at));
  }
}

/// Elements that a rotation reads of each head: in place, only the window.
inline int64_t read_of_head(const Arguments& arguments, const HeadView& view) {
  return view.in == view.out ? 2 * arguments.pairs : row_dim(arguments, view);
}

/// Elements between the part `read` of a head and that of the token's next head.
inline int64_t gap_between_heads(const HeadView& view, int64_t read) {
  return view.heads > 1 && view.in_stride[2] > read ? view.in_stride[2] - read : 0;
}

/// The gap between heads if it is worth prefetching, otherwise 0: wide gaps cost more than they
/// save.
template <typename T>
int64_t fetched_between_heads(const Arguments& arguments, const HeadView& view) {
  constexpr int64_t size = sizeof(T);
  const int64_t read = read_of_head(arguments, view), gap = gap_between_heads(view, read);
  const bool pays = gap * size <= std::clamp<int64_t>(read * size, 192, 256);
  return pays && fetches_gaps<T>(arguments) ? gap : 0;
}

template <typename T>
POSEMBED_INLINE const T* row_of(const HeadView& view, const Token& token, int64_t head) {
  return static_cast<const T*>(view.in) + offset_of(token, head, view.in_stride);
}

/// Prefetches the memory between a token's rows of tensor `r` and the rows that are read next,
/// unless it is too wide. The rows of the next tensor are read next; after the last tensor, those
/// of the token `next` in the first one. Call it only if gaps between heads, if any, are prefetched
/// too: after a gap that is not, the hardware prefetcher has stopped, and the call costs more than
/// it saves.
template <typename T>
POSEMBED_INLINE void fetch_behind_token(const Arguments& arguments, int64_t r, const Token& token,
                                        const Token& next) {
  constexpr uintptr_t widest = 8192;  // bytes
  const bool same_token = r + 1 < arguments.count;
  const HeadView &view = arguments.views[r], &next_view = arguments.views[same_token ? r + 1 : 0];
  const T* end = row_of<T>(view, token, view.heads - 1) + row_dim(arguments, view);
  const T* begin = row_of<T>(next_view, same_token ? token : next, 0);
  if (reinterpret_cast<uintptr_t>(begin) - reinterpret_cast<uintptr_t>(end) <= widest) {
    fetch(end, begin);
  }
}

// ------------------------------------------------------------------------------------- rotate rows
// Rotates a group of rows by the angles of their token.

using core::FloatPair;
using core::Floats;

/// Rows of one token.
template <typename T>
struct RowGroup {
  const T* in;
  T* out;
  int64_t count;
  int64_t in_step, out_step;  // from row to row
};

template <typename Values>
POSEMBED_INLINE void rotate_pair(Values* first, Values* second, Values cosine, Values sine) {
  const Values x = *first, y = *second;
  *first = core::fma(x, cosine, -(y * sine));
  *second = core::fma(y, cosine, x * sine);
}

/// Prefetches on Intel processors what gains there: 16-bit rows that are not streamed, and
/// `short_rows` of any type, whose halves fill no more than two vectors.
template <bool streaming, int64_t bytes, bool short_rows, typename T>
POSEMBED_INLINE void prefetch(const T* in) {
  if (((!streaming && sizeof(T) == 2) || short_rows) && core::is_intel) {
    core::prefetch_ahead<bytes, streaming ? 1024 : 2048>(in);
  }
}

/// A vector of floats, or one double, whose loops the compiler vectorises.
template <typename Values, typename C>
POSEMBED_INLINE Values load_values(const C* in) {
  if constexpr (std::is_same_v<Values, C>) {
    return *in;
  } else {
    return core::load_vector<Values>(in);
  }
}

/// Sine and cosine, read from memory at each use.
template <typename C>
struct AnglesInMemory {
  const C* cosines;
  const C* sines;

  template <typename T>
  explicit AnglesInMemory(const Angles<T>& angles) : cosines(angles.cosine), sines(angles.sine) {}
  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    rotate_pair(first, second, load_values<Values>(cosines + slot),
                load_values<Values>(sines + slot));
  }
};

template <typename T>
AnglesInMemory(const Angles<T>&) -> AnglesInMemory<Compute<T>>;

/// xPos: multiplies the rotated pair by a second factor.
struct DecayingAngles {
  AnglesInMemory<float> inner;
  const float* outers;

  template <typename T>
  explicit DecayingAngles(const Angles<T>& angles) : inner(angles), outers(angles.outer) {}
  void rotate(Floats* first, Floats* second, int64_t slot) const {
    inner.rotate(first, second, slot);
    const Floats outer = core::load_vector<Floats>(outers + slot);
    *first = *first * outer;
    *second = *second * outer;
  }
};

template <typename T>
void round_both(Floats* a, Floats* b) {
  const FloatPair pair = core::rounded<T>(FloatPair{*a, *b});
  *a = pair.first;
  *b = pair.second;
}

template <typename T>
void round_both(double*, double*) {}

/// Turns the first component by `cosine` and `sine` and the second by the others, in PyTorch's
/// steps: see rotate_in_steps().
template <ProductRounding rounding, typename T, typename Values>
POSEMBED_INLINE void turn_in_steps(Values* first, Values* second, Values cosine, Values sine,
                                   Values other_cosine, Values other_sine) {
  const Values x = *first, y = *second;
  Values terms[] = {x * cosine, y * sine, y * other_cosine, x * other_sine};
  if constexpr (rounding == ProductRounding::to_data_type) {
    round_both<T>(terms, terms + 1);
    round_both<T>(terms + 2, terms + 3);
  }
  *first = terms[0] - terms[1];
  *second = terms[2] + terms[3];
}

/// Rotates in PyTorch's steps.
template <ProductRounding rounding, typename T>
struct AnglesInSteps {
  const Compute<T>* cosines;
  const Compute<T>* sines;

  explicit AnglesInSteps(const Angles<T>& angles) : cosines(angles.cosine), sines(angles.sine) {}
  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    const Values cosine = load_values<Values>(cosines + slot),
                 sine = load_values<Values>(sines + slot);
    turn_in_steps<rounding, T>(first, second, cosine, sine, cosine, sine);
  }
};

/// The same where each component of a pair has its own angle.
template <ProductRounding rounding, typename T>
struct ApartInSteps {
  const ApartAngles<Compute<T>>& angles;

  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    const auto& [cosine, sine] = angles;
    turn_in_steps<rounding, T>(
        first, second, load_values<Values>(cosine[0] + slot), load_values<Values>(sine[0] + slot),
        load_values<Values>(cosine[1] + slot), load_values<Values>(sine[1] + slot));
  }
};

/// Whether results are often ties, halfway between two 16-bit numbers, as sums of 16-bit products
/// are.
template <typename Source>
constexpr bool makes_ties = false;

template <ProductRounding rounding, typename T>
constexpr bool makes_ties<AnglesInSteps<rounding, T>> = true;

template <ProductRounding rounding, typename T>
constexpr bool makes_ties<ApartInSteps<rounding, T>> = true;

/// Sine and cosine, loaded once for all rows; in registers because the number of pairs is a
/// constant.
template <int64_t pairs>
struct AnglesInRegisters {
  static constexpr int64_t vectors = padded(pairs) / lanes;
  Floats cosines[vectors], sines[vectors];

  template <typename T>
  explicit AnglesInRegisters(const Angles<T>& angles) {
    for (int64_t i = 0; i < vectors; ++i) {
      cosines[i] = core::load_vector<Floats>(angles.cosine + i * lanes);
      sines[i] = core::load_vector<Floats>(angles.sine + i * lanes);
    }
  }
  void rotate(Floats* first, Floats* second, int64_t slot) const {
    rotate_pair(first, second, cosines[slot / lanes], sines[slot / lanes]);
  }
};

/// Rotates pairs (i, i + pairs): `blocks` times 2 * lanes of them, starting at `i`. All loads come
/// before the first store, so that cache lines are requested in the order of their addresses.
template <int blocks, bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_half_blocks(const T* in, T* out, const Source& angles, int64_t pairs,
                                        int64_t i) {
  constexpr int64_t block = 2 * lanes;
  FloatPair values[2 * blocks];  // first members of the pairs, then second members
  T* outs[2 * blocks];
  for (int b = 0; b < 2 * blocks; ++b) {
    const int64_t offset = b < blocks ? i + b * block : pairs + i + (b - blocks) * block;
    prefetch<streaming, block * sizeof(T), blocks == 1>(in + offset);
    values[b] = core::load_pair(in + offset);
    outs[b] = out + offset;
  }
  for (int b = 0; b < blocks; ++b) {
    FloatPair &x = values[b], &y = values[blocks + b];
    const int64_t slot = i + b * block;
    angles.rotate(&x.first, &y.first, slot);
    angles.rotate(&x.second, &y.second, slot + lanes);
  }
  core::store_pairs<streaming, makes_ties<Source>>(values, outs);
}

/// Streams the `lanes` pairs at the end of a window that can_stream_window(): whole vectors of
/// float32, and of 16-bit types the two halves of a vector.
template <typename T>
POSEMBED_INLINE void stream_rest(const FloatPair& x, const FloatPair& y, T* first, T* second) {
  if constexpr (std::is_same_v<T, float>) {
    core::store_vector<true>(x.first, first);
    core::store_vector<true>(y.first, second);
  } else {
    core::stream(core::join_first_halves(core::join_pair<T>(x), core::join_pair<T>(y)), first);
  }
}

/// Rotates the pairs (i, i + pairs) starting at `i`, too few to fill two vectors.
template <bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_rest(const T* in, T* out, const Source& angles, int64_t pairs,
                                 int64_t i) {
  const int64_t rest = pairs - i;
  const T *first_in = in + i, *second_in = in + pairs + i;
  T *first_out = out + i, *second_out = out + pairs + i;
  prefetch<streaming, 1, true>(first_in);
  prefetch<streaming, 1, true>(second_in);
  FloatPair x = core::load_pair(first_in, rest), y = core::load_pair(second_in, rest);
  angles.rotate(&x.first, &y.first, i);
  angles.rotate(&x.second, &y.second, i + lanes);
  if constexpr (streaming) {
    stream_rest(x, y, first_out, second_out);
  } else {
    core::store_pair(x, first_out, rest);
    core::store_pair(y, second_out, rest);
  }
}

/// Rotates pairs (i, i + pairs). The tail, which does not fill vectors, comes first, because a load
/// of part of a vector waits for earlier stores to all of it.
template <bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_halves(const T* in, T* out, const Source& angles, int64_t pairs) {
  const int64_t whole = pairs - pairs % (2 * lanes);
  if (whole < pairs) rotate_rest<streaming>(in, out, angles, pairs, whole);
  int64_t i = 0;
  for (; i + 4 * lanes <= whole; i += 4 * lanes) {
    rotate_half_blocks<2, streaming>(in, out, angles, pairs, i);
  }
  for (; i < whole; i += 2 * lanes) {
    rotate_half_blocks<1, streaming>(in, out, angles, pairs, i);
  }
}

/// Rotates pairs (2i, 2i + 1): `blocks` times `lanes` of them, starting at `i`.
template <int blocks, bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_neighbour_blocks(const T* in, T* out, const Source& angles, int64_t i) {
  FloatPair values[blocks];
  T* outs[blocks];
  for (int b = 0; b < blocks; ++b) {
    const int64_t slot = i + b * lanes;
    prefetch<streaming, 2 * lanes * sizeof(T), false>(in + 2 * slot);
    FloatPair x = core::split_neighbours<T>(core::load_pair(in + 2 * slot));
    angles.rotate(&x.first, &x.second, slot);
    values[b] = core::join_neighbours<T>(x);
    outs[b] = out + 2 * slot;
  }
  core::store_pairs<streaming, makes_ties<Source>>(values, outs);
}

/// Rotates pairs (2i, 2i + 1).
template <bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_neighbours(const T* in, T* out, const Source& angles, int64_t pairs) {
  int64_t i = 0;
  if constexpr (sizeof(T) == 2) {
    for (; i + 4 * lanes <= pairs; i += 4 * lanes) {
      rotate_neighbour_blocks<4, streaming>(in, out, angles, i);
    }
  }
  for (; i + lanes <= pairs; i += lanes) {
    rotate_neighbour_blocks<1, streaming>(in, out, angles, i);
  }
  if (const int64_t rest = pairs - i; rest > 0) {
    prefetch<streaming, 1, true>(in + 2 * i);
    FloatPair x = core::split_neighbours<T>(core::load_pair(in + 2 * i, 2 * rest));
    angles.rotate(&x.first, &x.second, i);
    core::store_pair(core::join_neighbours<T>(x), out + 2 * i, 2 * rest);
  }
}

template <bool streaming, typename Source>
POSEMBED_INLINE void rotate_halves(const double* in, double* out, const Source& angles,
                                   int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    double x = in[i], y = in[pairs + i];
    angles.rotate(&x, &y, i);
    out[i] = x;
    out[pairs + i] = y;
  }
}

template <bool streaming, typename Source>
POSEMBED_INLINE void rotate_neighbours(const double* in, double* out, const Source& angles,
                                       int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    double x = in[2 * i], y = in[2 * i + 1];
    angles.rotate(&x, &y, i);
    out[2 * i] = x;
    out[2 * i + 1] = y;
  }
}

constexpr Margins no_margins{0, 0, 0};

template <typename T>
Margins margins_of(const Arguments& arguments, const HeadView& view, Stores stores) {
  const int64_t gap = fetched_between_heads<T>(arguments, view);
  if (stores != Stores::streaming) return {0, 0, gap};
  const int64_t start = window_start(arguments, view);
  return {start, row_dim(arguments, view) - start - 2 * arguments.pairs, gap};
}

/// Streams `count` elements in whole cache lines.
template <typename T>
POSEMBED_INLINE void stream_lines(const T* in, T* out, int64_t count) {
  constexpr auto step = static_cast<int64_t>(sizeof(core::Words) / sizeof(T));
  for (int64_t i = 0; i < count; i += step) {
    core::stream(core::load_vector<core::Words>(in + i), out + i);
  }
}

/// Rotates the window of every row and streams the elements beside it in the order of addresses.
/// Rows are mostly adjacent, so the next page is prefetched. Most windows have nothing beside them,
/// so one test per row skips the empty loops.
template <bool interleaved, bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_each(const RowGroup<T>& rows, const Source& angles, int64_t pairs,
                                 const Margins& margins) {
  constexpr auto size = static_cast<int64_t>(sizeof(T));
  const bool has_margins = (margins.before | margins.behind | margins.gap) != 0;
  const int64_t written = (margins.before + 2 * pairs + margins.behind) * size;
  for (int64_t row = 0; row < rows.count; ++row) {
    const T* in = rows.in + row * rows.in_step;
    T* out = rows.out + row * rows.out_step;
    if (streaming && rows.count > 1) core::expect_stream(out + core::page / size, written);
    if (streaming && has_margins) {
      stream_lines(in - margins.before, out - margins.before, margins.before);
    }
    if constexpr (interleaved) {
      rotate_neighbours<streaming>(in, out, angles, pairs);
    } else {
      rotate_halves<streaming>(in, out, angles, pairs);
    }
    if (has_margins) {
      const T* end = in + 2 * pairs;
      if constexpr (streaming) stream_lines(end, out + 2 * pairs, margins.behind);
      fetch(end + margins.behind, end + margins.behind + margins.gap);
    }
  }
}

/// The functions that rotate and write rows.
template <typename T>
struct Rotating {
  RotateGroup<T> rotate;
  Stores stores;
  Margins margins;
};

template <typename T>
void copy(const T* in, T* out, int64_t count) {
  memcpy(out, in, static_cast<size_t>(count) * sizeof(T));
}

/// Copies elements [begin, end) of every row.
template <typename T>
void copy_group(const RowGroup<T>& rows, int64_t begin, int64_t end) {
  if (begin >= end || rows.in == rows.out) return;
  for (int64_t row = 0; row < rows.count; ++row) {
    copy(rows.in + row * rows.in_step + begin, rows.out + row * rows.out_step + begin, end - begin);
  }
}

/// Copies rows, in one call if they are contiguous.
template <typename T, typename Copy>
void copy_rows(const RowGroup<T>& rows, int64_t dim, const Copy& copy) {
  const bool together = rows.in_step == dim && rows.out_step == dim;
  const int64_t calls = together ? 1 : rows.count, elements = together ? rows.count * dim : dim;
  for (int64_t k = 0; k < calls; ++k) {
    copy(rows.out + k * rows.out_step, rows.in + k * rows.in_step,
         elements * static_cast<int64_t>(sizeof(T)));
  }
}

/// memcpy that prefetches 1 KiB ahead on Intel processors, where prefetching saves time.
inline void copy_ahead(void* out, const void* in, int64_t bytes) {
  const char* ahead = static_cast<const char*>(in) + 1024;
  if (core::is_intel) fetch(ahead, ahead + bytes);
  memcpy(out, in, static_cast<size_t>(bytes));
}

/// Rotates rows in a buffer and streams them from there. Reads rows from start to end, as the
/// hardware prefetcher expects.
template <typename T>
void rotate_in_buffer(const Arguments& arguments, const HeadView& view, const Token& token,
                      RotateGroup<T> rotate, const Angles<T>& angles, const RowGroup<T>& group) {
  constexpr int64_t elements = buffer_bytes / static_cast<int64_t>(sizeof(T));
  alignas(64) T buffer[elements];
  const int64_t dim = row_dim(arguments, view), start = window_start(arguments, view);
  const int64_t max_rows = elements / dim;
  for (int64_t row = 0; row < group.count; row += max_rows) {
    const int64_t count = std::min(max_rows, group.count - row);
    const T* in = group.in + row * group.in_step;
    T* out = group.out + row * group.out_step;
    copy_rows<T>({in, buffer, count, group.in_step, dim}, dim, copy_ahead);
    if (token.rotated) {
      rotate(in + start, buffer + start, count, group.in_step, dim, angles, arguments.pairs,
             no_margins);
    }
    copy_rows<T>({buffer, out, count, dim, group.out_step}, dim, core::stream_copy);
  }
}

/// Rotates the windows of `group`, rows of `rows`, and copies the components outside; copies
/// everything if the token is not rotated. Tangents outside the window are 0 and not copied.
template <typename T>
POSEMBED_INLINE void rotate_rows(const Arguments& arguments, const HeadView& view,
                                 const Token& token, const Rotating<T>& rotating,
                                 const Angles<T>& angles, const RowGroup<T>& group) {
  if (rotating.stores == Stores::streaming_from_buffer) {
    rotate_in_buffer(arguments, view, token, rotating.rotate, angles, group);
    return;
  }
  const int64_t dim = row_dim(arguments, view), start = window_start(arguments, view);
  const bool streams_margins = rotating.stores == Stores::streaming && token.rotated;
  if (!arguments.tangent && !streams_margins) {
    const int64_t window = token.rotated ? start : dim;
    copy_group(group, 0, window);
    copy_group(group, window + 2 * arguments.pairs, dim);
  }
  if (!token.rotated) return;
  rotating.rotate(group.in + start, group.out + start, group.count, group.in_step, group.out_step,
                  angles, arguments.pairs, rotating.margins);
}

// ------------------------------------------------------------------------------------------- tiles
// Tiles: some heads of some tokens. In a head-major tensor each head is a separate memory stream;
// with tiles a kernel reads few streams at a time and prefetches them.

/// The order of tokens and heads: `heads` of each token of a tile, then their next heads.
struct Tile {
  int64_t tokens;
  int64_t heads;
};

/// `head_major` if a tensor is head-major and exceeds the caches; otherwise one token at a time.
/// Tiles of several tokens fetch the rows of the next tile.
template <typename T>
Tile choose_tile(const Arguments& arguments, Tile head_major) {
  bool any_head_major = false;
  int64_t heads = 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    any_head_major = any_head_major || is_head_major(arguments.views[r]);
    heads = std::max(heads, arguments.views[r].heads);
  }
  return any_head_major && fetches_gaps<T>(arguments) ? head_major : Tile{1, heads};
}

/// Fetches `count` rows of `dim`, each in a separate stream, into the L2 cache: L1 could not keep
/// them while other rows are read.
template <typename T>
POSEMBED_INLINE void fetch_rows(const T* in, int64_t step, int64_t count, int64_t dim) {
  constexpr uintptr_t line = 64;
  for (int64_t row = 0; row < count; ++row) {
    const auto begin = reinterpret_cast<uintptr_t>(in + row * step);
    const auto end = begin + static_cast<uintptr_t>(dim) * sizeof(T);
    for (uintptr_t at = begin; at < end; at += line) {
      __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
    }
  }
}

/// Fetches heads [begin, end) of the token `tile.tokens` after `token`.
template <typename T>
POSEMBED_INLINE void fetch_next_tile(const Arguments& arguments, int64_t r, const Tile& tile,
                                     const Token& token, int64_t begin, int64_t end) {
  if (tile.tokens == 1) return;
  const HeadView& view = arguments.views[r];
  const Token next{token.batch, token.seq + tile.tokens, false};
  fetch_rows(row_of<T>(view, next, begin), view.in_stride[2], end - begin,
             row_dim(arguments, view));
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA

// Gather moves rows. Backward radix-sorts the ids, on as many bits as the table needs, then sums
// the gradient rows of each id in one pass; the row of an id that occurs once is only moved.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/row_sum.h"
#include "core/scalar.h"
#include "core/stream.h"
#include "core/vector.h"
#include "token/token.h"

namespace posembed::token::POSEMBED_ISA {
namespace {

// --------------------------------------------------------------------------------------- row mover
// Moves rows between arbitrary addresses, unchanged or times a factor. Moves eight rows in
// parallel, because one row at a time leaves memory bandwidth unused. Included only by kernels,
// once per instruction set.

using core::Compute;
using core::FloatPair;
using core::lanes;
using core::Words;

/// Elements of a row to move before switching to the next row: 128 bytes.
template <typename T>
constexpr int64_t step = 128 / static_cast<int64_t>(sizeof(T));

/// Moves a row unchanged.
template <typename T>
struct Copy {
  template <bool streaming>
  void move_step(const T* in, T* out) const {
    constexpr int64_t width = sizeof(Words) / sizeof(T);
    for (int64_t i = 0; i < step<T>; i += width) {
      core::store_vector<streaming>(core::load_vector<Words>(in + i), out + i);
    }
  }
  void move_rest(const T* in, T* out, int64_t count) const {
    memcpy(out, in, static_cast<size_t>(count) * sizeof(T));
  }
};

/// Moves a row as a sum of one term, which is never -0.
template <typename T>
struct CopySum {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  static constexpr Bits negative_zero = static_cast<Bits>(Bits{1} << (8 * sizeof(T) - 1));

  template <bool streaming>
  void move_step(const T* in, T* out) const {
    typedef Bits Vector __attribute__((vector_size(sizeof(Words))));
    constexpr int64_t width = sizeof(Words) / sizeof(T);
    for (int64_t i = 0; i < step<T>; i += width) {
      const auto value = (Vector)core::load_vector<Words>(in + i);
      core::store_vector<streaming>((Words)(value & (Vector)(value != negative_zero)), out + i);
    }
  }
  void move_rest(const T* in, T* out, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      Bits bits;
      memcpy(&bits, in + i, sizeof bits);
      if (bits == negative_zero) bits = 0;
      memcpy(out + i, &bits, sizeof bits);
    }
  }
};

/// Moves a row times `factor`; if `summing`, as a sum of one term, which is never -0.
template <typename T, bool summing>
struct Scale {
  Compute<T> factor;

  template <typename Number>
  Number scaled(Number value) const {
    return (summing ? value + Compute<T>{0} : value) * factor;
  }
  template <bool streaming>
  void move_step(const T* in, T* out) const {
    if constexpr (std::is_same_v<T, double>) {
      move_rest(in, out, step<T>);
    } else {
      for (int64_t i = 0; i < step<T>; i += 2 * lanes) {
        const FloatPair value = core::load_pair(in + i);
        core::store_pair<streaming>({scaled(value.first), scaled(value.second)}, out + i);
      }
    }
  }
  void move_rest(const T* in, T* out, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) core::store(scaled(core::load(in[i])), out + i);
  }
};

/// Collects rows to move and moves them together.
template <typename T, bool streaming, typename Move>
class RowMover {
 public:
  RowMover(int64_t dim, Move move)
      : dim_(dim), ahead_(std::min(dim - dim % step<T>, prefetch_ahead)), move_(move) {}

  void add(const T* from, T* to) {
    if (streaming) core::expect_stream(to, dim_ * static_cast<int64_t>(sizeof(T)));
    from_[count_] = from;
    to_[count_++] = to;
    if (count_ == 2 * side_by_side) move_first();
  }

  void flush() {
    if (count_ > side_by_side) move_first();
    for (int64_t row = 0; row < count_; ++row) {
      const int64_t next = std::min(row + 1, count_ - 1);
      move_together<1>(from_ + row, from_ + next, to_ + row);
    }
    count_ = 0;
  }

 private:
  // With this many random rows in parallel, moving is as fast as a copy. Short rows end before the
  // hardware prefetcher detects their direction, so the end of a row prefetches the next eight.
  static constexpr int64_t side_by_side = 8;
  static constexpr int64_t prefetch_ahead = 1024 / static_cast<int64_t>(sizeof(T));
  static constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));

  /// Moves the first eight rows and prefetches those of the next eight that are known.
  void move_first() {
    move_together<side_by_side>(from_, from_ + std::min(side_by_side, count_ - side_by_side), to_);
    std::copy(from_ + side_by_side, from_ + count_, from_);
    std::copy(to_ + side_by_side, to_ + count_, to_);
    count_ -= side_by_side;
  }

  template <int64_t rows>
  void move_together(const T* const* from, const T* const* next, T* const* to) const {
    const T* in[rows];  // copies that no store can change
    const T* then[rows];
    T* out[rows];
    std::copy(from, from + rows, in);
    std::copy(next, next + rows, then);
    std::copy(to, to + rows, out);
    const Move move = move_;
    const int64_t dim = dim_, whole = dim - dim % step<T>, ahead = ahead_;
    for (int64_t i = 0; i < whole; i += step<T>) {
      const bool ends = i + ahead >= whole;
      const int64_t soon = ends ? i + ahead - whole : i + ahead;
#pragma GCC unroll 8
      for (int64_t row = 0; row < rows; ++row) {
        const T* coming = (ends ? then[row] : in[row]) + soon;
        __builtin_prefetch(coming, /*write=*/0, /*locality=*/2);
        __builtin_prefetch(coming + line, /*write=*/0, /*locality=*/2);
        move.template move_step<streaming>(in[row] + i, out[row] + i);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      move.move_rest(in[row] + whole, out[row] + whole, dim - whole);
    }
  }

  int64_t dim_;
  int64_t ahead_;
  Move move_;
  int64_t count_ = 0;
  const T* from_[2 * side_by_side];
  T* to_[2 * side_by_side];
};

template <bool streaming, typename T>
void fill_with_zeros(T* out, int64_t count) {
  const auto bytes = count * static_cast<int64_t>(sizeof(T));
  if constexpr (streaming) {
    core::stream_zeros(out, bytes);
  } else {
    memset(out, 0, static_cast<size_t>(bytes));
  }
}

/// Whether rows of `dim` elements at `out` can be written with non-temporal stores.
template <typename T>
bool has_aligned_rows(const void* out, int64_t dim) {
  return core::is_aligned_to_vector(out) &&
         dim * static_cast<int64_t>(sizeof(T)) % static_cast<int64_t>(sizeof(Words)) == 0;
}

// ----------------------------------------------------------------------------------- gather

template <typename T, bool streaming, typename Move>
void gather_range(const GatherArguments& a, Move move, int64_t begin, int64_t end) {
  RowMover<T, streaming, Move> mover(a.embedding_dim, move);
  T* out = static_cast<T*>(a.out) + begin * a.embedding_dim;
  for (int64_t index = begin; index < end; ++index, out += a.embedding_dim) {
    const int64_t id = read(a.ids, index);
    const uint64_t row = static_cast<uint64_t>(id) + static_cast<uint64_t>(a.first_row);
    if (row < static_cast<uint64_t>(a.rows)) {
      mover.add(static_cast<const T*>(a.weight) + static_cast<int64_t>(row) * a.weight_stride, out);
    } else if (!a.has_holes || id != hole) {
      fill_with_zeros<streaming>(out, a.embedding_dim);
    }
  }
  mover.flush();
  if constexpr (streaming) core::stream_fence();
}

template <typename T, bool streaming>
void gather_scaled(const GatherArguments& a, int64_t begin, int64_t end) {
  if (a.scale == 1.0) return gather_range<T, streaming>(a, Copy<T>{}, begin, end);
  const auto factor = static_cast<Compute<T>>(a.scale);
  gather_range<T, streaming>(a, Scale<T, /*summing=*/false>{factor}, begin, end);
}

template <typename T>
void gather_rows(const GatherArguments& a, int64_t begin, int64_t end) {
  const int64_t bytes = a.count * a.embedding_dim * static_cast<int64_t>(sizeof(T));
  if (bytes >= core::stream_bytes && has_aligned_rows<T>(a.out, a.embedding_dim)) {
    gather_scaled<T, true>(a, begin, end);
  } else {
    gather_scaled<T, false>(a, begin, end);
  }
}

// ------------------------------------------------------------------------------------- sort

constexpr int max_digit_bits = 11;  // counts stay in the L1 cache

/// The digits of a key in a least-significant-digit radix sort.
struct Passes {
  int count;
  int digit_bits;
};

Passes passes_for(int64_t num_embeddings) {
  int bits = 0;
  while (bits < 32 && (num_embeddings - 1) >> bits > 0) ++bits;
  const int count = (bits + max_digit_bits - 1) / max_digit_bits;
  return {count, count == 0 ? 0 : (bits + count - 1) / count};
}

/// One stable pass of the sort.
void sort_digit(const uint64_t* from, int64_t count, int shift, int digit_bits, uint64_t* to) {
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  int64_t position[1 << max_digit_bits];
  std::fill(position, position + mask + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++position[(from[i] >> shift) & mask];
  int64_t sum = 0;
  for (uint64_t digit = 0; digit <= mask; ++digit) {
    const int64_t size = position[digit];
    position[digit] = sum;
    sum += size;
  }
  for (int64_t i = 0; i < count; ++i) to[position[(from[i] >> shift) & mask]++] = from[i];
}

int64_t pack(const GroupArguments& a, uint64_t* entries) {
  int64_t kept = 0;
  for (int64_t index = 0; index < a.count; ++index) {
    const int64_t id = read(a.ids, index);
    const uint64_t row = static_cast<uint64_t>(id) + static_cast<uint64_t>(a.first_row);
    if (row < static_cast<uint64_t>(a.num_embeddings) && id != a.padding_idx) {
      entries[kept++] = row << 32 | static_cast<uint64_t>(index);
    }
  }
  return kept;
}

void mark_groups(const GroupArguments& a, int64_t kept) {
  int64_t groups = 0;
  for (int64_t i = 0; i < kept; ++i) {
    if (i == 0 || a.entries[i] >> 32 != a.entries[i - 1] >> 32) a.starts[groups++] = i;
  }
  a.starts[groups] = kept;
  *a.groups = groups;
}

// ------------------------------------------------------------------------------------- sums

/// The gradient rows of the entries of a group.
template <typename T, bool has_factors>
struct GroupRows {
  using Element = T;
  static constexpr bool weighted = has_factors;

  const T* gradient;
  int64_t dim;
  const uint32_t* sources;
  const Compute<T>* factors;
  const uint64_t* entries;
  int64_t begin, end;
  int64_t last;  // entry to prefetch

  uint32_t index(int64_t entry) const { return static_cast<uint32_t>(entries[entry]); }
  const T* row(int64_t entry) const {
    const uint32_t at = index(entry);
    return gradient + int64_t{sources == nullptr ? at : sources[at]} * dim;
  }
  const T* coming(int64_t entry) const { return row(std::min(entry, last)); }
  bool counts(int64_t) const { return true; }
  Compute<T> factor(int64_t entry) const { return factors[index(entry)]; }
};

template <typename T, bool weighted>
GroupRows<T, weighted> rows_of(const SumArguments& a, int64_t group, int64_t last) {
  return {static_cast<const T*>(a.gradient),
          a.embedding_dim,
          a.sources.rows,
          static_cast<const Compute<T>*>(a.sources.factors),
          a.entries,
          a.starts[group],
          a.starts[group + 1],
          last};
}

template <typename C>
struct MultiplyBy {
  C factor;

  template <typename Number>
  Number operator()(Number sum) const {
    return sum * factor;
  }
};

/// Writes groups [begin, end) and calls gap(row) with the row of `out` before each. Copies a row if
/// it is alone in its group and has no factor.
template <typename T, bool streaming, bool weighted, typename Move, typename Gap>
void sum_range(const SumArguments& a, int64_t begin, int64_t end, Move move, const Gap& gap) {
  RowMover<T, streaming, Move> mover(a.embedding_dim, move);
  const int64_t last = a.starts[end] - 1;
  for (int64_t number = begin; number < end; ++number) {
    const auto rows = rows_of<T, weighted>(a, number, last);
    const int64_t count = rows.end - rows.begin;
    const int64_t row = a.dense ? static_cast<int64_t>(a.entries[rows.begin] >> 32) : number;
    gap(row);
    T* out = static_cast<T*>(a.out) + row * a.embedding_dim;
    if (count == 1 && !weighted) {
      mover.add(rows.row(rows.begin), out);
    } else {
      const double divisor = a.scale_grad_by_freq ? static_cast<double>(count) : 1.0;
      const MultiplyBy<Compute<T>> finish{static_cast<Compute<T>>(a.scale / divisor)};
      if (streaming) core::expect_stream(out, a.embedding_dim * int64_t{sizeof(T)});
      core::sum_rows<streaming>(rows, a.embedding_dim, finish, out);
    }
  }
  mover.flush();
}

template <typename T, bool streaming, typename Gap>
void sum_range(const SumArguments& a, int64_t begin, int64_t end, const Gap& gap) {
  if (a.sources.factors != nullptr) {
    sum_range<T, streaming, true>(a, begin, end, CopySum<T>{}, gap);
  } else if (a.scale == 1.0) {
    sum_range<T, streaming, false>(a, begin, end, CopySum<T>{}, gap);
  } else {
    const Scale<T, /*summing=*/true> scale{static_cast<Compute<T>>(a.scale)};
    sum_range<T, streaming, false>(a, begin, end, scale, gap);
  }
}

/// The start of a step of FillArguments' work: the first row and the first group at or after it.
struct FillStart {
  int64_t row, group;
};

FillStart fill_start(const FillArguments& a, int64_t at) {
  const auto row_of = [&](int64_t group) {
    return static_cast<int64_t>(a.sum.entries[a.sum.starts[group]] >> 32);
  };
  int64_t low = 0, high = a.groups;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (row_of(middle) + a.sum.starts[middle] < at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t after = low == 0 ? 0 : row_of(low - 1) + 1;
  return {std::min(a.rows, std::max(after, at - a.sum.starts[low])), low};
}

template <typename T, bool streaming>
void fill_range(const FillArguments& a, const FillStart& begin, const FillStart& end) {
  T* out = static_cast<T*>(a.sum.out);
  const int64_t dim = a.sum.embedding_dim;
  int64_t next = begin.row;
  const auto fill_gap = [&](int64_t row) {
    fill_with_zeros<streaming>(out + next * dim, (row - next) * dim);
    next = row + 1;
  };
  sum_range<T, streaming>(a.sum, begin.group, end.group, fill_gap);
  fill_gap(end.row);
}

/// Calls `function` with the element type and the choice to stream, as types.
template <typename Function>
void visit_sum(const SumArguments& a, const Function& function) {
  core::visit_scalar(a.scalar, [&](auto tag) {
    if (a.streaming && has_aligned_rows<typename decltype(tag)::type>(a.out, a.embedding_dim)) {
      function(tag, std::true_type{});
      core::stream_fence();
    } else {
      function(tag, std::false_type{});
    }
  });
}

}  // namespace

void gather(const GatherArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    gather_rows<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void group(const GroupArguments& arguments) {
  // An even number of passes ends in `entries`; an odd number must start from `scratch`.
  const Passes passes = passes_for(arguments.num_embeddings);
  uint64_t* from = passes.count % 2 == 0 ? arguments.entries : arguments.scratch;
  uint64_t* to = passes.count % 2 == 0 ? arguments.scratch : arguments.entries;
  const int64_t kept = pack(arguments, from);
  for (int pass = 0; pass < passes.count; ++pass) {
    sort_digit(from, kept, 32 + pass * passes.digit_bits, passes.digit_bits, to);
    std::swap(from, to);
  }
  mark_groups(arguments, kept);
}

void sum_groups(const SumArguments& arguments, int64_t begin, int64_t end) {
  visit_sum(arguments, [&](auto tag, auto streaming) {
    sum_range<typename decltype(tag)::type, streaming.value>(arguments, begin, end, [](int64_t) {});
  });
}

void fill_table(const FillArguments& arguments, int64_t begin, int64_t end) {
  const FillStart from = fill_start(arguments, begin), to = fill_start(arguments, end);
  visit_sum(arguments.sum, [&](auto tag, auto streaming) {
    fill_range<typename decltype(tag)::type, streaming.value>(arguments, from, to);
  });
}

namespace {

// ------------------------------------------------------------------------------------------- codes
// Widens two vectors of codes at a time. Rows are read at random, so those that come next are
// prefetched.

using core::Floats;

using Bytes = uint8_t __attribute__((vector_size(lanes)));
using HalfBytes = uint8_t __attribute__((vector_size(lanes / 2)));
using Shorts = uint16_t __attribute__((vector_size(2 * lanes)));
using HalfShorts = uint16_t __attribute__((vector_size(lanes)));
using Ints = int32_t __attribute__((vector_size(sizeof(Words))));

template <typename Vector>
POSEMBED_INLINE Vector load_bytes(const uint8_t* in) {
  Vector value;
  memcpy(&value, in, sizeof value);
  return value;
}

// GCC converts vectors to four times their width in many steps.
POSEMBED_INLINE Words words_of(Bytes bytes) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

/// number_of() in each lane.
template <Code code>
POSEMBED_INLINE Floats numbers_of(Words bits) {
  if constexpr (code == Code::int8) {
    return __builtin_convertvector((Ints)(bits << 24) >> 24, Floats);
  } else if constexpr (code == Code::uint4) {
    return __builtin_convertvector((Ints)bits, Floats);
  } else {
    const Words magnitude = bits & 0x7fu;
    const Words normal = (magnitude << 20) + (120u << 23);
    const Floats small = __builtin_convertvector((Ints)magnitude, Floats) * 0x1p-9f;
    Words value = magnitude < 8u ? (Words)small : normal;
    value = magnitude == 0x7fu ? Words{} + 0x7fc00000u : value;
    return (Floats)(value | (bits & 0x80u) << 24);
  }
}

/// 2 * lanes numbers in the order of core::load_pair for elements of type T.
template <typename T, Code code>
POSEMBED_INLINE core::FloatPair load_codes(const uint8_t* row, int64_t column) {
  constexpr bool by_parity = std::is_same_v<T, core::BFloat16>;
  if constexpr (code == Code::uint4) {
    const uint8_t* in = row + column / 2;
    if constexpr (by_parity) {
      const auto both = load_bytes<Bytes>(in);
      return {numbers_of<code>(words_of(both & 15)), numbers_of<code>(words_of(both >> 4))};
    }
    const auto spread = [in](int64_t at) {
      const auto both = __builtin_convertvector(load_bytes<HalfBytes>(in + at), HalfShorts);
      return words_of((Bytes)((both | both << 4) & 0x0f0f));
    };
    return {numbers_of<code>(spread(0)), numbers_of<code>(spread(lanes / 2))};
  } else if constexpr (by_parity) {
    const auto both = load_bytes<Shorts>(row + column);
    return {numbers_of<code>(__builtin_convertvector(both & 0xff, Words)),
            numbers_of<code>(__builtin_convertvector(both >> 8, Words))};
  } else {
    return {numbers_of<code>(words_of(load_bytes<Bytes>(row + column))),
            numbers_of<code>(words_of(load_bytes<Bytes>(row + column + lanes)))};
  }
}

/// Columns [begin, end), which share a scale.
template <typename T, Code code, bool has_bias, bool streaming>
POSEMBED_INLINE void widen_block(const uint8_t* row, const BlockScale& block, double factor,
                                 int64_t begin, int64_t end, T* out) {
  using C = core::Compute<T>;
  int64_t column = begin;
  if constexpr (!std::is_same_v<T, double>) {
    const Floats scale = block.scale + Floats{}, bias = block.bias + Floats{};
    const auto wide = [&](Floats number) {
      const Floats value = has_bias ? core::fma(number, scale, bias) : number * scale;
      return value * static_cast<float>(factor);
    };
    for (; column + 2 * lanes <= end; column += 2 * lanes) {
      const core::FloatPair numbers = load_codes<T, code>(row, column);
      core::store_pair<streaming>({wide(numbers.first), wide(numbers.second)}, out + column);
    }
  }
  for (; column < end; ++column) {
    const float number = number_of<code>(code_at<code>(row, column));
    core::store(dequantized<C, has_bias>(number, block, static_cast<C>(factor)), out + column);
  }
}

constexpr int64_t rows_ahead = 8;

/// The codes and the first scale of a row.
void prefetch_row(const QuantizedArguments& a, int64_t blocks, int64_t index) {
  const int64_t row = read(a.ids, index);
  const int64_t bytes = a.code == Code::uint4 ? a.embedding_dim / 2 : a.embedding_dim;
  for (int64_t at = 0; at < std::min<int64_t>(bytes, 1024); at += 64) {
    __builtin_prefetch(a.codes + row * a.row_bytes + at);
  }
  const int64_t scale = row / a.block_rows * blocks;
  __builtin_prefetch(static_cast<const char*>(a.scales) + (a.has_exponents ? 1 : 4) * scale);
  if (a.biases != nullptr) __builtin_prefetch(a.biases + scale);
}

template <typename T, Code code, bool has_bias, bool streaming>
void gather_range(const QuantizedArguments& a, int64_t begin, int64_t end) {
  const int64_t blocks = blocks_of(a);
  T* out = static_cast<T*>(a.out) + begin * a.embedding_dim;
  for (int64_t index = begin; index < end; ++index, out += a.embedding_dim) {
    if (index + rows_ahead < end) prefetch_row(a, blocks, index + rows_ahead);
    if (streaming) core::expect_stream(out + a.embedding_dim, a.embedding_dim * int64_t{sizeof(T)});
    const int64_t row = read(a.ids, index);
    const uint8_t* codes = a.codes + row * a.row_bytes;
    for (int64_t first = 0, block = 0; first < a.embedding_dim; first += a.block_columns, ++block) {
      widen_block<T, code, has_bias, streaming>(
          codes, block_scale(a, row / a.block_rows * blocks + block), a.factor, first,
          std::min(first + a.block_columns, a.embedding_dim), out);
    }
  }
  if constexpr (streaming) core::stream_fence();
}

template <typename T, Code code, bool has_bias>
void gather_rows(const QuantizedArguments& a, int64_t begin, int64_t end) {
  // Streaming stores need whole, aligned vectors.
  const bool whole = a.block_columns % (2 * lanes) == 0 || a.block_columns >= a.embedding_dim;
  const bool streamed = !std::is_same_v<T, double> && whole && a.embedding_dim % (2 * lanes) == 0 &&
                        core::streams_rows<T>(a.out, a.count, a.embedding_dim);
  const auto range =
      streamed ? gather_range<T, code, has_bias, true> : gather_range<T, code, has_bias, false>;
  range(a, begin, end);
}

template <typename T, Code code>
void gather_of(const QuantizedArguments& a, int64_t begin, int64_t end) {
  const auto gather =
      a.biases == nullptr ? gather_rows<T, code, false> : gather_rows<T, code, true>;
  gather(a, begin, end);
}

}  // namespace

void gather_codes(const QuantizedArguments& a, int64_t begin, int64_t end) {
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.code == Code::float8) {
      gather_of<T, Code::float8>(a, begin, end);
    } else if (a.code == Code::int8) {
      gather_of<T, Code::int8>(a, begin, end);
    } else {
      gather_of<T, Code::uint4>(a, begin, end);
    }
  });
}

}  // namespace posembed::token::POSEMBED_ISA

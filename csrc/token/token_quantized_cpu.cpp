// Widens two vectors of codes at a time. Rows are read at random, so those that come next are
// prefetched.
#include <algorithm>

#include "core/fma.h"
#include "core/stream.h"
#include "core/vector.h"
#include "token/token.h"

namespace posembed::token::POSEMBED_ISA {
namespace {

using core::Floats;
using core::lanes;
using core::Words;

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

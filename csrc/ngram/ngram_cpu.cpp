// Takes the remainders of as many heads together as a register has 64-bit lanes.
#include <algorithm>
#include <cstring>

#include "core/vector.h"
#include "ngram/ngram.h"

namespace posembed::ngram::POSEMBED_ISA {
namespace {

using Longs = int64_t __attribute__((vector_size(sizeof(core::Words))));
using Unsigned = uint64_t __attribute__((vector_size(sizeof(core::Words))));
constexpr int64_t width = sizeof(Longs) / sizeof(int64_t);

constexpr int64_t text_size = 256;  // tokens that are hashed together

/// The product of the lower halves of each lane.
POSEMBED_INLINE Unsigned multiply_lower(Unsigned a, Unsigned b) {
#if defined(__AVX512F__)
  return (Unsigned)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Unsigned)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

/// The upper 64 bits of the products.
POSEMBED_INLINE Unsigned multiply_high(Unsigned a, Unsigned b) {
  const Unsigned a_high = a >> 32, b_high = b >> 32;
  const Unsigned low = multiply_lower(a, b), middle = multiply_lower(a_high, b) + (low >> 32);
  const Unsigned other = multiply_lower(a, b_high) + (middle & 0xffffffffu);
  return multiply_lower(a_high, b_high) + (middle >> 32) + (other >> 32);
}

constexpr int64_t narrow_modulus = int64_t{1} << 31;

/// number - quotient * modulus, of which it is known that it is below 2 * modulus.
template <bool narrow>
POSEMBED_INLINE Longs rest(Unsigned number, Unsigned quotient, Longs modulus) {
  if constexpr (!narrow) return (Longs)(number - quotient * (Unsigned)modulus);
  // It fits in 32 bits, and so do the numbers that it needs.
  return (Longs)((number - multiply_lower(quotient, (Unsigned)modulus)) & 0xffffffffu);
}

/// The remainders of signed numbers, not negative: floor_remainder() of `width` columns.
template <bool narrow>
POSEMBED_INLINE Longs floor_remainders(Longs number, Longs modulus, Unsigned inverse) {
  const Longs negative = number < 0;
  const Unsigned size = (Unsigned)(number ^ negative);
  const Unsigned quotient = multiply_high(size, inverse);
  const Longs excess = rest<narrow>(size, quotient, modulus) - modulus;  // below modulus
  const Longs remainder = excess + (modulus & (Longs)(excess < 0));
  return (remainder ^ negative) + (modulus & negative);
}

/// The divisors of `width` columns.
struct Moduli {
  Longs modulus;
  Unsigned inverse;
};

POSEMBED_INLINE Moduli moduli_of(const IdsArguments& a, int64_t column) {
  return {core::load_vector<Longs>(a.modulus + column),
          core::load_vector<Unsigned>(a.inverse + column)};
}

/// Writes the ids of the columns from `column` on, of one head for each remainder.
void write_ids(const IdsArguments& a, Longs remainders, int64_t column, int64_t columns,
               int64_t* out) {
  const Longs id = remainders + core::load_vector<Longs>(a.offset + column);
  if (column + width <= columns) {  // columns of the next size are written later
    memcpy(out + column, &id, sizeof id);
  } else {
    memcpy(out + column, &id, static_cast<size_t>(columns - column) * sizeof(int64_t));
  }
}

/// The ids of the n-grams that end at `newest`, where the tokens before it precede it.
template <Rule rule, bool narrow>
void hash_token(const IdsArguments& a, const int64_t* newest, int64_t columns, int64_t* out) {
  // Products give all heads the same hash.
  Unsigned hashes[rule == Rule::rolling ? max_multipliers / width + 1 : 1] = {};
  uint64_t product = 0;
  int64_t begin = 0;
  for (int64_t size = 0; size < a.num_sizes; ++size) {
    const int64_t end = a.sizes[size];
    for (int64_t back = begin; rule == Rule::products && back < end; ++back) {
      product ^= static_cast<uint64_t>(newest[-back]) * a.multipliers[back];
    }
    for (int64_t head = 0; head < a.heads; head += width) {
      const int64_t column = size * a.heads + head;
      const auto [modulus, inverse] = moduli_of(a, column);
      Unsigned multipliers{};
      if constexpr (rule != Rule::products) {
        multipliers = core::load_vector<Unsigned>(a.multipliers + head);
      }
      Unsigned hash = product + Unsigned{};
      if constexpr (rule == Rule::rolling) {
        hash = hashes[head / width];
        for (int64_t back = begin; back < end; ++back) {
          hash = hash * multipliers + static_cast<uint64_t>(newest[-back]);
        }
        hashes[head / width] = hash;
      }
      for (int64_t back = end - 1; rule == Rule::modular && back > 0; --back) {
        hash += static_cast<uint64_t>(newest[-back]);
        hash = (Unsigned)floor_remainders<narrow>((Longs)hash, modulus, inverse) * multipliers;
      }
      if (rule == Rule::modular) hash += static_cast<uint64_t>(*newest);
      write_ids(a, floor_remainders<narrow>((Longs)hash, modulus, inverse), column, columns, out);
    }
    begin = end;
  }
}

/// The ids of a token that is not text.
template <Rule rule, bool narrow>
void hash_padding(const IdsArguments& a, int64_t columns, int64_t* out) {
  int64_t padding[max_multipliers];
  std::fill_n(padding, a.longest, a.padding);
  hash_token<rule, narrow>(a, padding + a.longest - 1, columns, out);
}

/// Tokens of one document, with those before them in front.
template <Rule rule, bool narrow>
void hash_text(const IdsArguments& a, const Document& document, int64_t begin, int64_t end) {
  const int64_t columns = int64_t{a.num_sizes} * a.heads, before = a.longest - 1;
  int64_t text[max_multipliers + text_size];
  visit_before(a, document, begin / a.seq, begin % a.seq, a.longest,
               [&](int64_t back, int64_t token) { text[before - back] = token; });
  int64_t* newest = text + before - 1;
  for (int64_t i = begin; i < end; ++i) {
    if (!is_text(a, i)) {
      hash_padding<rule, narrow>(a, columns, a.out + i * columns);
      continue;
    }
    *++newest = read(a.ids, i);
    hash_token<rule, narrow>(a, newest, columns, a.out + i * columns);
    if (a.has_boundary && *newest == a.boundary) {
      std::fill(newest + 1 - before, newest + 1, a.padding);
    }
  }
}

template <Rule rule, bool narrow>
void hash_range(const IdsArguments& a, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t row = begin / a.seq;
    const Document document = document_of(a, begin % a.seq);
    const int64_t last = std::min(row * a.seq + std::min(document.end, a.seq), begin + text_size);
    hash_text<rule, narrow>(a, document, begin, std::min(end, last));
    begin = last;
  }
}

}  // namespace

void hash_tokens(const IdsArguments& arguments, int64_t begin, int64_t end) {
  const int64_t columns = int64_t{arguments.num_sizes} * arguments.heads;
  const bool narrow = std::all_of(arguments.modulus, arguments.modulus + columns,
                                  [](int64_t modulus) { return modulus < narrow_modulus; });
  using Range = void (*)(const IdsArguments&, int64_t, int64_t);
  static constexpr Range ranges[][2] = {
      {hash_range<Rule::products, false>, hash_range<Rule::products, true>},
      {hash_range<Rule::rolling, false>, hash_range<Rule::rolling, true>},
      {hash_range<Rule::modular, false>, hash_range<Rule::modular, true>}};
  ranges[static_cast<int>(arguments.rule)][narrow](arguments, begin, end);
}

}  // namespace posembed::ngram::POSEMBED_ISA

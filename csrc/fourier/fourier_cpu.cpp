// Computes angles in blocks: for each limb of each coordinate, a loop over frequencies with uniform
// shifts, which compilers can vectorise.
#include <algorithm>
#include <vector>

#include "fourier/fourier.h"

namespace posembed::fourier::POSEMBED_ISA {
namespace {

using core::Compute;

constexpr int64_t block_size = 256;

/// Frequencies as kernels read them: each word of all turns, [words, terms, count], and the starts.
struct Table {
  std::vector<uint64_t> words, starts;
  std::vector<float> factors;
  int64_t plane;

  explicit Table(const Arguments& a)
      : words(static_cast<size_t>(fourier::words * a.terms * a.count)),
        starts(static_cast<size_t>(a.count)),
        factors(static_cast<size_t>(a.count)),
        plane(a.terms * a.count) {
    for (int64_t i = 0; i < a.count; ++i) {
      const Start start = start_of(a, i);
      starts[static_cast<size_t>(i)] = start.turns;
      factors[static_cast<size_t>(i)] = start.factor;
    }
    for (int64_t i = 0; i < plane; ++i) {
      const Turns turns = turns_at(a, i / a.count, i % a.count);
      if (!turns.valid) factors[static_cast<size_t>(i % a.count)] = NAN;
      for (int word = 0; word < fourier::words; ++word) {
        words[static_cast<size_t>(word * plane + i)] = word_of(turns, word);
      }
    }
  }

  const uint64_t* at(int word, int64_t place) const { return words.data() + word * plane + place; }
};

/// Adds a limb times `count` frequencies, the first of which is at `place`.
template <bool wide>
void add(const Table& table, Limb limb, int64_t place, int64_t count, uint64_t* angles) {
  const int word = highest_word(limb);
  if (limb.factor == 0 || word >= words) return;
  const uint64_t *first = table.at(word, place), *second = table.at(word - 1, place),
                 *third = table.at(word - 2, place);
  for (int64_t i = 0; i < count; ++i) angles[i] += angle<wide>(limb, first[i], second[i], third[i]);
}

template <typename T>
void write(const Arguments& a, const Compute<T>* values, int64_t column, int64_t count) {
  if (a.count_step == 1) {
    for (int64_t i = 0; i < count; ++i) put<T>(a, values[i], column + i);
  } else {
    for (int64_t i = 0; i < count; ++i) put<T>(a, values[i], column + i * a.count_step);
  }
}

/// The angles [start, start + count) of an item.
template <typename T>
void encode_block(const Arguments& a, const Table& table, int64_t item, int64_t start,
                  int64_t count) {
  using C = Compute<T>;
  uint64_t angles[block_size];
  C sines[block_size], cosines[block_size];
  std::copy_n(table.starts.data() + start, count, angles);
  const float* factors = table.factors.data() + start;
  C factor = 1;
  for (int64_t term = 0; term < a.terms; ++term) {
    const Coordinate coordinate = coordinate_at(a, item, term);
    if (!coordinate.valid) factor = static_cast<C>(NAN);
    for (const Limb& limb : coordinate.limbs) {
      add<std::is_same_v<C, double>>(table, limb, term * a.count + start, count, angles);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    C sine, cosine;
    sincos(angles[i], &sine, &cosine);
    sines[i] = sine * (factors[i] * factor);
    cosines[i] = cosine * (factors[i] * factor);
  }
  const int64_t column = first_column(a, item) + start * a.count_step;
  if (a.sine >= 0) write<T>(a, sines, column + a.sine, count);
  if (a.cosine >= 0) write<T>(a, cosines, column + a.cosine, count);
}

}  // namespace

void encode(const Arguments& arguments, int64_t begin, int64_t end) {
  const Table table(arguments);
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    for (int64_t item = begin; item < end; ++item) {
      for (int64_t start = 0; start < arguments.count; start += block_size) {
        encode_block<typename decltype(tag)::type>(arguments, table, item, start,
                                                   std::min(block_size, arguments.count - start));
      }
    }
  });
}

}  // namespace posembed::fourier::POSEMBED_ISA

// Dropout's factors for a row. Each depends only on the seed and the element's index. Part of
// kernel_cpu.cpp.
#pragma once

#include "core/block32.h"
#include "core/philox.h"
#include "input/token_rows.h"

namespace posembed::input::POSEMBED_ISA {

template <typename T>
class DropFactors {
 public:
  using C = Compute<T>;

  /// For rows of up to `columns` elements; without a seed there are no factors. `origin`: the index
  /// of element 0 in the mask.
  DropFactors(double probability, const int64_t* seed, int64_t origin, int64_t columns)
      : drops_(seed != nullptr),
        origin_(static_cast<uint64_t>(origin)),
        dropout_(core::make_dropout(probability, drops_ ? static_cast<uint64_t>(*seed) : 0)),
        words_(1, drops_ ? columns + 8 : 0),
        factors_(2, drops_ ? columns : 0) {}

  /// The factors of `columns` elements from `element` on, in block order; nullptr: all are 1.
  const C* at(int64_t element, int64_t columns) {
    if (!drops_) return nullptr;
    const uint64_t first = origin_ + static_cast<uint64_t>(element);
    draw(first, columns);
    const uint32_t* word = words_.row(0) + first % 4;
    C* factor = factors_.row(0);
    const auto scale = static_cast<C>(dropout_.scale);
    for (int64_t i = 0; i < columns; ++i) factor[i] = word[i] < dropout_.threshold ? C(0) : scale;
    const int64_t whole = core::round_up_to_blocks(columns);
    for (int64_t i = columns; i < whole; ++i) factor[i] = 0;
    core::order_values<T>(factor, whole, factors_.row(1));
    return factors_.row(1);
  }

 private:
  /// Philox draws four words at once, so up to three extra at either end.
  void draw(uint64_t first, int64_t columns) {
    const uint64_t counter = first / 4;
    const uint64_t calls = (first + static_cast<uint64_t>(columns) + 3) / 4 - counter;
    uint32_t* word = words_.row(0);
    for (uint64_t i = 0; i < calls; ++i, word += 4) {
      const core::Random4 random = core::philox(dropout_.seed, counter + i);
      for (int k = 0; k < 4; ++k) word[k] = random.words[k];
    }
  }

  bool drops_;
  uint64_t origin_;
  core::Dropout dropout_;
  RowMemory<uint32_t> words_;
  RowMemory<C> factors_;
};

}  // namespace posembed::input::POSEMBED_ISA

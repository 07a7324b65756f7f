// Test problems for every form of the sinusoidal kernel: the CPU kernel and the CUDA source.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "sinusoidal/sinusoidal.h"
#include "values.h"

namespace posembed::sinusoidal {

using core::Compute;

using Types = ::testing::Types<float, double, core::BFloat16, core::Float16>;

/// Owns the memory that a Sinusoid points to.
struct Encoding {
  Encoding(Preset preset, int64_t dim, double base, double shift, bool cos_first) {
    sinusoid.layout = layout_of(preset, dim, cos_first);
    sinusoid.pairs = pairs_of(sinusoid.layout);
    for (const auto& frequency : frequencies(base, divisor_of(preset, dim, shift), sinusoid.pairs)) {
      wide_turns.push_back(core::turn_from_radians(frequency));
      turns.push_back(core::round_to_turn64(wide_turns.back()));
    }
    sinusoid.turns = turns.data();
    sinusoid.wide_turns = wide_turns.data();
  }
  Encoding(const Encoding&) = delete;
  Encoding& operator=(const Encoding&) = delete;

  Sinusoid sinusoid;
  std::vector<core::Turn64> turns;
  std::vector<core::Turn128> wide_turns;
};

/// Arguments for contiguous rows [batch, seq, dim] written to `out`.
template <typename T>
Arguments rows(const Sinusoid& sinusoid, int64_t batch, int64_t seq, std::vector<T>& out) {
  Arguments arguments;
  arguments.sinusoid = sinusoid;
  arguments.scalar = scalar_of<T>();
  arguments.batch = batch;
  arguments.seq = seq;
  const int64_t dim = sinusoid.layout.columns;
  out.resize(static_cast<size_t>(batch * seq * dim));
  arguments.out = out.data();
  arguments.in_stride[0] = arguments.out_stride[0] = seq * dim;
  arguments.in_stride[1] = arguments.out_stride[1] = dim;
  return arguments;
}

}  // namespace posembed::sinusoidal

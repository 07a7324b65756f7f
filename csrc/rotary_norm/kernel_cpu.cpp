// Normalises and rotates a head while it is in the cache, so that memory is read and written once.
// Sums have the same bits on every instruction set.
#include "rotary_norm/backward_cpu.h"
#include "rotary_norm/forward_cpu.h"
#include "rotary_norm/general_cpu.h"
#include "rotary_norm/kernel.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

template <typename T, bool interleaved>
void backward_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  const auto run = [&](auto&& gradients) {
    for (int64_t part = begin; part < end; ++part) gradients.run(part);
  };
  if constexpr (std::is_same_v<T, core::BFloat16>) {
    if (rotates_in_block_order(arguments.forward.rotation)) {
      run(Backward<T, interleaved, true>(arguments));
      return;
    }
  }
  run(Backward<T, interleaved, false>(arguments));
}

template <typename T>
void add_part_columns(const BackwardArguments& b, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t dim = b.forward.rotation.head_dim;
  for (int64_t column = begin; column < end; ++column) {
    C sum = 0;
    for (int64_t part = 0; part < b.parts; ++part) {
      sum += static_cast<const C*>(b.partial)[2 * part * dim + column];
    }
    void* const gradient = b.weight_gradient[column / dim];
    if (gradient == nullptr) continue;
    core::visit_scalar(b.forward.parameter_scalar, [&](auto tag) {
      using Stored = typename decltype(tag)::type;
      core::store(static_cast<Compute<Stored>>(sum), static_cast<Stored*>(gradient) + column % dim);
    });
  }
}

template <typename T, bool interleaved>
void forward_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  if (is_general(arguments)) return norm_in_general<T, interleaved>(arguments, begin, end);
  Forward<T, interleaved>(arguments).run(begin, end);
}

}  // namespace

void norm_and_rotate(const Arguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.rotation.interleaved) {
      forward_tokens<T, true>(arguments, begin, end);
    } else {
      forward_tokens<T, false>(arguments, begin, end);
    }
  });
}

void backward(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.forward.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.forward.rotation.interleaved) {
      backward_parts<T, true>(arguments, begin, end);
    } else {
      backward_parts<T, false>(arguments, begin, end);
    }
  });
}

void add_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.forward.rotation.scalar, [&](auto tag) {
    add_part_columns<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::rotary_norm::POSEMBED_ISA

// A warp steps on one row.
#include "core/block_reduce.h"
#include "core/device_vector.h"
#include "optim/optim.h"

namespace posembed::optim {
namespace {

using core::BFloat16;
using core::Compute;
using core::threads;
using core::warp_size;

/// Row `index` of the gradient, or -1 if it is not a row of the table above the one before.
__device__ int64_t checked_row(const Arguments& a, int64_t index, bool reports) {
  if (a.ids.data == nullptr) return index;
  const int64_t row = core::read(a.ids, index);
  const bool ascends = index == 0 || core::read(a.ids, index - 1) < row;
  if (row >= 0 && row < a.rows && ascends) return row;
  if (reports) record_error(a.error, core::ErrorKind::token_id, row, index, a.rows);
  return -1;
}

/// An element of the weight: as stored, and from the number that replaces it.
template <typename T>
struct Element {
  const Arguments& a;
  int64_t row, column;

  __device__ T* weight() const {
    return static_cast<T*>(a.weight) + row * a.weight_stride + column;
  }
  __device__ int16_t* remainder() const { return a.remainder + row * a.dim + column; }

  __device__ Compute<T> read() const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (a.store == Store::remainder) return joined(*weight(), *remainder());
    }
    return core::load(*weight());
  }

  __device__ void write(Compute<T> value) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (a.store == Store::remainder) return split(value, weight(), remainder());
      if (a.store == Store::stochastic) {
        const core::Random4 random = random_block(a, row, column / 8);
        *weight() = round_randomly(value, random_half(random, column));
        return;
      }
    }
    core::store(value, weight());
  }
};

template <typename T, typename G, bool has_first, Second kind>
__global__ void __launch_bounds__(threads)
    step_kernel(const Arguments a, const Update<Compute<T>> u) {
  using C = Compute<T>;
  const int lane = threadIdx.x % warp_size;
  const int64_t index = int64_t{blockIdx.x} * core::warps + threadIdx.x / warp_size;
  if (index >= a.count) return;
  const int64_t row = checked_row(a, index, lane == 0);
  if (row < 0) return;
  const G* gradient = static_cast<const G*>(a.gradient) + index * a.gradient_stride;
  const Owed<C> owed = owed_of<C>(a, index);
  C rate = u.rate;
  if constexpr (kind == Second::row) {
    C squares = 0;
    for (int64_t column = lane; column < a.dim; column += warp_size) {
      const C value = core::load(gradient[column]);
      squares += value * value;
    }
    squares = core::over_warp(squares, core::Add{});
    if (lane == 0) rate = rate_of_row(u, squares, a.dim, static_cast<C*>(a.second) + row);
    rate = __shfl_sync(0xffffffffu, rate, 0);
  }
  for (int64_t column = lane; column < a.dim; column += warp_size) {
    const Element<T> element{a, row, column};
    const int64_t at = row * a.dim + column;
    element.write(updated<has_first, kind>(
        u, owed, rate, element.read(), static_cast<C>(core::load(gradient[column])),
        has_first ? static_cast<C*>(a.first) + at : nullptr,
        kind == Second::element ? static_cast<C*>(a.second) + at : nullptr));
  }
}

}  // namespace

const char* step_cuda(const Arguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0 || arguments.dim == 0) return nullptr;
  visit_types(arguments, [&](auto weight, auto gradient) {
    visit_moments(arguments, [&](auto has_first, auto second) {
      using T = typename decltype(weight)::type;
      core::launch(step_kernel<T, typename decltype(gradient)::type, has_first.value, second.value>,
                   core::blocks_for(arguments.count), threads, stream, arguments,
                   Update<Compute<T>>::of(arguments.numbers));
    });
  });
  return core::launch_error();
}

}  // namespace posembed::optim

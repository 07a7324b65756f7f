// A thread hashes the n-gram of one column, so that a warp writes neighbouring ids.
#include "core/device_item.h"
#include "ngram/hash.h"
#include "ngram/window.h"

namespace posembed::ngram {
namespace {

using core::divide_up;
using core::threads;

template <bool rolling>
__global__ void __launch_bounds__(threads)
    hash_kernel(const __grid_constant__ IdsArguments a, core::Divisor<int64_t> columns,
                core::Divisor<int64_t> seq) {
  const int64_t item = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (item >= a.batch * a.seq * columns.value) return;
  const auto place = core::divide(item, columns);
  const int64_t token = place.quotient;
  const auto [row, at] = core::divide(token, seq);
  const auto column = static_cast<int>(place.remainder);
  const IdsArguments& numbers = *core::through_data_cache(&a);
  const int size = numbers.sizes[column / a.heads], head = column % a.heads;

  uint64_t hash = 0;
  const auto extend = [&](int64_t back, int64_t id) {
    hash = extended<rolling>(numbers, hash, id, back, head);
  };
  if (is_text(a, token)) {
    extend(0, read(a.ids, token));
    visit_before(a, document_of(a, at), row, at, size, extend);
  } else {
    for (int back = 0; back < size; ++back) extend(back, a.padding);
  }
  a.out[item] = floor_remainder(hash, {numbers.modulus[column], numbers.inverse[column]}) +
                numbers.offset[column];
}

}  // namespace

const char* hash_tokens_cuda(const IdsArguments& arguments, core::CudaStream stream) {
  const int64_t columns = int64_t{arguments.num_sizes} * arguments.heads;
  const int64_t items = arguments.batch * arguments.seq * columns;
  if (items == 0) return nullptr;
  const auto kernel = arguments.rolling ? hash_kernel<true> : hash_kernel<false>;
  core::launch(kernel, divide_up(items, threads), threads, stream, arguments,
               core::Divisor<int64_t>::of(columns), core::Divisor<int64_t>::of(arguments.seq));
  return core::launch_error();
}

}  // namespace posembed::ngram

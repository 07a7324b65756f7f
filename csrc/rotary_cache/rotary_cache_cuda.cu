// As in the rotary kernel, a block processes some or all heads of one token, and a thread owns both
// members of its pairs. Each thread writes its results to every destination, so keys and values are
// read once.
#include "core/scalar.h"
#include "rotary/rotary_cuda.h"
#include "rotary_cache/rotary_cache.h"
#include "rotary_norm/rotary_norm_cuda.h"

namespace posembed::rotary_cache {
namespace {

using rotary::Launch;
using rotary::Pack;
using rotary::Token;

/// Arguments of a launch in addition to those of the rotation.
struct CacheLaunch {
  rotary::HeadView value;
  Cache key_cache, value_cache;
  core::IndexView slots;
  int64_t slot_stride[2];
  core::Divisor<int64_t> page_size;
  int64_t slot_count;
  int value_dim;
  core::Divisor<int> value_packs;  // of a head
  bool float8;
};

/// A token's slot in the caches.
struct Slot {
  bool is_written = false;
  int64_t page = 0, index = 0;  // index: in the page
};

/// `size` float8 elements of a cache, stored in one instruction.
template <int size>
struct alignas(size) Float8Pack {
  uint16_t pair[size / 2];
};

/// Divides by a scale. Equals a true division for every quotient that float8 can distinguish.
class Scale {
 public:
  __device__ explicit Scale(float scale)
      : scale_(scale), inverse_(1.0f / scale), is_moderate_(scale > 0x1p-80f && scale < 0x1p80f) {}

  /// Whether multiply() divides exactly: the scale is a power of two.
  __device__ bool multiplies() const {
    return is_moderate_ && (core::float_bits(scale_) & 0x7fffffu) == 0;
  }

  __device__ float multiply(float value) const { return value * inverse_; }

  /// Divides in three instructions.
  __device__ float divide(float value) const {
    if (!is_moderate_) return value / scale_;
    const float quotient = value * inverse_;
    const float corrected = core::fma(core::fma(-quotient, scale_, value), inverse_, quotient);
    const bool is_usual = quotient != 0 && fabsf(quotient) < 0x1p100f;
    return is_usual ? corrected : quotient;  // keeps -0, infinity and NaN
  }

 private:
  float scale_, inverse_;
  bool is_moderate_;
};

/// Writes packs of T to one token's slot in a cache.
template <typename T, int size, bool float8>
struct CacheWriter {
  using Stored = std::conditional_t<float8, core::Float8, T>;

  Stored* token;
  int64_t head_stride;
  Scale scale;

  __device__ CacheWriter(const Cache& cache, const Slot& slot)
      : token(static_cast<Stored*>(cache.data) + slot.page * cache.stride[0] +
              slot.index * cache.stride[1]),
        head_stride(cache.stride[2]),
        scale(!float8 || cache.scale_data == nullptr ? cache.scale : *cache.scale_data) {}

  __device__ void write(const Pack<T, size>& pack, int head, int column) const {
    Stored* out = token + rotary::head_offset<size>(head, head_stride) + column;
    if constexpr (!float8) {
      pack.write(out);
    } else if (scale.multiplies()) {
      write_scaled(pack, out, [&](float value) { return scale.multiply(value); });
    } else {
      write_scaled(pack, out, [&](float value) { return scale.divide(value); });
    }
  }

 private:
  template <typename Divide>
  __device__ static void write_scaled(const Pack<T, size>& pack, Stored* out,
                                      const Divide& divide) {
    const auto scaled = [&](int i) {
      return divide(static_cast<float>(core::load(pack.element[i])));
    };
    if constexpr (size == 1) {
      core::store(scaled(0), out);
    } else {
      Float8Pack<size> rounded;
#pragma unroll
      for (int i = 0; i < size / 2; ++i) {
        rounded.pair[i] = core::float8_pair(scaled(2 * i), scaled(2 * i + 1));
      }
      *reinterpret_cast<Float8Pack<size>*>(out) = rounded;
    }
  }
};

/// The token's slot. Records a slot outside the cache.
__device__ inline Slot slot_of(const CacheLaunch& cache, const Token& token,
                               core::DeviceError* error) {
  const int64_t slot = core::read(
      cache.slots, token.batch * cache.slot_stride[0] + token.seq * cache.slot_stride[1]);
  if (slot >= 0 && slot < cache.slot_count) {
    const auto indices = core::divide(slot, cache.page_size);
    return {true, indices.quotient, indices.remainder};
  }
  if (slot != -1 && threadIdx.x == 0) {
    core::record_error(error, core::ErrorKind::slot, slot, token.number, cache.slot_count);
  }
  return {};
}

/// Copies the components outside the window of keys [begin, end) to the rotated keys and the cache.
template <typename T, int size, bool float8, int capacity>
__device__ void cache_outside(const Launch<T, capacity>& launch, const CacheLaunch& cache,
                              const rotary::TokenHeads<T, size, capacity>& heads, const Slot& slot,
                              int begin, int end) {
  const int before = launch.start[1] / size, window = 2 * launch.pairs / size;
  const int count = (end - begin) * (launch.outside[1] / size);
  const CacheWriter<T, size, float8> writer(cache.key_cache, slot);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const auto at = core::divide(i, launch.packs_outside[1]);
    const int head = begin + at.quotient;
    const int column = (at.remainder < before ? at.remainder : at.remainder + window) * size;
    const rotary::Row<T> row = heads.row(launch.query_heads + head);
    const auto pack = Pack<T, size>::read(row.in + column - launch.start[1]);
    const bool moves = launch.views[1].out != nullptr && row.in != row.out;
    if (moves) pack.write(row.out + column - launch.start[1]);
    if (slot.is_written) writer.write(pack, head, column);
  }
}

/// A thread's share of the values of heads [begin, end). Reads its first pack immediately, before
/// the slot is known.
template <typename T, int size>
class Values {
 public:
  __device__ Values(const CacheLaunch& cache, const Token& token, int begin, int end)
      : cache_(cache),
        in_(static_cast<const T*>(cache.value.in) +
            rotary::offset_of(token, begin, cache.value.in_stride)),
        begin_(begin),
        count_((end - begin) * (cache.value_dim / size)) {
    const int first = static_cast<int>(threadIdx.x);
    if (first < count_) first_ = read(core::divide(first, cache.value_packs));
  }

  template <typename Writer>
  __device__ void write(const Writer& writer) const {
    for (int i = threadIdx.x; i < count_; i += blockDim.x) {
      const auto at = core::divide(i, cache_.value_packs);
      const bool is_first = i == static_cast<int>(threadIdx.x);
      writer.write(is_first ? first_ : read(at), begin_ + at.quotient, at.remainder * size);
    }
  }

 private:
  __device__ Pack<T, size> read(const core::Quotient<int>& at) const {
    return Pack<T, size>::read(in_ + at.quotient * cache_.value.in_stride[2] + at.remainder * size);
  }

  const CacheLaunch& cache_;
  const T* in_;
  int begin_, count_;
  Pack<T, size> first_;
};

template <typename T, int size, bool interleaved, bool float8, int capacity>
__global__ void __launch_bounds__(rotary::max_threads<size>, rotary::min_blocks<size, 3>)
    cache_kernel(const __grid_constant__ Launch<T, capacity> launch,
                 const __grid_constant__ CacheLaunch cache) {
  using Owned = rotary::Pairs<T, size, interleaved>;
  constexpr int in_flight = rotary::heads_in_flight;
  __shared__ core::Compute<T> sines[capacity], cosines[capacity];
  core::wait_for_previous_kernel();
  const rotary::HeadThreads threads(launch.threads_per_head);
  const rotary::PackColumns<size, interleaved> columns(threads.index, launch.pairs,
                                                       launch.interleaved);

  const bool owns_heads = launch.pairs > 0 && threads.group < launch.heads_per_pass;
  const int begin = static_cast<int>(blockIdx.y) * launch.heads_of_block;
  const int end = min(launch.heads, begin + launch.heads_of_block);
  const int splits = static_cast<int>(gridDim.y), split = static_cast<int>(blockIdx.y);
  const int value_heads = static_cast<int>(cache.value.heads);
  const bool key_moves = launch.views[1].out != nullptr;

  for (int64_t number = blockIdx.x; number < launch.tokens; number += gridDim.x) {
    const Token token = token_of(launch, number);
    const rotary::TokenHeads<T, size, capacity> heads(launch, token);
    Owned owned[in_flight];
    const auto read_head = [&](int at, int head) {
      if (head >= end) return;
      const rotary::Row<T> row = heads.row(head);
      owned[at].first = Pack<T, size>::read(row.in + columns.first);
      owned[at].second = Pack<T, size>::read(row.in + columns.second);
    };
    // Issue the loads of the first rows and values before position and slot are known.
    int head = owns_heads ? begin + threads.group : end;
#pragma unroll
    for (int i = 0; i < in_flight; ++i) read_head(i, head + i * launch.heads_per_pass);
    const Values<T, size> values(cache, token, value_heads * split / splits,
                                 value_heads * (split + 1) / splits);

    const Slot slot = slot_of(cache, token, launch.error);
    const bool rotated = begin_token(launch, token, sines, cosines);
    const auto angles = rotary::angles_of<T>(columns, sines, cosines);
    const CacheWriter<T, size, float8> writer(cache.key_cache, slot);
    while (head < end) {
#pragma unroll
      for (int i = 0; i < in_flight; ++i, head += launch.heads_per_pass) {
        if (head >= end) break;
        if (rotated) owned[i].rotate(angles);
        const bool is_key = head >= launch.query_heads;
        const rotary::Row<T> row = heads.row(head);
        if ((!is_key || key_moves) && (rotated || row.in != row.out)) {
          owned[i].first.write(row.out + columns.first);
          owned[i].second.write(row.out + columns.second);
        }
        if (is_key && slot.is_written) {
          const int start = launch.start[1];
          writer.write(owned[i].first, head - launch.query_heads, start + columns.first);
          writer.write(owned[i].second, head - launch.query_heads, start + columns.second);
        }
        read_head(i, head + in_flight * launch.heads_per_pass);
      }
    }
    const int queries = launch.query_heads;
    rotary::copy_outside<2>(launch, heads, 0, begin, min(end, queries));
    cache_outside<T, size, float8>(launch, cache, heads, slot, max(begin - queries, 0),
                                   end - queries);
    if (!slot.is_written) continue;
    values.write(CacheWriter<T, size, float8>(cache.value_cache, slot));
  }
}

/// Calls a function with a CacheWriter for the cache's type.
template <typename T, int size, typename Function>
__device__ void with_writer(const CacheLaunch& launch, const Cache& cache, const Slot& slot,
                            const Function& function) {
  if (launch.float8) {
    function(CacheWriter<T, size, true>(cache, slot));
  } else {
    function(CacheWriter<T, size, false>(cache, slot));
  }
}

/// Writes normalised and rotated rows to their memory, if they have any, and keys to the cache.
template <typename T, int size>
struct NormedRows {
  const CacheLaunch& cache;
  Slot slot;
  bool key_moves;
  int query_heads;

  __device__ void write(const Pack<T, size>& pack, T* out, int head, int column) const {
    const bool is_key = head >= query_heads;
    if (!is_key || key_moves) pack.write(out);
    if (!is_key || !slot.is_written) return;
    with_writer<T, size>(cache, cache.key_cache, slot, [&](const auto& writer) {
      writer.write(pack, head - query_heads, column);
    });
  }
};

/// cache_kernel() for query and key that are normalised first.
template <typename T, int size, bool interleaved, int capacity>
__global__ void __launch_bounds__(rotary::max_threads<size>, rotary::min_blocks<size, 2>)
    norm_cache_kernel(const __grid_constant__ rotary::TableLaunch<T, capacity> launch,
                      const __grid_constant__ rotary_norm::Norms<core::Compute<T>> norms,
                      const __grid_constant__ CacheLaunch cache) {
  const int splits = static_cast<int>(gridDim.y), split = static_cast<int>(blockIdx.y);
  const int value_heads = static_cast<int>(cache.value.heads);
  rotary_norm::norm_tokens<T, size, interleaved, /*usual=*/false>(
      launch, norms, [&](const Token& token) {
        const Slot slot = slot_of(cache, token, launch.error);
        if (slot.is_written) {
          const Values<T, size> values(cache, token, value_heads * split / splits,
                                       value_heads * (split + 1) / splits);
          with_writer<T, size>(cache, cache.value_cache, slot,
                               [&](const auto& writer) { values.write(writer); });
        }
        const bool key_moves = launch.views[1].out != nullptr;
        return NormedRows<T, size>{cache, slot, key_moves, launch.query_heads};
      });
}

template <typename T, bool float8>
bool fits_vectors(const Cache& cache) {
  constexpr int64_t size = core::vector_width<T>;
  constexpr uintptr_t alignment = float8 ? size : rotary::vector_bytes;
  bool fits = reinterpret_cast<uintptr_t>(cache.data) % alignment == 0;
  for (const int64_t stride : cache.stride) fits = fits && stride % size == 0;
  return fits && std::abs(cache.stride[2]) <= INT32_MAX;
}

template <typename T, bool float8>
bool can_use_vectors(const Arguments& arguments) {
  constexpr int64_t size = core::vector_width<T>;
  const rotary::HeadView& value = arguments.value;
  bool fits = arguments.value_dim % size == 0 &&
              reinterpret_cast<uintptr_t>(value.in) % rotary::vector_bytes == 0;
  for (const int64_t stride : value.in_stride) fits = fits && stride % size == 0;
  return fits && rotary::can_use_vectors<T>(arguments.rotation) &&
         fits_vectors<T, float8>(arguments.key_cache) &&
         fits_vectors<T, float8>(arguments.value_cache) &&
         (arguments.norm == nullptr || rotary_norm::can_use_vectors<T>(*arguments.norm));
}

template <int size>
CacheLaunch make_cache_launch(const Arguments& arguments) {
  CacheLaunch cache = {};
  cache.value = arguments.value;
  cache.key_cache = arguments.key_cache;
  cache.value_cache = arguments.value_cache;
  cache.slots = arguments.slots;
  std::copy(arguments.slot_stride, arguments.slot_stride + 2, cache.slot_stride);
  cache.page_size = core::Divisor<int64_t>::of(arguments.page_size);
  cache.slot_count = arguments.slot_count;
  cache.float8 = arguments.float8;
  cache.value_dim = static_cast<int>(arguments.value_dim);
  cache.value_packs = core::Divisor<int>::of(std::max(1, cache.value_dim / size));
  return cache;
}

template <typename T, int size, bool interleaved, bool float8, int capacity>
const char* launch_kernel(const Arguments& arguments, core::CudaStream stream) {
  auto launch = rotary::make_launch<T, capacity>(arguments.rotation);
  if (launch.tokens == 0 || launch.heads == 0) return nullptr;
  const cudaLaunchConfig_t config = share_heads(&launch, size, stream);
  cudaLaunchKernelEx(&config, cache_kernel<T, size, interleaved, float8, capacity>, launch,
                     make_cache_launch<size>(arguments));
  return core::launch_error();
}

struct Normed {
  const Arguments& arguments;

  const rotary::Arguments& rotation() const { return arguments.rotation; }

  template <typename T, int size, bool interleaved, int capacity>
  const char* launch(core::CudaStream stream) const {
    auto launch = rotary::make_launch<T, capacity, rotary::Form::table>(rotation());
    if (launch.tokens == 0 || launch.heads == 0) return nullptr;
    const cudaLaunchConfig_t config =
        rotary_norm::share_rows(&launch, size, arguments.norm->all_heads, stream);
    cudaLaunchKernelEx(&config, norm_cache_kernel<T, size, interleaved, capacity>, launch,
                       rotary_norm::make_norms<core::Compute<T>>(*arguments.norm),
                       make_cache_launch<size>(arguments));
    return core::launch_error();
  }
};

template <typename T, int size, bool float8, bool interleaved>
const char* launch_capacity(const Arguments& arguments, core::CudaStream stream) {
  if constexpr (size > 1) {  // fewer argument bytes make a quicker launch
    if (arguments.rotation.pairs <= 64) {
      return launch_kernel<T, size, interleaved, float8, 64>(arguments, stream);
    }
  }
  return launch_kernel<T, size, interleaved, float8, rotary::max_pairs>(arguments, stream);
}

template <typename T, int size, bool float8>
const char* launch_pairing(const Arguments& arguments, core::CudaStream stream) {
  return rotary::with_pairing<size>(arguments.rotation, [&](auto interleaved) {
    return launch_capacity<T, size, float8, interleaved()>(arguments, stream);
  });
}

template <typename T, bool float8>
const char* launch_size(const Arguments& arguments, core::CudaStream stream) {
  return can_use_vectors<T, float8>(arguments)
             ? launch_pairing<T, core::vector_width<T>, float8>(arguments, stream)
             : launch_pairing<T, 1, float8>(arguments, stream);
}

}  // namespace

const char* rotate_and_cache_cuda(const Arguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.norm != nullptr) {
      const bool fits = arguments.float8 ? can_use_vectors<T, true>(arguments)
                                         : can_use_vectors<T, false>(arguments);
      return rotary_norm::launch_pass<T>(Normed{arguments}, fits, stream);
    }
    return arguments.float8 ? launch_size<T, true>(arguments, stream)
                            : launch_size<T, false>(arguments, stream);
  });
}

}  // namespace posembed::rotary_cache

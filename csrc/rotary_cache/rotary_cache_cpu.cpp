// Computes a token's angles once for all its heads and writes rotated keys directly to the cache.
#include <algorithm>

#include "core/block32.h"
#include "core/scalar.h"
#include "core/stream.h"
#include "rotary/rotary_angles_cpu.h"
#include "rotary/rotary_walks_cpu.h"
#include "rotary_cache/rotary_cache.h"
#include "rotary_norm/rotary_norm_cpu.h"

namespace posembed::rotary_cache::POSEMBED_ISA {
namespace {

using rotary::HeadView;
using rotary::POSEMBED_ISA::Angles;
using rotary::POSEMBED_ISA::Rotating;
using rotary::POSEMBED_ISA::RowGroup;
using rotary::POSEMBED_ISA::Stores;
using rotary::POSEMBED_ISA::Token;

/// Divides by `scale` and rounds, in buffers, because the compiler must assume that stores of bytes
/// alias the next numbers.
template <typename T>
void round_to_float8(const T* in, int64_t count, float scale, core::Float8* out) {
  core::for_blocks(count, [&](int64_t i, auto columns) POSEMBED_INLINE_LAMBDA {
    core::Compute<T> values[core::block_size];
    uint32_t bits[core::block_size];
    core::Float8 rounded[core::block_size];
    core::load_elements(in + i, columns, values);
    for (int64_t k = 0; k < columns; ++k) {
      bits[k] = core::float8_bits(static_cast<float>(values[k]) / scale);
    }
    for (int64_t k = 0; k < columns; ++k) rounded[k] = {static_cast<uint8_t>(bits[k])};
    rotary::POSEMBED_ISA::copy(rounded, out + i, columns);
  });
}

/// Stores rows of T unchanged, or divided and rounded to float8.
template <typename T, bool float8>
class CacheWriter {
 public:
  using Stored = std::conditional_t<float8, core::Float8, T>;

  /// `elements`: the number of elements of all rows.
  CacheWriter(const Cache& cache, int64_t page_size, int64_t elements)
      : cache_(cache),
        page_size_(page_size),
        streaming_(!float8 &&
                   rotary::POSEMBED_ISA::can_stream<T>(elements, cache.data, cache.stride)),
        scale_(cache.scale_data == nullptr ? cache.scale : *cache.scale_data) {}

  Stored* row(int64_t slot) const {
    return static_cast<Stored*>(cache_.data) + slot_offset(cache_, slot, page_size_);
  }

  int64_t head_stride() const { return cache_.stride[2]; }

  /// Whether rows are written with non-temporal stores.
  bool streaming() const { return streaming_; }

  void write(const T* in, int64_t count, Stored* out) const {
    if constexpr (float8) {
      round_to_float8(in, count, scale_, out);
    } else if (streaming_) {
      core::stream_copy(out, in, count * static_cast<int64_t>(sizeof(T)));
    } else {
      rotary::POSEMBED_ISA::copy(in, out, count);
    }
  }

 private:
  const Cache& cache_;
  int64_t page_size_;
  bool streaming_;
  float scale_;
};

/// The rows of one token; `out` is null if `rows` has none.
template <typename T>
RowGroup<T> rows_of(const HeadView& view, const Token& token) {
  const auto offset = [&](const int64_t* stride) {
    return token.batch * stride[0] + token.seq * stride[1];
  };
  T* out = static_cast<T*>(view.out);
  return {static_cast<const T*>(view.in) + offset(view.in_stride),
          out == nullptr ? nullptr : out + offset(view.out_stride), view.heads, view.in_stride[2],
          view.out_stride[2]};
}

template <typename T, bool float8>
void write_rows(const T* in, int64_t step, int64_t heads, int64_t dim,
                const CacheWriter<T, float8>& writer, int64_t slot) {
  auto* out = writer.row(slot);
  for (int64_t head = 0; head < heads; ++head) {
    writer.write(in + head * step, dim, out + head * writer.head_stride());
  }
}

template <typename T, bool interleaved>
Rotating<T> rotating(const rotary::Arguments& rotary, const HeadView& view, Stores stores) {
  namespace kernel = rotary::POSEMBED_ISA;
  const bool streams = stores == Stores::streaming;
  return {kernel::choose_rotation<T>(interleaved, streams, rotary.pairs), stores,
          kernel::margins_of<T>(rotary, view, stores)};
}

/// The parts of a call that all tokens share.
template <typename T, bool float8>
struct Walk {
  const Arguments& arguments;
  CacheWriter<T, float8> keys, values;
  Rotating<T> of_query, of_key, of_cached;  // of_cached writes to the cache

  int64_t slot(const Token& token) const {
    return core::read(arguments.slots, token.batch * arguments.slot_stride[0] +
                                           token.seq * arguments.slot_stride[1]);
  }

  void rotate(const HeadView& view, const Token& token, const Angles<T>& angles,
              const RowGroup<T>& group, const Rotating<T>& rotating) const {
    rotary::POSEMBED_ISA::rotate_rows(arguments.rotation, view, token, rotating, angles, group);
  }

  /// Rotates a key for a float8 cache window by window and rounds it to T in between, as if it came
  /// from memory.
  void write_windows(const Token& token, const Angles<T>& angles, const RowGroup<T>& key,
                     int64_t slot) const {
    const rotary::Arguments& rotary = arguments.rotation;
    const HeadView& view = rotary.views[1];
    const int64_t dim = row_dim(rotary, view), begin = window_start(rotary, view);
    const int64_t count = 2 * rotary.pairs, end = begin + count;
    T window[2 * rotary::max_pairs];
    for (int64_t head = 0; head < key.count; ++head) {
      const T* in = key.in + head * key.in_step;
      auto* out = keys.row(slot) + head * keys.head_stride();
      if (token.rotated) {
        of_key.rotate(in + begin, window, 1, 0, 0, angles, rotary.pairs,
                      rotary::POSEMBED_ISA::no_margins);
      }
      keys.write(in, begin, out);
      keys.write(token.rotated ? window : in + begin, count, out + begin);
      keys.write(in + end, dim - end, out + end);
    }
  }

  void write_key(const Token& token, const Angles<T>& angles, int64_t slot) const {
    const HeadView& view = arguments.rotation.views[1];
    RowGroup<T> key = rows_of<T>(view, token);
    if (key.out != nullptr) {
      rotate(view, token, angles, key, of_key);
      if (slot < 0) return;
      write_rows(key.out, key.out_step, key.count, row_dim(arguments.rotation, view), keys, slot);
    } else if (slot >= 0) {
      if constexpr (float8) {
        write_windows(token, angles, key, slot);
      } else {
        key.out = keys.row(slot);
        key.out_step = keys.head_stride();
        rotate(view, token, angles, key, of_cached);
      }
    }
  }

  void run(const Token& token, const Angles<T>& angles) const {
    const HeadView& query = arguments.rotation.views[0];
    rotate(query, token, angles, rows_of<T>(query, token), of_query);
    const int64_t where = slot(token);
    write_key(token, angles, where);
    if (where < 0) return;
    const RowGroup<T> value = rows_of<T>(arguments.value, token);
    write_rows(value.in, value.in_step, value.count, arguments.value_dim, values, where);
  }
};

template <typename T, bool interleaved, bool float8>
Walk<T, float8> plan_walk(const Arguments& arguments) {
  namespace kernel = rotary::POSEMBED_ISA;
  const rotary::Arguments& rotary = arguments.rotation;
  const HeadView& key = rotary.views[1];
  const int64_t tokens = rotary.batch * rotary.seq;
  const CacheWriter<T, float8> keys{arguments.key_cache, arguments.page_size,
                                    tokens * key.heads * row_dim(rotary, key)};
  const CacheWriter<T, float8> values{arguments.value_cache, arguments.page_size,
                                      tokens * arguments.value.heads * arguments.value_dim};
  const Stores stores = kernel::choose_stores<T>(rotary, rotary.views[0]);
  HeadView cached = key;
  cached.out = arguments.key_cache.data;
  std::copy_n(arguments.key_cache.stride, 3, cached.out_stride);
  const Stores stores_of_cached =
      float8 ? Stores::ordinary : kernel::choose_stores<T>(rotary, cached);
  return {arguments,
          keys,
          values,
          rotating<T, interleaved>(rotary, rotary.views[0], stores),
          rotating<T, interleaved>(rotary, key, Stores::ordinary),
          rotating<T, interleaved>(rotary, cached, stores_of_cached)};
}

template <typename T, bool interleaved, bool float8>
void walk_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  namespace kernel = rotary::POSEMBED_ISA;
  const rotary::Arguments& rotary = arguments.rotation;
  kernel::Turns<T> turns;
  kernel::Angles<T> angles;
  kernel::order_turns<T, interleaved>(rotary, &turns);
  const Walk<T, float8> walk = plan_walk<T, interleaved, float8>(arguments);
  const kernel::TokenOrder order(rotary);
  for (int64_t number = begin; number < end; ++number) {
    Token token = order.token(number);
    token.rotated = kernel::begin_token<T>(rotary, turns, token, &angles);
    walk.run(token, angles);
  }
  const bool streams = walk.of_query.stores != Stores::ordinary ||
                       walk.of_cached.stores != Stores::ordinary || walk.keys.streaming() ||
                       walk.values.streaming();
  if (streams) core::stream_fence();
}

/// Normalises query and key, and rounds them to T before they are written to a float8 cache, as if
/// they came from memory.
template <typename T, bool interleaved, bool float8>
void norm_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  namespace kernel = rotary::POSEMBED_ISA;
  const rotary::Arguments& rotary = arguments.rotation;
  rotary_norm::POSEMBED_ISA::General<T, interleaved> norm(*arguments.norm);
  const Walk<T, float8> walk = plan_walk<T, interleaved, float8>(arguments);
  const HeadView &query = rotary.views[0], &key = rotary.views[1];
  const kernel::TokenOrder order(rotary);
  T buffer[rotary_norm::max_head_dim];
  for (int64_t number = begin; number < end; ++number) {
    Token token = order.token(number);
    norm.begin(&token);
    const RowGroup<T> queries = rows_of<T>(query, token), rows = rows_of<T>(key, token);
    norm.run(
        token, 0, [&](int64_t head) { return queries.out + head * queries.out_step; },
        [](int64_t) {});
    const int64_t slot = walk.slot(token);
    const auto target = [&](int64_t head) {
      return rows.out == nullptr ? buffer : rows.out + head * rows.out_step;
    };
    const auto write = [&](int64_t head) {
      if (slot < 0) return;
      auto* out = walk.keys.row(slot) + head * walk.keys.head_stride();
      walk.keys.write(target(head), rotary.head_dim, out);
    };
    if (slot >= 0 || rows.out != nullptr) norm.run(token, 1, target, write);
    if (slot < 0) continue;
    const RowGroup<T> value = rows_of<T>(arguments.value, token);
    write_rows(value.in, value.in_step, value.count, arguments.value_dim, walk.values, slot);
  }
  if (walk.keys.streaming() || walk.values.streaming()) core::stream_fence();
}

template <typename T, bool interleaved>
void walk_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  const bool normed = arguments.norm != nullptr;
  const auto walk =
      arguments.float8
          ? (normed ? norm_tokens<T, interleaved, true> : walk_tokens<T, interleaved, true>)
          : (normed ? norm_tokens<T, interleaved, false> : walk_tokens<T, interleaved, false>);
  walk(arguments, begin, end);
}

}  // namespace

void rotate_and_cache(const Arguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto walk = arguments.rotation.interleaved ? walk_tokens<T, true> : walk_tokens<T, false>;
    walk(arguments, begin, end);
  });
}

}  // namespace posembed::rotary_cache::POSEMBED_ISA

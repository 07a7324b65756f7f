// Sinusoids, ALiBi and rows of token tables for posembed_kernels.h.
#include "alibi/alibi.h"
#include "c_interface/tensors.h"
#include "sinusoidal/sinusoidal.h"
#include "token/token.h"

namespace posembed::c_interface {
namespace {

// ------------------------------------------------------------------------------------- sinusoidal

sinusoidal::Preset preset_of(posembed_sinusoidal_preset preset) {
  expect(preset >= POSEMBED_VASWANI && preset <= POSEMBED_TENSOR2TENSOR,
         "preset: expected one of posembed_sinusoidal_preset, got ", static_cast<int>(preset));
  return static_cast<sinusoidal::Preset>(preset);
}

std::vector<core::DoubleDouble> sinusoidal_series(posembed_sinusoidal_preset name, int64_t dim,
                                                  double base, const double* shift) {
  constexpr int64_t max_columns = int64_t{1} << 20;
  const sinusoidal::Preset preset = preset_of(name);
  expect(dim > 0 && dim <= max_columns, "embedding_dim: expected 1 to ", max_columns, ", got ",
         dim);
  expect(std::isfinite(base) && base >= 1, "base: expected a finite number of at least 1, got ",
         base);
  const double usual = preset == sinusoidal::Preset::tensor2tensor ? 1.0 : 0.0;
  const double divisor = sinusoidal::divisor_of(preset, dim, shift == nullptr ? usual : *shift);
  expect(std::isfinite(divisor) && (dim <= 3 || divisor > 0),
         "shift: expected less than half of embedding_dim, ", dim);
  const auto layout = sinusoidal::layout_of(preset, dim, false);
  return sinusoidal::frequencies(base, divisor, sinusoidal::pairs_of(layout));
}

/// One call, and the memory to which the kernel's arguments refer.
struct Encoding {
  sinusoidal::Arguments arguments;
  std::vector<core::Turn64> turns;
  std::vector<core::Turn128> wide_turns;
};

void set_series(const posembed_sinusoid& call, int64_t columns, Encoding* encoding) {
  sinusoidal::Sinusoid& s = encoding->arguments.sinusoid;
  s.layout = sinusoidal::layout_of(preset_of(call.preset), columns, call.cos_first != 0);
  s.pairs = sinusoidal::pairs_of(s.layout);
  expect(call.frequencies != nullptr, "frequencies: expected ", s.pairs, " numbers, got NULL");
  for (int64_t i = 0; i < s.pairs; ++i) {
    const double low = call.frequencies_low == nullptr ? 0.0 : call.frequencies_low[i];
    expect(std::isfinite(call.frequencies[i]) && std::isfinite(low),
           "frequencies: expected finite numbers, got ", call.frequencies[i], " at index ", i);
    encoding->wide_turns.push_back(
        core::turn_from_radians(core::DoubleDouble(call.frequencies[i], low)));
    encoding->turns.push_back(core::round_to_turn64(encoding->wide_turns.back()));
  }
  s.turns = encoding->turns.data();
  s.wide_turns = encoding->wide_turns.data();
  s.order = call.order;
  s.first = call.first;
  s.position_scale = call.position_scale == 0 ? 1 : call.position_scale;
  constexpr int64_t max_order = 1000, max_number = int64_t{1} << 31;  // as the operator
  expect(s.order >= 0 && s.order <= max_order, "order: expected 0 to ", max_order, ", got ",
         s.order);
  expect(s.first >= 0 && s.first <= max_number, "first: expected 0 to ", max_number, ", got ",
         s.first);
  expect(s.position_scale >= 1 && s.position_scale <= max_number, "position_scale: expected 1 to ",
         max_number, ", got ", s.position_scale);
  const double scale = call.scale == 0 ? 1.0 : call.scale;
  expect(std::isfinite(scale), "scale: expected a finite number, got ", scale);
  s.scale = scale * std::pow(static_cast<double>(s.position_scale), s.order);
}

void set_stride(const View& rows, int64_t* stride) {
  stride[0] = rows.rank == 3 ? rows.stride[0] : 0;
  stride[1] = rows.stride[rows.rank - 2];
}

void encode(const posembed_sinusoid& call, const posembed_threads& threads) {
  Encoding encoding;
  Device device;
  sinusoidal::Arguments& a = encoding.arguments;
  const View out = view(call.out, "out", &device);
  a.scalar = scalar_of(out);
  expect(out.rank == 2 || out.rank == 3, "out: expected [batch, seq, embedding_dim] or [seq, ",
         "embedding_dim], got ", out.shape());
  expect_writable(out);
  a.out = out.data;
  a.batch = out.rank == 3 ? out.size[0] : 1;
  a.seq = out.size[out.rank - 2];
  set_stride(out, a.out_stride);
  if (call.x != nullptr) {
    const View x = view(call.x, "x", &device);
    expect_shape(x, {out.size, out.size + out.rank});
    expect_same_dtype(x, out);
    expect_dense_rows(x);
    expect_apart(out, x);
    a.in = x.data;
    set_stride(x, a.in_stride);
  }
  set_series(call, out.last(), &encoding);
  expect_no_overflow(call.offset, a.seq, "offset");
  a.offset = call.offset;
  if (call.positions != nullptr) {
    const View positions = view(call.positions, "positions", &device);
    expect(call.offset == 0, "offset: expected 0 beside positions, got ", call.offset);
    const Rows rows = expect_rows(positions, a.batch, a.seq);
    a.positions = position_view(positions);
    a.position_stride[0] = rows.batch;
    a.position_stride[1] = rows.item;
    const bool checked = a.positions.floating && !device.on_cuda();
    for (int64_t i = 0; checked && i < rows.count * a.seq; ++i) {
      const int64_t index = i / a.seq * rows.batch + i % a.seq * rows.item;
      if (std::isfinite(core::read_floating<double>(positions.data, a.positions.scalar, index))) {
        continue;
      }
      refuse(POSEMBED_INDEX_ERROR, "positions: expected finite numbers, got one that is not at ",
             "batch ", i / a.seq, ", seq ", i % a.seq);
    }
  }
  if (out.count() == 0) return;
  const int64_t count = sinusoidal::encodings(a), rows = a.batch * a.seq;
  run(
      device, threads, count, 2 * out.last() * core::size_of(a.scalar) * (rows / count),
      [&a](int64_t begin, int64_t end) { sinusoidal::encode_cpu(a, begin, end); },
      [&a](auto stream, auto*) { return sinusoidal::encode_cuda(a, stream); });
}

// ------------------------------------------------------------------------------------------- alibi

constexpr int64_t max_distance = std::numeric_limits<int32_t>::max();

/// The least and the greatest position.
struct Range {
  int64_t low, high;
};

/// Positions of queries or of keys. Without a tensor they are first, first + 1, … On CUDA the
/// kernel checks them.
Range set_positions(const posembed_tensor* tensor, const char* name, int64_t batch, int64_t length,
                    int64_t first, Device* device, core::IndexView* index, int64_t* stride) {
  if (tensor == nullptr) return {first, first + length - 1};
  const View positions = view(tensor, name, device);
  const Rows rows = expect_rows(positions, batch, length);
  expect_dense_rows(positions);
  *index = index_view(positions);
  *stride = rows.batch;
  if (device->on_cuda()) return {0, 0};
  Range range{max_distance, -max_distance};
  for (int64_t i = 0; i < rows.count * length; ++i) {
    const int64_t value = core::read(*index, i / length * rows.batch + i % length);
    if (value < -max_distance || value > max_distance) {
      refuse(POSEMBED_INDEX_ERROR, name, ": expected -", max_distance, " to ", max_distance,
             ", got ", value, " at batch ", i / length, ", index ", i % length);
    }
    range = {std::min(range.low, value), std::max(range.high, value)};
  }
  return range;
}

void set_distances(const posembed_alibi& call, int64_t batch, Device* device, alibi::Distances* d) {
  d->causal = call.not_causal == 0;
  d->apply_mask = call.no_mask == 0;
  d->offset = call.query_offset == nullptr ? d->keys - d->queries : *call.query_offset;
  expect(call.query_offset == nullptr || call.query_positions == nullptr,
         "query_offset: expected NULL beside query_positions");
  const bool given = call.query_offset != nullptr || call.query_positions != nullptr ||
                     call.key_positions != nullptr;
  expect(given || !d->causal || d->keys == 0 || d->queries <= d->keys,
         "query_offset: expected the position of the first query where there are more queries ",
         "than keys, got NULL with ", d->queries, " queries and ", d->keys, " keys");
  expect(d->offset >= -max_distance && d->offset <= max_distance, "query_offset: expected -",
         max_distance, " to ", max_distance, ", got ", d->offset);
  const Range query = set_positions(call.query_positions, "query_positions", batch, d->queries,
                                    d->offset, device, &d->query_positions, &d->query_stride);
  const Range key = set_positions(call.key_positions, "key_positions", batch, d->keys, 0, device,
                                  &d->key_positions, &d->key_stride);
  expect(d->queries == 0 || d->keys == 0 ||
             (key.high - query.low <= max_distance && query.high - key.low <= max_distance),
         "positions: expected distances up to ", max_distance, ", got queries from ", query.low,
         " to ", query.high, " and keys from ", key.low, " to ", key.high);
  if (call.attention_mask == nullptr) return;
  const View mask = view(call.attention_mask, "attention_mask", device);
  const Rows rows = expect_rows(mask, batch, d->keys);
  if (mask.dtype.bits != 8 || (mask.dtype.code != 6 && mask.dtype.code != 1)) {
    refuse(POSEMBED_TYPE_ERROR, "attention_mask: expected bool or uint8");
  }
  expect_dense_rows(mask);
  const int64_t count = device->on_cuda() ? 0 : rows.count * d->keys;
  for (int64_t i = 0; i < count; ++i) {  // other bytes are no bool
    const auto value = static_cast<uint8_t>(mask.data[i / d->keys * rows.batch + i % d->keys]);
    expect(value <= 1, "attention_mask: expected 0 or 1, got ", int{value}, " at key ",
           i % d->keys);
  }
  d->mask = reinterpret_cast<const bool*>(mask.data);
  d->mask_stride = rows.batch;
}

void fill(const posembed_alibi& call, const posembed_threads& threads) {
  Device device;
  const View slopes = view(call.slopes, "slopes", &device), out = view(call.out, "out", &device);
  alibi::FillArguments a;
  a.scalar = scalar_of(out);
  expect(out.rank == 3 || out.rank == 4,
         "out: expected [heads, queries, keys] or [batch, heads, queries, keys], got ",
         out.shape());
  a.batch = out.rank == 4 ? out.size[0] : 1;
  const int64_t heads = out.size[out.rank - 3];
  const int64_t sides = slopes.rank > 1 ? slopes.size[slopes.rank - 2] : 1;
  expect(slopes.rank >= 1 && slopes.rank <= 3 && slopes.last() == heads && slopes.contiguous() &&
             (sides == 1 || sides == 2) &&
             (slopes.rank < 3 || (slopes.size[0] == a.batch && out.rank == 4)),
         "slopes: expected contiguous [heads], [2, heads] or [batch, sides, heads] with heads ",
         heads, " and batch ", a.batch, ", got ", slopes.shape());
  expect(sides == 1 || call.not_causal != 0,
         "slopes: expected one side where keys after the query are hidden, got ", slopes.shape());
  a.slopes = {slopes.data, scalar_of(slopes), heads, sides, slopes.rank == 3 ? sides * heads : 0};
  a.distances.queries = out.size[out.rank - 2];
  a.distances.keys = out.last();
  set_distances(call, a.batch, &device, &a.distances);
  expect_writable(out);
  expect_apart(out, slopes);
  a.out = {out.data,
           {out.rank == 4 ? out.stride[0] : 0, out.stride[out.rank - 3], out.stride[out.rank - 2]}};
  if (out.count() == 0) return;
  run(
      device, threads, a.batch * heads * a.distances.queries, out.last() * core::size_of(a.scalar),
      [&a](int64_t begin, int64_t end) { alibi::fill_cpu(a, begin, end); },
      [&a](auto stream, auto* error) {
        a.distances.error = error;
        return alibi::fill_cuda(a, stream);
      });
}

// ------------------------------------------------------------------------------------------- token

void gather(const posembed_gather& call, const posembed_threads& threads) {
  Device device;
  const View weight = view(call.weight, "weight", &device), ids = view(call.ids, "ids", &device),
             out = view(call.out, "out", &device);
  token::GatherArguments a;
  a.scalar = scalar_of(weight);
  expect(weight.rank == 2, "weight: expected [rows, embedding_dim], got ", weight.shape());
  expect_dense_rows(weight);
  expect_same_dtype(out, weight);
  expect(ids.rank < core::max_rank && ids.contiguous() && out.contiguous(),
         "ids, out: expected contiguous tensors of at most ", core::max_rank - 1, " dimensions");
  std::vector<int64_t> shape(ids.size, ids.size + ids.rank);
  shape.push_back(weight.last());
  expect_shape(out, shape);
  expect_apart(out, weight);
  expect_apart(out, ids);
  a.weight = weight.data;
  a.out = out.data;
  a.rows = weight.size[0];
  a.embedding_dim = weight.last();
  a.weight_stride = weight.stride[0];
  a.ids = index_view(ids);
  a.count = ids.count();
  a.scale = call.scale == 0 ? 1.0 : call.scale;
  const int64_t bad = device.on_cuda() ? -1 : core::find_outside(a.ids, a.count, 0, a.rows);
  if (bad >= 0) {
    refuse(POSEMBED_INDEX_ERROR, "ids: expected 0 to ", a.rows - 1, ", a row of weight, got ",
           core::read(a.ids, bad), " at index ", bad);
  }
  run(
      device, threads, a.count, 2 * a.embedding_dim * core::size_of(a.scalar),
      [&a](int64_t begin, int64_t end) { token::gather_cpu(a, begin, end); },
      [&a](auto stream, auto* error) {
        a.error = error;
        return token::gather_cuda(a, stream);
      });
}

}  // namespace
}  // namespace posembed::c_interface

using namespace posembed::c_interface;

posembed_status posembed_sinusoidal_frequencies(posembed_sinusoidal_preset preset,
                                                int64_t embedding_dim, double base,
                                                const double* shift, double* frequencies,
                                                double* frequencies_low) {
  return guarded([&] {
    const auto series = sinusoidal_series(preset, embedding_dim, base, shift);
    expect(frequencies != nullptr && frequencies_low != nullptr,
           "frequencies: expected memory for ", series.size(), " numbers, got NULL");
    for (const auto& frequency : series) {
      *frequencies++ = frequency.high;
      *frequencies_low++ = frequency.low;
    }
  });
}

posembed_status posembed_sinusoidal(const posembed_sinusoid* sinusoid,
                                    const posembed_threads* threads) {
  return guarded([&] { encode(copied(sinusoid, "sinusoid"), threads_of(threads)); });
}

posembed_status posembed_alibi_slopes(int64_t heads, double max_bias, int32_t geometric,
                                      float* slopes) {
  return guarded([&] {
    expect(heads > 0 && heads <= posembed::alibi::max_heads, "heads: expected 1 to ",
           posembed::alibi::max_heads, ", got ", heads);
    expect(std::isfinite(max_bias) && max_bias > 0, "max_bias: expected a positive number, got ",
           max_bias);
    expect(slopes != nullptr, "slopes: expected memory for ", heads, " numbers, got NULL");
    using posembed::alibi::SlopeKind;
    const SlopeKind kind = geometric != 0 ? SlopeKind::geometric : SlopeKind::paper;
    for (int64_t head = 0; head < heads; ++head) {
      slopes[head] = posembed::alibi::slope(kind, max_bias, heads, head);
    }
  });
}

posembed_status posembed_alibi_bias(const posembed_alibi* alibi, const posembed_threads* threads) {
  return guarded([&] { fill(copied(alibi, "alibi"), threads_of(threads)); });
}

posembed_status posembed_embedding(const posembed_gather* gather_call,
                                   const posembed_threads* threads) {
  return guarded([&] { gather(copied(gather_call, "gather"), threads_of(threads)); });
}

// Rotations and their frequencies for posembed_kernels.h.
#include "c_interface/tensors.h"
#include "rotary/rotary.h"

namespace posembed::c_interface {
namespace {

using rotary::Arguments;

void expect_rotary_dim(int64_t rotary_dim) {
  expect(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= 2 * rotary::max_pairs,
         "rotary_dim: expected an even number up to ", 2 * rotary::max_pairs, ", got ", rotary_dim);
}

/// The highest axis, plus one.
int64_t axes_in(const uint8_t* axis_of_pair, int64_t pairs, const char* name) {
  if (axis_of_pair == nullptr || pairs == 0) return 1;
  const int64_t axes = 1 + *std::max_element(axis_of_pair, axis_of_pair + pairs);
  expect(axes <= rotary::max_axes, name, ": expected axes 0 to ", rotary::max_axes - 1, ", got ",
         axes - 1);
  return axes;
}

// ----------------------------------------------------------------------------------------- series

rotary::Series unscaled(const posembed_rotary_series& series, core::DoubleDouble base) {
  if (series.restarts_axis == nullptr || series.rotary_dim == 0) {
    return rotary::geometric_frequencies(base, series.rotary_dim);
  }
  axes_in(series.restarts_axis, series.rotary_dim / 2, "restarts_axis");
  return rotary::restarted_frequencies(
      base, {series.restarts_axis, series.restarts_axis + series.rotary_dim / 2});
}

void check_series(const posembed_rotary_series& series) {
  expect_rotary_dim(series.rotary_dim);
  expect(std::isfinite(series.base) && series.base >= 1, "base: expected a finite number of at ",
         "least 1, got ", series.base);
  expect(series.scaling >= POSEMBED_NO_SCALING && series.scaling <= POSEMBED_LLAMA3,
         "scaling: expected one of posembed_scaling, got ", static_cast<int>(series.scaling));
  if (series.scaling == POSEMBED_NO_SCALING) return;
  expect(std::isfinite(series.factor) && series.factor > 0,
         "factor: expected a finite positive number, got ", series.factor);
  expect(series.scaling != POSEMBED_NTK || series.rotary_dim > 2,
         "rotary_dim: expected more than 2, got ", series.rotary_dim);
  if (series.scaling < POSEMBED_YARN) return;
  expect(series.original_max_positions > 1, "original_max_positions: expected more than 1, got ",
         series.original_max_positions);
  expect(series.low > 0 && series.high >= series.low && std::isfinite(series.high),
         "low, high: expected 0 < low <= high, got ", series.low, " and ", series.high);
  expect(series.scaling != POSEMBED_YARN || series.base > 1,
         "base: expected more than 1 for YaRN, got ", series.base);
}

/// The frequencies; `factor` becomes that of rotated pairs.
rotary::Series scaled(const posembed_rotary_series& series, double* factor) {
  *factor = 1.0;
  if (series.scaling == POSEMBED_NTK) {
    return unscaled(series, rotary::ntk_base(series.base, series.factor, series.rotary_dim));
  }
  rotary::Series result = unscaled(series, series.base);
  if (series.scaling == POSEMBED_LINEAR) {
    for (core::DoubleDouble& frequency : result) frequency = frequency / series.factor;
  } else if (series.scaling == POSEMBED_YARN) {
    const rotary::YarnBlend blend{series.original_max_positions, series.high, series.low,
                                  series.fractional == 0};
    rotary::scale_yarn(result, series.base, series.factor, blend);
    if (series.factor > 1) *factor = 0.1 * std::log(series.factor) + 1.0;
  } else if (series.scaling == POSEMBED_LLAMA3) {
    rotary::scale_llama3(result, series.factor, series.low, series.high,
                         series.original_max_positions);
  }
  return result;
}

// --------------------------------------------------------------------------------------- rotation

/// Where a layout has its dimensions; batch -1: none.
struct Dimensions {
  int64_t rank, batch, seq, heads;
};

Dimensions dimensions(posembed_layout layout) {
  constexpr Dimensions all[] = {{4, 0, 1, 2}, {4, 0, 2, 1}, {4, 1, 0, 2}, {3, -1, 0, 1}};
  expect(layout >= POSEMBED_BSHD && layout <= POSEMBED_THD,
         "layout: expected one of posembed_layout, got ", static_cast<int>(layout));
  return all[layout];
}

/// One rotation: the caller's struct, and the kernel's arguments with the memory that they refer
/// to.
struct Rotation {
  posembed_rotation call;
  Dimensions where;
  Arguments arguments;
  Device device;
  View query;
  std::vector<core::Turn64> turns;
  std::vector<core::Turn128> wide_turns;
  rotary::Series radians;
  std::vector<int64_t> windows;
};

int64_t size_at(const View& view, int64_t dimension) {
  return dimension < 0 ? 1 : view.size[dimension];
}

/// An input or a result: its shape, but for the heads, is query's.
View rotated(const posembed_tensor* tensor, const char* name, Rotation* r) {
  const View result = view(tensor, name, &r->device);
  scalar_of(result);
  expect(result.rank == r->where.rank, name, ": expected ", r->where.rank, " dimensions, got ",
         result.shape());
  const int64_t window = r->call.rotary_dim, head_dim = r->call.head_dim;
  expect(head_dim == 0 || result.last() == head_dim || result.last() == window, name,
         ": expected head_dim ", head_dim, " or rotary_dim ", window, ", got ", result.last());
  expect_dense_rows(result);
  return result;
}

/// Query's view, or key's.
void set_view(bool of_key, Rotation* r) {
  const posembed_rotation& call = r->call;
  const char* name = of_key ? "key" : "query";
  const View in = rotated(of_key ? call.key : call.query, name, r);
  const View out =
      of_key ? rotated(call.key_out, "key_out", r) : rotated(call.query_out, "query_out", r);
  expect_same_dtype(in, r->query);
  expect_same_dtype(out, in);
  expect_shape(out, {in.size, in.size + in.rank});
  for (const int64_t dimension : {r->where.batch, r->where.seq}) {
    expect(size_at(in, dimension) == size_at(r->query, dimension), name,
           ": expected the batch and ", "seq of query, ", r->query.shape(), ", got ", in.shape());
  }
  expect_writable(out);
  const bool same = in.data == out.data && std::equal(in.stride, in.stride + in.rank, out.stride);
  if (!same) expect_apart(out, in);
  rotary::HeadView& head = r->arguments.views[of_key ? 1 : 0];
  head.in = in.data;
  head.out = out.data;
  head.heads = in.size[r->where.heads];
  const int64_t order[3] = {r->where.batch, r->where.seq, r->where.heads};
  for (int i = 0; i < 3; ++i) {
    if (order[i] < 0) continue;
    head.in_stride[i] = in.stride[order[i]];
    head.out_stride[i] = out.stride[order[i]];
  }
  head.window_only = in.last() != call.head_dim;
}

/// Results may be their own inputs, and share no memory with anything else.
void set_tensors(Rotation* r) {
  const posembed_rotation& call = r->call;
  r->arguments.count = call.key == nullptr ? 1 : 2;
  set_view(false, r);
  if (call.key == nullptr) return;
  set_view(true, r);
  Device* device = &r->device;
  const View key = view(call.key, "key", device),
             query_out = view(call.query_out, "query_out", device),
             key_out = view(call.key_out, "key_out", device);
  expect_apart(query_out, key);
  expect_apart(key_out, r->query);
  expect_apart(key_out, query_out);
}

/// Positions are -1 or more, -1 on all axes of a token or on none; floating ones are finite.
void check_positions(const Arguments& a, int64_t rows) {
  for (int64_t batch = 0; batch < rows; ++batch) {
    for (int64_t i = 0; i < a.seq * a.axes; ++i) {
      const int64_t seq = i % a.seq, axis = i / a.seq;
      const auto refuse_here = [&](const char* expected) {
        refuse(POSEMBED_INDEX_ERROR, "positions: expected ", expected, " at axis ", axis,
               ", batch ", batch, ", seq ", seq);
      };
      const core::Position position = rotary::position_of(a, batch, seq, axis);
      if (a.positions.floating) {
        if (std::isnan(position.scale)) refuse_here("a finite number");
        continue;
      }
      if (position.whole < -1) refuse_here("-1 or more");
      const bool leaves = rotary::position_of(a, batch, seq, 0).whole == -1;
      if ((position.whole == -1) != leaves) refuse_here("-1 on all axes or on none");
    }
  }
}

void set_positions(Rotation* r) {
  Arguments& a = r->arguments;
  const int64_t axes = axes_in(r->call.axis_of_pair, a.pairs, "axis_of_pair");
  if (r->call.positions == nullptr) {
    expect(a.frequencies.axis_stride == 0, "positions: expected those of each axis, got NULL");
    return;
  }
  const View positions = view(r->call.positions, "positions", &r->device);
  const bool mixes = a.frequencies.axis_stride != 0;
  const bool by_axis = (axes > 1 || mixes) && positions.rank == r->where.rank - 1;
  const int64_t needed = mixes ? a.axes : axes;
  if (by_axis || mixes) {
    expect(by_axis && positions.size[0] >= needed && positions.size[0] <= rotary::max_axes,
           "positions: expected ", needed, " axes, got ", positions.shape());
    a.axes = positions.size[0];
    a.position_stride[2] = positions.stride[0];
    a.axis_of_pair = r->call.axis_of_pair;
  }
  const Rows rows = expect_rows(positions, a.batch, a.seq, by_axis ? 1 : 0);
  a.position_stride[0] = rows.batch;
  a.position_stride[1] = rows.item;
  a.positions = position_view(positions);
  expect(r->call.offset == 0 && r->call.cu_seqlens == nullptr,
         "positions: expected no offset and no cu_seqlens beside them");
  if (!r->device.on_cuda()) check_positions(a, rows.count);  // on CUDA the kernel does
}

void set_documents(Rotation* r) {
  if (r->call.cu_seqlens == nullptr) return;
  Arguments& a = r->arguments;
  const View starts = view(r->call.cu_seqlens, "cu_seqlens", &r->device);
  expect(starts.rank == 1 && starts.last() >= 1 && starts.contiguous() && a.batch == 1,
         "cu_seqlens: expected contiguous [documents + 1] and batch 1, got ", starts.shape());
  a.documents = {index_view(starts), starts.last() - 1};
  if (r->device.on_cuda()) return;
  for (int64_t i = 0; i < starts.last(); ++i) {
    const int64_t here = core::read(a.documents.starts, i);
    const int64_t before = i == 0 ? 0 : core::read(a.documents.starts, i - 1);
    expect(here >= before && (i > 0 || here == 0) && (i < a.documents.count || here == a.seq),
           "cu_seqlens: expected 0 first, ", a.seq, " last, and no decrease, got ", here,
           " at index ", i);
  }
}

void set_frequencies(Rotation* r) {
  Arguments& a = r->arguments;
  const posembed_rotation& call = r->call;
  expect(call.frequencies != nullptr,
         "frequencies: expected rotary_dim / 2 numbers, learned_frequencies or cosines, got NULL");
  for (int64_t i = 0; i < a.pairs; ++i) {
    const double low = call.frequencies_low == nullptr ? 0.0 : call.frequencies_low[i];
    expect(std::isfinite(call.frequencies[i]) && std::isfinite(low),
           "frequencies: expected finite numbers, got ", call.frequencies[i], " at index ", i);
    r->radians.emplace_back(call.frequencies[i], low);
    r->wide_turns.push_back(core::turn_from_radians(r->radians.back()));
    r->turns.push_back(core::round_to_turn64(r->wide_turns.back()));
  }
  a.turns = r->turns.data();
  a.wide_turns = r->wide_turns.data();
  a.radians = r->radians.data();
}

void expect_heads(int64_t heads, const char* name, const Arguments& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    expect(a.views[i].heads == heads, name, ": expected the heads of query and key, ",
           a.views[i].heads, ", got ", heads);
  }
}

void set_learned(Rotation* r) {
  Arguments& a = r->arguments;
  const View learned = view(r->call.learned_frequencies, "learned_frequencies", &r->device);
  expect(
      learned.rank >= 1 && learned.rank <= 3 && learned.last() == a.pairs && learned.contiguous(),
      learned.name, ": expected contiguous [", a.pairs, "], [heads, ", a.pairs,
      "] or [axes, heads, ", a.pairs, "], got ", learned.shape());
  a.frequencies = {learned.data, scalar_of(learned)};
  if (core::size_of(a.frequencies.scalar) < 4) {
    refuse(POSEMBED_TYPE_ERROR, learned.name, ": expected float32 or float64");
  }
  if (learned.rank == 1) return;
  expect(r->call.decay == nullptr, learned.name, ": expected one dimension beside decay");
  expect_heads(learned.size[learned.rank - 2], learned.name, a);
  a.frequencies.head_stride = a.pairs;
  if (learned.rank == 2) return;
  expect(r->call.axis_of_pair == nullptr && learned.size[0] >= 1 &&
             learned.size[0] <= rotary::max_axes,
         learned.name, ": expected 1 to ", rotary::max_axes, " axes and no axis_of_pair");
  a.axes = learned.size[0];
  a.frequencies.axis_stride = learned.size[1] * a.pairs;
}

void set_tables(Rotation* r) {
  Arguments& a = r->arguments;
  const View cosines = view(r->call.cosines, "cosines", &r->device),
             sines = view(r->call.sines, "sines", &r->device);
  const bool half = r->call.half_width != 0, by_head = cosines.rank == 4;
  const int64_t row = by_head ? 1 : cosines.rank - 2;
  a.table_scalar = scalar_of(cosines);
  expect(cosines.rank >= 2 && cosines.rank <= 4, "cosines: expected 2 to 4 dimensions, got ",
         cosines.shape());
  expect_same_dtype(sines, cosines);
  expect_shape(sines, {cosines.size, cosines.size + cosines.rank});
  expect(std::equal(sines.stride, sines.stride + sines.rank, cosines.stride),
         "sines: expected the strides of cosines");
  expect(cosines.size[row] == a.seq && cosines.last() == (half ? a.pairs : 2 * a.pairs) &&
             (cosines.rank == 2 || cosines.size[0] == 1 || cosines.size[0] == a.batch),
         "cosines: expected [batch or 1, seq, width] with batch ", a.batch, ", seq ", a.seq,
         " and width ", half ? a.pairs : 2 * a.pairs, ", got ", cosines.shape());
  expect(r->call.positions == nullptr && r->call.cu_seqlens == nullptr &&
             r->call.axis_of_pair == nullptr && r->call.decay == nullptr,
         "cosines: expected no positions, cu_seqlens, axis_of_pair or decay beside them");
  const bool widens =
      a.table_scalar != a.scalar && core::size_of(a.scalar) <= core::size_of(a.table_scalar);
  if (r->call.wide_products == 0 && widens) {
    refuse(POSEMBED_TYPE_ERROR, "cosines: expected a dtype that is not wider than query's");
  }
  if (by_head && cosines.size[2] != 1) {
    expect_heads(cosines.size[2], "cosines", a);
    a.table_head_stride = cosines.stride[2];
  }
  const int64_t step = cosines.stride[cosines.rank - 1];
  const bool second = !half, alternates = second && a.interleaved;
  a.cosines = cosines.data;
  a.sines = sines.data;
  a.table_stride[0] = cosines.rank > 2 && cosines.size[0] > 1 ? cosines.stride[0] : 0;
  a.table_stride[1] = cosines.stride[row];
  a.table_stride[2] = alternates ? 2 * step : step;
  if (second) a.table_second = alternates ? step : a.pairs * step;
  if (r->call.wide_products == 0) a.product_rounding = rotary::ProductRounding::to_data_type;
}

/// The first pair of each run of pairs of one axis, then the number of pairs.
void set_windows(Rotation* r) {
  const uint8_t* axis = r->call.axis_of_pair;
  if (axis == nullptr || r->call.within_axes == 0) return;
  Arguments& a = r->arguments;
  expect(!a.interleaved, "within_axes: expected 0 for interleaved pairs, which always are");
  for (int64_t pair = 0; pair < a.pairs; ++pair) {
    if (pair == 0 || axis[pair] != axis[pair - 1]) r->windows.push_back(pair);
  }
  r->windows.push_back(a.pairs);
  if (r->windows.size() <= 2) return;
  a.windows = r->windows.data();
  a.window_count = static_cast<int64_t>(r->windows.size()) - 1;
}

void set_form(Rotation* r) {
  posembed_rotation& call = r->call;
  Arguments& a = r->arguments;
  r->where = dimensions(call.layout);
  r->query = rotated(call.query, "query", r);
  if (call.head_dim == 0) call.head_dim = r->query.last();
  if (call.rotary_dim == 0) call.rotary_dim = call.head_dim;
  expect_rotary_dim(call.rotary_dim);
  expect(call.rotary_start >= 0 && call.rotary_dim <= call.head_dim &&
             call.rotary_start <= call.head_dim - call.rotary_dim,
         "rotary_start + rotary_dim: expected at most head_dim, ", call.head_dim, ", got ",
         call.rotary_start, " + ", call.rotary_dim);
  a.scalar = scalar_of(r->query);
  a.batch = size_at(r->query, r->where.batch);
  a.seq = r->query.size[r->where.seq];
  a.head_dim = call.head_dim;
  a.pairs = call.rotary_dim / 2;
  a.start = call.rotary_start;
  a.interleaved = call.interleaved != 0;
  a.reverse = ((call.inverse != 0) != (call.transpose != 0)) != (call.reverse != 0);
  expect(call.offset >= 0, "offset: expected 0 or more, got ", call.offset);
  expect_no_overflow(call.offset, a.seq, "offset");
  a.offset = call.offset;
}

void set_factors(Rotation* r) {
  const posembed_rotation& call = r->call;
  Arguments& a = r->arguments;
  const double factor = call.attention_factor == 0 ? 1.0 : call.attention_factor;
  expect(std::isfinite(factor) && factor > 0,
         "attention_factor: expected a finite positive number,", " got ", factor);
  a.amplitude = call.inverse != 0 ? 1.0 / factor : factor;
  if (call.decay == nullptr) return;
  a.decay = call.decay;
  a.decay_center = call.decay_center;
  a.decay_sign = call.inverse != 0 ? -1.0 : 1.0;
}

void rotate(const posembed_rotation& call, const posembed_threads& threads) {
  Rotation r{call, {}, {}, {}, {}, {}, {}, {}, {}};
  set_form(&r);
  set_tensors(&r);
  set_factors(&r);
  if (call.cosines != nullptr) {
    set_tables(&r);
  } else {
    call.learned_frequencies != nullptr ? set_learned(&r) : set_frequencies(&r);
    set_positions(&r);
    set_documents(&r);
    set_windows(&r);
  }
  Arguments& a = r.arguments;
  const int64_t heads = a.views[0].heads + (a.count > 1 ? a.views[1].heads : 0);
  run(
      r.device, threads, a.batch * a.seq, 2 * heads * a.head_dim * core::size_of(a.scalar),
      [&a](int64_t begin, int64_t end) { rotary::rotate_cpu(a, begin, end); },
      [&a](auto stream, auto* error) {
        a.error = error;
        return rotary::rotate_cuda(a, stream);
      });
}

}  // namespace
}  // namespace posembed::c_interface

using namespace posembed::c_interface;

posembed_status posembed_rotary_frequencies(const posembed_rotary_series* series,
                                            double* frequencies, double* frequencies_low,
                                            double* attention_factor) {
  return guarded([&] {
    posembed_rotary_series call = copied(series, "series");
    if (call.base == 0) call.base = 10000.0;
    if (call.low == 0 && call.high == 0) {
      call.low = 1.0;
      call.high = call.scaling == POSEMBED_YARN ? 32.0 : 4.0;
    }
    check_series(call);
    expect(frequencies != nullptr && frequencies_low != nullptr,
           "frequencies: expected memory for rotary_dim / 2 numbers, got NULL");
    double factor;
    for (const auto& frequency : scaled(call, &factor)) {
      *frequencies++ = frequency.high;
      *frequencies_low++ = frequency.low;
    }
    if (attention_factor != nullptr) *attention_factor = factor;
  });
}

posembed_status posembed_rotary(const posembed_rotation* rotation,
                                const posembed_threads* threads) {
  return guarded([&] { rotate(copied(rotation, "rotation"), threads_of(threads)); });
}

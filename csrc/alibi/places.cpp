#include "alibi/places.h"

#include <ATen/ops/ne.h>

#include <algorithm>
#include <limits>

#include "core/index_range.h"
#include "dispatcher/checks.h"
#include "dispatcher/cu_seqlens.h"

namespace posembed::alibi {
namespace {

constexpr int64_t most = std::numeric_limits<int32_t>::max();

// ------------------------------------------------------------------------------------------ shapes

/// [length] or [batch, length]; a batch of 1 serves every batch.
void check_shape(const Tensor& tensor, const char* argument, const MaybeSize& batch,
                 const c10::SymInt& length) {
  const int64_t dim = tensor.dim();
  const bool fits = (dim == 1 || (dim == 2 && batch.has_value() &&
                                  (tensor.sym_size(0) == *batch || tensor.sym_size(0) == 1))) &&
                    tensor.sym_size(-1) == length;
  if (batch.has_value()) {
    TORCH_CHECK_VALUE(fits, argument, ": expected [", length, "] or [", *batch, ", ", length,
                      "], got ", tensor.sym_sizes());
  }
  TORCH_CHECK_VALUE(fits, argument, ": expected [", length, "], got ", tensor.sym_sizes());
}

void check_device(const Tensor& tensor, const char* argument, c10::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, argument, ": expected the device of scores or ",
                    "slopes, ", device, ", got ", tensor.device());
}

void check_positions(const MaybeTensor& positions, const char* argument, const MaybeSize& batch,
                     const c10::SymInt& length, c10::Device device) {
  if (!positions.has_value()) return;
  dispatcher::check_integers(*positions, argument);
  check_shape(*positions, argument, batch, length);
  check_device(*positions, argument, device);
}

// ------------------------------------------------------------------------------------------ values

struct Range {
  int64_t low;
  int64_t high;
};

Range range_of(const MaybeTensor& positions, int64_t first, int64_t count, const char* argument) {
  if (!positions.has_value()) return {first, first + count - 1};
  const Tensor plain = positions->contiguous();
  const core::IndexView view = dispatcher::index_view(plain);
  const int64_t bad = core::find_outside(view, plain.numel(), -most, most + 1);
  TORCH_CHECK_INDEX(bad < 0, argument, ": expected -", most, " to ", most, ", got ",
                    core::read(view, bad), " at place ", bad);
  Range range{most, -most};
  for (int64_t place = 0; place < plain.numel(); ++place) {
    range.low = std::min(range.low, core::read(view, place));
    range.high = std::max(range.high, core::read(view, place));
  }
  return range;
}

void check_distances(const Places& places, const Distances& distances) {
  if (distances.queries == 0 || distances.keys == 0) return;
  const Range query =
      range_of(places.query_positions, distances.offset, distances.queries, "query_positions");
  const Range key = range_of(places.key_positions, 0, distances.keys, "key_positions");
  TORCH_CHECK_VALUE(key.high - query.low <= most && query.high - key.low <= most,
                    "positions: expected distances between queries and keys up to ", most,
                    ", got queries from ", query.low, " to ", query.high, " and keys from ",
                    key.low, " to ", key.high);
}

void check_lengths(const Distances& distances, bool own_positions) {
  TORCH_CHECK_VALUE(distances.queries <= most, "query_length: expected up to ", most, ", got ",
                    distances.queries);
  TORCH_CHECK_VALUE(distances.keys <= most, "key_length: expected up to ", most, ", got ",
                    distances.keys);
  const int64_t offset = distances.offset;
  TORCH_CHECK_VALUE(offset >= -most && offset <= most, "query_offset: expected -", most, " to ",
                    most, ", got ", offset);
  TORCH_CHECK_VALUE(
      own_positions || (offset + distances.queries <= most && distances.keys - offset <= most),
      "query_offset: expected distances between queries and keys up to ", most,
      ", got query_offset ", offset, " with query_length ", distances.queries, " and key_length ",
      distances.keys);
}

}  // namespace

void check_places(const Places& places, const MaybeSize& batch, const c10::SymInt& queries,
                  const c10::SymInt& keys, c10::Device device) {
  check_positions(places.query_positions, "query_positions", batch, queries, device);
  check_positions(places.key_positions, "key_positions", batch, keys, device);
  TORCH_CHECK_VALUE(!places.query_positions.has_value() || !places.query_offset.has_value(),
                    "query_offset: expected none beside query_positions");
  if (places.cu_seqlens.has_value()) {
    dispatcher::check_integers(*places.cu_seqlens, "cu_seqlens");
    TORCH_CHECK_VALUE(places.cu_seqlens->dim() == 1 && places.cu_seqlens->sym_size(0) >= 1,
                      "cu_seqlens: expected [documents + 1], got ", places.cu_seqlens->sym_sizes());
    check_device(*places.cu_seqlens, "cu_seqlens", device);
  }
  if (places.attention_mask.has_value()) {
    const Tensor& mask = *places.attention_mask;
    TORCH_CHECK_TYPE(at::isIntegralType(mask.scalar_type(), /*includeBool=*/true),
                     "attention_mask: expected bool or integers, got ", mask.scalar_type());
    check_shape(mask, "attention_mask", batch, keys);
    check_device(mask, "attention_mask", device);
  }
}

MaybeSize batch_of_places(const Places& places) {
  for (const auto* tensor :
       {&places.query_positions, &places.key_positions, &places.attention_mask}) {
    if (tensor->has_value() && (*tensor)->dim() == 2) return (*tensor)->sym_size(0);
  }
  return std::nullopt;
}

Layout::Layout(const Places& places, bool hide, int64_t queries, int64_t keys) {
  distances_.queries = queries;
  distances_.keys = keys;
  distances_.offset = places.query_offset.value_or(keys - queries).expect_int();
  distances_.causal = places.causal;
  distances_.apply_mask = hide;
  const bool positions = places.query_positions.has_value() || places.key_positions.has_value();
  check_lengths(distances_, positions);
  const auto on_cpu = [](const MaybeTensor& tensor) {
    return !tensor.has_value() || tensor->device().is_cpu();
  };
  if (positions && on_cpu(places.query_positions) && on_cpu(places.key_positions)) {
    check_distances(places, distances_);
  }
  set_positions(places.query_positions, &distances_.query_positions, &distances_.query_stride);
  set_positions(places.key_positions, &distances_.key_positions, &distances_.key_stride);
  if (places.cu_seqlens.has_value()) {
    const Tensor& boundaries = keep(places.cu_seqlens->contiguous());
    dispatcher::check_cu_seqlens(boundaries, keys, "key_length");
    distances_.cu_seqlens = dispatcher::index_view(boundaries);
    distances_.documents = boundaries.numel() - 1;
  }
  if (places.attention_mask.has_value()) {
    const Tensor& mask = *places.attention_mask;
    const Tensor& visible =
        keep((mask.scalar_type() == at::kBool ? mask : at::ne(mask, 0)).contiguous());
    distances_.mask = visible.const_data_ptr<bool>();
    distances_.mask_stride = visible.dim() == 2 && visible.size(0) > 1 ? keys : 0;
  }
}

const Tensor& Layout::keep(Tensor tensor) {
  kept_.push_back(std::move(tensor));
  return kept_.back();
}

void Layout::set_positions(const MaybeTensor& positions, core::IndexView* view, int64_t* stride) {
  if (!positions.has_value()) return;
  const Tensor& plain = keep(positions->contiguous());
  *view = dispatcher::index_view(plain);
  *stride = plain.dim() == 2 && plain.size(0) > 1 ? plain.size(1) : 0;
}

}  // namespace posembed::alibi

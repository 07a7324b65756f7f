#include <algorithm>
#include <limits>

#include "alibi/alibi_operator.h"
#include "core/index.h"

namespace posembed::alibi {
namespace {

constexpr int64_t max_position = std::numeric_limits<int32_t>::max();

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

void check_positions(const MaybeTensor& positions, const char* argument, const MaybeSize& batch,
                     const c10::SymInt& length) {
  if (!positions.has_value()) return;
  dispatcher::check_position_integers(*positions, argument);
  check_shape(*positions, argument, batch, length);
}

/// [batch], in place of one offset for all.
void check_offsets(const Call& call, const MaybeSize& batch) {
  if (!call.query_offsets().has_value()) return;
  const Tensor& offsets = *call.query_offsets();
  dispatcher::check_position_integers(offsets, "query_offset");
  TORCH_CHECK_VALUE(!call.query_offset().has_value() && !call.query_positions().has_value(),
                    "query_offset: expected none beside query_positions, got ",
                    offsets.sym_sizes());
  TORCH_CHECK_VALUE(!call.cu_seqlens().has_value(),
                    "query_offset: expected a number beside cu_seqlens, whose documents contain "
                    "the queries, got ",
                    offsets.sym_sizes());
  TORCH_CHECK_VALUE(batch.has_value(), "query_offset: expected a number where there is no batch, ",
                    "got ", offsets.sym_sizes());
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.sym_size(0) == *batch,
                    "query_offset: expected a number or [batch] with batch ", *batch, ", got ",
                    offsets.sym_sizes());
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
  const int64_t bad = core::find_outside(view, plain.numel(), -max_position, max_position + 1);
  TORCH_CHECK_INDEX(bad < 0, argument, ": expected -", max_position, " to ", max_position, ", got ",
                    core::read(view, bad), " at index ", bad);
  Range range{max_position, -max_position};
  for (int64_t i = 0; i < plain.numel(); ++i) {
    range.low = std::min(range.low, core::read(view, i));
    range.high = std::max(range.high, core::read(view, i));
  }
  return range;
}

void check_distances(const Call& call, const Distances& distances) {
  if (distances.queries == 0 || distances.keys == 0) return;
  const Range query =
      range_of(call.query_positions(), distances.offset, distances.queries, "query_positions");
  const Range key = range_of(call.key_positions(), 0, distances.keys, "key_positions");
  TORCH_CHECK_VALUE(key.high - query.low <= max_position && query.high - key.low <= max_position,
                    "positions: expected distances between queries and keys up to ", max_position,
                    ", got queries from ", query.low, " to ", query.high, " and keys from ",
                    key.low, " to ", key.high);
}

bool has_positions(const Call& call) {
  return call.query_positions().has_value() || call.key_positions().has_value();
}

bool numbers_visible_keys(const Call& call) {
  return call.positions_from_mask() && call.attention_mask().has_value();
}

/// Symbolic lengths pass: their bound would become a guard of compiled graphs.
void check_offset(const Call& call, const c10::SymInt& queries, const c10::SymInt& keys) {
  const auto query_length = queries.maybe_as_int(), key_length = keys.maybe_as_int(),
             offset = call.query_offset().value_or(keys - queries).maybe_as_int();
  if (!offset || !query_length || !key_length) return;
  const bool given = call.query_offset() || call.query_offsets() || has_positions(call);
  // By default the last query aligns with the last key: the first would see no key.
  TORCH_CHECK_VALUE(given || !call.causal() || *key_length == 0 || *query_length <= *key_length,
                    "query_offset: expected the position of the first query where there are more "
                    "queries than keys, got none with query_length ",
                    *query_length, " and key_length ", *key_length);
  TORCH_CHECK_VALUE(*offset >= -max_position && *offset <= max_position, "query_offset: expected -",
                    max_position, " to ", max_position, ", got ", *offset);
  const bool own_positions = has_positions(call) || numbers_visible_keys(call);
  TORCH_CHECK_VALUE(own_positions || (*offset + *query_length <= max_position &&
                                      *key_length - *offset <= max_position),
                    "query_offset: expected distances between queries and keys up to ",
                    max_position, ", got query_offset ", *offset, " with query_length ",
                    *query_length, " and key_length ", *key_length);
}

}  // namespace

void check_call(const Call& call, const MaybeSize& batch, const c10::SymInt& queries,
                const c10::SymInt& keys) {
  dispatcher::check_length(queries, "query_length");
  dispatcher::check_length(keys, "key_length");
  check_offset(call, queries, keys);
  check_positions(call.query_positions(), "query_positions", batch, queries);
  check_positions(call.key_positions(), "key_positions", batch, keys);
  check_offsets(call, batch);
  // with_positions() keeps the offset along with its positions, because documents depend on the
  // offset.
  TORCH_CHECK_VALUE(!call.query_positions().has_value() || !call.query_offset().has_value() ||
                        numbers_visible_keys(call),
                    "query_offset: expected none beside query_positions");
  if (const MaybeTensor& boundaries = call.cu_seqlens(); boundaries.has_value()) {
    dispatcher::check_boundaries(*boundaries);
  }
  if (const MaybeTensor& mask = call.attention_mask(); mask.has_value()) {
    TORCH_CHECK_TYPE(at::isIntegralType(mask->scalar_type(), /*includeBool=*/true),
                     "attention_mask: expected bool or integers, got ",
                     dispatcher::dtype_name(mask->scalar_type()));
    check_shape(*mask, "attention_mask", batch, keys);
  }
}

MaybeSize batch_of_positions(const Call& call) {
  for (const auto* tensor :
       {&call.query_positions(), &call.key_positions(), &call.attention_mask()}) {
    if (tensor->has_value() && (*tensor)->dim() == 2) return (*tensor)->sym_size(0);
  }
  const MaybeTensor& offsets = call.query_offsets();
  if (offsets.has_value() && offsets->dim() == 1) return offsets->sym_size(0);
  return std::nullopt;
}

namespace {

/// False for offsets that check_call() rejects.
bool offsets_fit(const Call& call, const c10::SymInt& keys) {
  const Tensor& offsets = *call.query_offsets();
  const MaybeTensor& mask = call.attention_mask();
  return offsets.dim() == 1 && at::isIntegralType(offsets.scalar_type(), /*includeBool=*/false) &&
         (!mask.has_value() || (mask->dim() > 0 && mask->sym_size(-1) == keys)) &&
         (!mask.has_value() || mask->dim() != 2 || mask->sym_size(0) == 1 ||
          mask->sym_size(0) == offsets.sym_size(0)) &&
         !call.query_offset().has_value() && !call.query_positions().has_value() &&
         !call.cu_seqlens().has_value();
}

/// The positions of queries at `places` among keys that a mask numbers: those of their keys. Other
/// queries keep their places.
Tensor numbered(const Tensor& places, const Tensor& numbers, const c10::SymInt& keys) {
  const Tensor inside = places.ge(0).logical_and(places.lt(at::Scalar(keys)));
  const Tensor nearest = places.clamp(at::Scalar(0), at::Scalar(keys - 1));
  return at::where(inside, numbers.gather(-1, nearest), places);
}

/// The call with positions that begin at each sample's offset.
Call with_offsets(Call call, const c10::SymInt& queries, const c10::SymInt& keys) {
  const Tensor offsets = call.query_offsets()->to(at::kLong);
  Tensor places = offsets.unsqueeze(-1) + at::arange(queries, offsets.options());
  if (numbers_visible_keys(call) && !call.key_positions().has_value() && keys > 0) {
    call.key_positions(alibi_positions(*call.attention_mask()));
    const Tensor& numbers = *call.key_positions();
    places = numbered(places, numbers.expand_symint({offsets.sym_size(0), keys}), keys);
  }
  call.query_positions(places);
  call.query_offsets(std::nullopt);
  return call;
}

}  // namespace

Call with_positions(Call call, const c10::SymInt& queries, const c10::SymInt& keys) {
  if (call.query_offsets().has_value()) {
    return offsets_fit(call, keys) ? with_offsets(call, queries, keys) : call;
  }
  if (!numbers_visible_keys(call) || has_positions(call)) return call;
  const Tensor& mask = *call.attention_mask();
  if (mask.dim() == 0 || mask.sym_size(-1) != keys) return call;  // check_call() rejects it
  const Tensor positions = alibi_positions(mask);
  call.key_positions(positions);
  const c10::SymInt first = call.query_offset().value_or(keys - queries);
  if (first >= 0 && first + queries <= keys) {
    call.query_positions(positions.narrow_symint(-1, first, queries));
  } else if (keys > 0) {
    std::vector<c10::SymInt> sizes = positions.sym_sizes().vec();
    sizes.back() = queries;
    const Tensor places = at::arange(queries, positions.options()).add(at::Scalar(first));
    call.query_positions(numbered(places.expand_symint(sizes), positions, keys));
  }
  return call;
}

ScorePositions::ScorePositions(const Call& original, int64_t queries, int64_t keys) {
  const Call call = with_positions(original, queries, keys);
  distances_.queries = queries;
  distances_.keys = keys;
  distances_.offset = call.query_offset().value_or(keys - queries).expect_int();
  distances_.causal = call.causal();
  distances_.apply_mask = call.apply_mask();
  const auto on_cpu = [](const MaybeTensor& tensor) {
    return !tensor.has_value() || tensor->device().is_cpu();
  };
  if (has_positions(call) && on_cpu(call.query_positions()) && on_cpu(call.key_positions())) {
    check_distances(call, distances_);
  }
  set_positions(call.query_positions(), &distances_.query_positions, &distances_.query_stride);
  set_positions(call.key_positions(), &distances_.key_positions, &distances_.key_stride);
  if (call.cu_seqlens().has_value()) set_documents(*call.cu_seqlens());
  if (call.attention_mask().has_value()) set_mask(*call.attention_mask());
}

const Tensor& ScorePositions::keep(Tensor tensor) {
  kept_.push_back(std::move(tensor));
  return kept_.back();
}

void ScorePositions::set_positions(const MaybeTensor& positions, core::IndexView* view,
                                   int64_t* stride) {
  if (!positions.has_value()) return;
  const Tensor& rows = keep(dispatcher::with_contiguous_last_dim(*positions));
  *view = dispatcher::index_view(rows);
  *stride = rows.dim() == 2 && rows.size(0) > 1 ? rows.stride(0) : 0;
}

void ScorePositions::set_documents(const Tensor& cu_seqlens) {
  const Tensor& boundaries = keep(cu_seqlens.contiguous());
  dispatcher::check_cu_seqlens(boundaries, distances_.keys, "key_length");
  distances_.cu_seqlens = dispatcher::index_view(boundaries);
  distances_.documents = boundaries.numel() - 1;
}

void ScorePositions::set_mask(const Tensor& attention_mask) {
  const bool is_bool = attention_mask.scalar_type() == at::kBool;
  const Tensor& visible = keep((is_bool ? attention_mask : at::ne(attention_mask, 0)).contiguous());
  distances_.mask = visible.const_data_ptr<bool>();
  distances_.mask_stride = visible.dim() == 2 && visible.size(0) > 1 ? distances_.keys : 0;
}

}  // namespace posembed::alibi

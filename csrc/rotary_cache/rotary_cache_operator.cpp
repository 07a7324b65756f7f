// The operator that rotates query and key and writes key and value to a paged cache: shapes, dtypes
// and slots are checked before anything is written.
#include "rotary_cache/rotary_cache_operator.h"

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "core/brief.h"
#include "core/index.h"
#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "rotary/rotary_operator.h"
#include "rotary_cache/rotary_cache.h"
#include "rotary_norm/rotary_norm_operator.h"

namespace posembed::rotary_cache {
namespace {

using rotary::Dimensions;

// ------------------------------------------------------------------------------------- checks

/// The index of each dimension of a cache's layout; pages are first and head_dim is last.
struct CacheDimensions {
  int64_t slots, heads;
  const char* shape;
};

CacheDimensions cache_dimensions(Text layout) {
  if (layout == "nhd" || layout == latent_layout)
    return {1, 2, "[pages, page_size, heads, head_dim]"};
  if (layout == "hnd") return {2, 1, "[pages, heads, page_size, head_dim]"};
  TORCH_CHECK_VALUE(false, "cache_layout: expected 'nhd' or 'hnd', got '", core::brief(layout),
                    "'");
}

bool is_float8(const Tensor& cache) { return cache.scalar_type() == at::kFloat8_e4m3fn; }

void check_value(const Call& call, const char* argument, const Dimensions& where) {
  dispatcher::check_rank(call.value, argument, where.rank, where.shape);
  dispatcher::check_same_dtype(call.value, argument, call.query, "query");
  for (const auto& [dimension, name] :
       {std::pair(where.batch, "batch"), {where.seq, "seq"}, {where.heads, "heads"}}) {
    if (dimension < 0) continue;
    dispatcher::check_size(call.value.sym_size(dimension), call.key.sym_size(dimension), argument,
                           name);
  }
}

void check_slot_mapping(const Call& call, const Dimensions& where) {
  // slot_mapping: [tokens] or [batch, seq]
  const Tensor& slots = call.slot_mapping;
  dispatcher::check_integers(slots, "slot_mapping");
  const bool batched = where.batch >= 0;
  dispatcher::check_rank(slots, "slot_mapping", batched ? 2 : 1,
                         batched ? "[batch, seq]" : "[tokens]");
  dispatcher::check_size(slots.sym_size(-1), call.query.sym_size(where.seq), "slot_mapping", "seq");
  if (!batched) return;
  dispatcher::check_size(slots.sym_size(0), call.query.sym_size(where.batch), "slot_mapping",
                         "batch");
}

void check_cache(const Tensor& cache, const char* argument, const Tensor& rows, const Call& call,
                 const Dimensions& where) {
  const CacheDimensions dims = cache_dimensions(call.cache_layout);
  TORCH_CHECK_TYPE(is_float8(cache) || cache.scalar_type() == call.query.scalar_type(), argument,
                   ": expected the dtype of query, ",
                   dispatcher::dtype_name(call.query.scalar_type()), ", or float8_e4m3fn, got ",
                   dispatcher::dtype_name(cache.scalar_type()));
  dispatcher::check_rank(cache, argument, 4, dims.shape);
  dispatcher::check_size(cache.sym_size(dims.heads), rows.sym_size(where.heads), argument, "heads");
  dispatcher::check_size(cache.sym_size(3), rows.sym_size(-1), argument, "head_dim");
}

void check_caches(const Call& call, const Names& names, const Dimensions& where) {
  const Tensor &keys = call.key_cache, &values = call.value_cache;
  check_cache(keys, names.key_cache, call.key, call, where);
  check_cache(values, names.value_cache, call.value, call, where);
  dispatcher::check_same_dtype(values, names.value_cache, keys, names.key_cache);
  const int64_t slots = cache_dimensions(call.cache_layout).slots;
  dispatcher::check_size(values.sym_size(0), keys.sym_size(0), names.value_cache, "pages");
  dispatcher::check_size(values.sym_size(slots), keys.sym_size(slots), names.value_cache,
                         "page_size");
}

void check_scale(double scale, const MaybeTensor& tensor, const char* argument, const Call& call) {
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale > 0, argument,
                    ": expected a finite number above 0, got ", scale);
  const bool float8 = is_float8(call.key_cache);
  TORCH_CHECK_VALUE(float8 || scale == 1.0, argument,
                    ": expected 1 unless the cache is float8_e4m3fn, got ", scale);
  if (!tensor.has_value()) return;
  TORCH_CHECK_VALUE(float8, argument,
                    ": expected 1 unless the cache is float8_e4m3fn, got a tensor");
  TORCH_CHECK_VALUE(scale == 1.0, argument, ": expected a number or a tensor, got both");
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat, argument, ": expected float32, got ",
                   dispatcher::dtype_name(tensor->scalar_type()));
  TORCH_CHECK_VALUE(tensor->sym_numel() == 1, argument, ": expected one element, got ",
                    tensor->sym_sizes());
}

/// The norm of a call as norm_rotary takes it.
rotary_norm::Call norm_of(const Call& call) {
  NormRotaryCall options;
  options.layout(call.layout).eps(call.norm.eps()).weight_offset(call.norm.weight_offset());
  options.centred(call.norm.centred()).all_heads(call.norm.all_heads());
  options.query_bias(call.norm.query_bias()).key_bias(call.norm.key_bias());
  return {call.query, call.key,          call.norm.query_weight(), call.norm.key_weight(),
          call.spec,  std::move(options)};
}

void check_norm(const Call& call) {
  if (!call.normed) {
    const bool given = call.norm.query_weight() || call.norm.key_weight() ||
                       call.norm.query_bias() || call.norm.key_bias();
    TORCH_CHECK_VALUE(!given, "query_weight: expected no weights and biases without a norm");
    return;
  }
  // The norm of a key that is only a window is not known.
  dispatcher::check_size(call.key.sym_size(-1), call.query.sym_size(-1), "key", "head_dim");
  TORCH_CHECK_VALUE(call.query.sym_size(-1) <= rotary_norm::max_head_dim,
                    "head_dim: expected at most ", rotary_norm::max_head_dim, ", got ",
                    call.query.sym_size(-1));
  rotary_norm::check_parameters(norm_of(call));
}

/// Calls visit(tensor, its name) for the tensors that a call writes.
template <typename Visit>
void for_each_written(const Call& call, const Visit& visit) {
  const Names names = names_of(call);
  visit(call.rotated_query(), call.query_out ? "query_out" : "query");
  if (call.rotate_key) visit(call.key, names.key);
  visit(call.key_cache, names.key_cache);
  visit(call.value_cache, names.value_cache);
}

/// The checks that need no values.
rotary::SpecificationPointer check(const Call& call) {
  const Names names = names_of(call);
  rotary::SpecificationPointer spec =
      rotary::check(call.query, &call.key, rotation_of(call), {"query", names.key});
  rotary::check_exact_angles(*spec, names.function);
  dispatcher::check_size(call.query.sym_size(-1), spec->spec.head_dim, "query", "head_dim");
  check_norm(call);
  const Dimensions where = rotary::dimensions(call.layout);
  check_value(call, names.value, where);
  check_slot_mapping(call, where);
  check_caches(call, names, where);
  check_scale(call.key_scale, call.key_scale_tensor, names.key_scale, call);
  check_scale(call.value_scale, call.value_scale_tensor, names.value_scale, call);
  if (call.query_out.has_value()) {
    dispatcher::check_like(*call.query_out, "query_out", call.query, "query");
  }
  for_each_written(call, dispatcher::check_writable);
  return spec;
}

struct Named {
  const Tensor& tensor;
  const char* name;
};

void check_no_overlap(const Named& tensor, const Named& other) {
  dispatcher::check_no_overlap(tensor.tensor, tensor.name, other.tensor, other.name);
}

/// Checks that no output shares memory with another tensor.
void check_memory(const Call& call) {
  const Names names = names_of(call);
  const bool elsewhere = call.query_out.has_value();
  const Named query{call.query, "query"}, key{call.key, names.key}, value{call.value, names.value};
  const Named rotated{call.rotated_query(), elsewhere ? "query_out" : "query"};
  const Named written[] = {
      rotated, {call.key_cache, names.key_cache}, {call.value_cache, names.value_cache}};
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < i; ++j) check_no_overlap(written[i], written[j]);
    check_no_overlap(key, written[i]);
    check_no_overlap(value, written[i]);
    if (elsewhere && i > 0) check_no_overlap(query, written[i]);
  }
  if (call.rotate_key) {
    check_no_overlap(value, key);
    if (elsewhere) check_no_overlap(key, query);
  }
  dispatcher::check_no_overlap_or_same(rotated.tensor, rotated.name, query.tensor, query.name);
}

/// Checks slots on the CPU before anything is written; CUDA kernels record bad ones.
Tensor checked_slots(const Call& call, int64_t slot_count) {
  if (dispatcher::on_cuda(call.slot_mapping)) return call.slot_mapping;
  const Tensor slots = call.slot_mapping.contiguous();
  const core::IndexView view = dispatcher::index_view(slots);
  const int64_t index = core::find_outside(view, slots.numel(), -1, slot_count);
  TORCH_CHECK_INDEX(index < 0, "slot_mapping: expected -1 (skip the token) or 0 to ",
                    slot_count - 1, ", a slot of the cache, got ", core::read(view, index),
                    " at index ", index);
  return slots;
}

// --------------------------------------------------------------------------------- the kernel

Cache cache_of(const Tensor& tensor, Text layout, double scale, const MaybeTensor& scale_tensor) {
  const CacheDimensions dims = cache_dimensions(layout);
  Cache result;
  result.data = tensor.mutable_data_ptr();
  result.stride[0] = tensor.stride(0);
  result.stride[1] = tensor.stride(dims.slots);
  result.stride[2] = tensor.stride(dims.heads);
  result.scale = static_cast<float>(scale);
  if (scale_tensor.has_value()) result.scale_data = scale_tensor->const_data_ptr<float>();
  return result;
}

void set_slots(const Tensor& slots, const Dimensions& where, Arguments& arguments) {
  arguments.slots = dispatcher::index_view(slots);
  arguments.slot_stride[0] = where.batch < 0 ? 0 : slots.stride(0);
  arguments.slot_stride[1] = slots.stride(-1);
}

void launch(Arguments& arguments, const Tensor& query) {
  rotary::Arguments& rotation = arguments.rotation;
  rotation.error = dispatcher::device_error(query.device());
  const int64_t elements = rotation.views[0].heads * rotation.head_dim +
                           rotation.views[1].heads * (rotation.head_dim + arguments.value_dim);
  dispatcher::launch(arguments, query, rotation.batch * rotation.seq,
                     2 * elements * core::size_of(rotation.scalar), rotate_and_cache_cpu,
                     POSEMBED_CUDA_LAUNCHER(rotate_and_cache_cuda));
}

void rotate_and_cache(const Call& call, const rotary::SpecificationPointer& spec) {
  check_memory(call);
  const Dimensions where = rotary::dimensions(call.layout);
  const CacheDimensions cache_where = cache_dimensions(call.cache_layout);
  Arguments arguments;
  const int64_t page_size = call.key_cache.size(cache_where.slots);
  arguments.page_size = std::max<int64_t>(1, page_size);
  arguments.slot_count = call.key_cache.size(0) * page_size;
  const rotary::Rotation rotation = rotation_of(call);
  const rotary::Inputs inputs = rotary::checked_inputs(rotation.call, call.query);
  const Tensor slots = checked_slots(call, arguments.slot_count);
  const Tensor query = dispatcher::with_contiguous_last_dim(call.query);
  const Tensor key = dispatcher::with_contiguous_last_dim(call.key);
  const Tensor value = dispatcher::with_contiguous_last_dim(call.value);
  const Tensor* const rotated_key = call.rotate_key ? &key : nullptr;
  arguments.rotation = rotary::arguments({{&query, &key}, {&call.rotated_query(), rotated_key}, 2},
                                         inputs, rotation, *spec);
  arguments.value = rotary::head_view(value, nullptr, where);
  arguments.value_dim = value.size(-1);
  arguments.key_cache =
      cache_of(call.key_cache, call.cache_layout, call.key_scale, call.key_scale_tensor);
  arguments.value_cache =
      cache_of(call.value_cache, call.cache_layout, call.value_scale, call.value_scale_tensor);
  arguments.float8 = is_float8(call.key_cache);
  set_slots(slots, where, arguments);
  rotary_norm::Parameters parameters;
  rotary_norm::Arguments norm;
  if (call.normed) {
    norm.rotation = arguments.rotation;
    rotary_norm::set_norm(norm_of(call), &parameters, &norm);
    arguments.norm = &norm;
  }
  launch(arguments, query);
}

// ------------------------------------------------------------------------------------------ latent
// Multi-head latent attention: all heads share the key's rotated part, which is cached beside the
// compressed keys and values. DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434. Both operators make
// views and call one operator.

/// A tensor that all heads share, with a dimension of one head; adds it if missing.
Tensor with_heads(const Tensor& tensor, const char* argument, const rotary::Dimensions& where) {
  if (tensor.dim() == where.rank - 1) return tensor.unsqueeze(where.heads);
  dispatcher::check_rank(tensor, argument, where.rank, where.shape);
  dispatcher::check_size(tensor.sym_size(where.heads), 1, argument, "heads");
  return tensor;
}

/// key_rope with a dimension of one head.
Tensor key_of(const Tensor& key_rope, const rotary::Specification& spec,
              const rotary::Dimensions& where) {
  Tensor key = with_heads(key_rope, "key_rope", where);
  dispatcher::check_size(key.sym_size(-1), spec.spec.rotary_dim, "key_rope", "rotary_dim");
  return key;
}

std::tuple<Tensor, Tensor> rotate(const Tensor& query, const Tensor& key_rope,
                                  const LatentRotation& latent) {
  const rotary::Dimensions where = rotary::dimensions(latent.call.layout());
  const rotary::SpecificationPointer spec = rotary::specification(latent.spec);
  const Tensor key = key_of(key_rope, *spec, where);
  const rotary::Rotation rotation{latent.spec, latent.call};
  rotary::check(query, &key, rotation, {"query", "key_rope"});
  dispatcher::check_size(query.sym_size(-1), spec->spec.head_dim, "query", "head_dim");
  auto [rotated_query, rotated_key] = rotary::rotary_pair(query, key, rotation);
  return {rotated_query,
          key_rope.dim() < where.rank ? rotated_key.squeeze(where.heads) : rotated_key};
}

void check_cache(const Tensor& cache, const Tensor& latent, const Tensor& key_rope) {
  dispatcher::check_rank(cache, "cache", 3, "[pages, page_size, latent_dim + rotary_dim]");
  dispatcher::check_size(cache.sym_size(2), latent.sym_size(-1) + key_rope.sym_size(-1), "cache",
                         "latent_dim + rotary_dim");
}

void rotate_and_cache_latent(const LatentCall& latent_call) {
  const rotary::Dimensions where = rotary::dimensions(latent_call.layout);
  const Tensor &latent = latent_call.latent, &key_rope = latent_call.key_rope;
  Call call;
  call.query = latent_call.query;
  call.key = key_of(key_rope.resolve_conj().resolve_neg(), *rotary::specification(latent_call.spec),
                    where);
  call.value = with_heads(latent, "latent", where);
  check_cache(latent_call.cache, latent, key_rope);
  const Tensor one_head = latent_call.cache.unsqueeze(2);
  call.key_cache = one_head.narrow_symint(3, latent.sym_size(-1), key_rope.sym_size(-1));
  call.value_cache = one_head.narrow_symint(3, 0, latent.sym_size(-1));
  call.slot_mapping = latent_call.slot_mapping;
  call.spec = latent_call.spec;
  call.positions = latent_call.positions;
  call.layout = latent_call.layout;
  call.cache_layout = latent_layout;
  call.offset = latent_call.offset;
  call.query_out = latent_call.query_out;
  call.key_scale = call.value_scale = latent_call.scale;
  call.key_scale_tensor = call.value_scale_tensor = latent_call.scale_tensor;
  rotary_cache_(call);
}

// ---------------------------------------------------------------------------------------- gradient
// A cache has no gradient: rotary_cache_ is for inference and throws if a gradient would be lost.
// Which tensors it writes depends on its arguments, so it has a kernel of its own for that.

void rotary_cache_autograd(const Call& call) {
  const auto refuse = [](const Tensor& tensor, const char* name) {
    dispatcher::check_inference_only(tensor, name, "posembed::rotary_pair");
  };
  const Names names = names_of(call);
  refuse(call.query, "query");
  refuse(call.key, names.key);
  refuse(call.value, names.value);
  for_each_written(call, refuse);
  for_each_written(call, dispatcher::check_versioned);
  dispatcher::below_autograd([&] { rotary_cache_(call); });
  for_each_written(
      call, [](const Tensor& tensor, const char*) { torch::autograd::impl::bump_version(tensor); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "rotary_cache_("
         "Tensor(a!) query, "
         "Tensor(b!) key, "
         "Tensor value, "
         "Tensor(c!) key_cache, "
         "Tensor(d!) value_cache, "
         "Tensor slot_mapping, "
         "str spec, "
         "Tensor? positions=None, "
         "str layout=\"thd\", "
         "str cache_layout=\"nhd\", "
         "SymInt offset=0, "
         "Tensor(e!)? query_out=None, "
         "bool rotate_key=False, "
         "float key_scale=1.0, "
         "float value_scale=1.0, "
         "Tensor? key_scale_tensor=None, "
         "Tensor? value_scale_tensor=None, "
         "bool normed=False, "
         "Tensor? query_weight=None, "
         "Tensor? key_weight=None, "
         "float eps=1e-6, "
         "float weight_offset=0.0, "
         "bool centred=False, "
         "bool all_heads=False, "
         "Tensor? query_bias=None, "
         "Tensor? key_bias=None) -> ()");
  define(m,
         "mla_rotary("
         "Tensor query, "
         "Tensor key_rope, "
         "str spec, "
         "Tensor? positions=None, "
         "str layout=\"bshd\", "
         "SymInt offset=0, "
         "bool inverse=False) -> (Tensor, Tensor)");
  define(m,
         "mla_rotary_cache_("
         "Tensor(a!) query, "
         "Tensor latent, "
         "Tensor key_rope, "
         "Tensor(b!) cache, "
         "Tensor slot_mapping, "
         "str spec, "
         "Tensor? positions=None, "
         "str layout=\"thd\", "
         "SymInt offset=0, "
         "Tensor(c!)? query_out=None, "
         "float scale=1.0, "
         "Tensor? scale_tensor=None) -> ()");
  rotary_cache_.implement<check, rotate_and_cache>(m);
  mla_rotary.compose_batched<rotate>(m);
  mla_rotary_cache_.compose<rotate_and_cache_latent>(m);
  rotary_cache_.differentiate<rotary_cache_autograd>(m);
}

}  // namespace posembed::rotary_cache

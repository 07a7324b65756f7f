// Multi-head latent attention: all heads share the key's rotated part, which is cached beside the
// compressed keys and values. DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434. Both operators make
// views and call one operator.
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "rotary/arguments.h"
#include "rotary_cache/operator.h"

namespace posembed::rotary_cache {
namespace {

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  mla_rotary.compose_batched<rotate>(m);
  mla_rotary_cache_.compose<rotate_and_cache_latent>(m);
}

}  // namespace posembed::rotary_cache

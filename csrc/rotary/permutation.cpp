// Converts projection weights to the other pairing.
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "posembed/rotary.h"

namespace posembed {
namespace {

/// The source of each component of a head.
torch::Tensor order_of(const torch::Tensor& weight, int64_t head_dim, Pairing to, int64_t start,
                       int64_t width) {
  const torch::Tensor order = at::arange(head_dim, weight.options().dtype(at::kLong));
  const torch::Tensor window = order.narrow(0, start, width);
  const bool interleaved = to == Pairing::interleaved;
  const torch::Tensor pairs =
      interleaved ? window.view({2, width / 2}) : window.view({width / 2, 2});
  window.copy_(pairs.t().flatten().clone());
  return order;
}

/// The heads to permute: those given, or all.
std::vector<int64_t> chosen(const PermuteOptions& options, int64_t num_heads) {
  std::vector<int64_t> heads(static_cast<size_t>(num_heads));
  std::iota(heads.begin(), heads.end(), 0);
  if (options.heads.has_value()) heads = *options.heads;
  std::sort(heads.begin(), heads.end());
  for (size_t i = 0; i < heads.size(); ++i) {
    TORCH_CHECK_VALUE(heads[i] >= 0 && heads[i] < num_heads, "heads: expected 0 to ", num_heads - 1,
                      ", got ", heads[i]);
    TORCH_CHECK_VALUE(i == 0 || heads[i] != heads[i - 1], "heads: expected each once, got ",
                      heads[i], " again");
  }
  return heads;
}

}  // namespace

torch::Tensor permute_rotary_weight(const torch::Tensor& weight, int64_t num_heads, Pairing to,
                                    const PermuteOptions& options) {
  TORCH_CHECK_VALUE(num_heads > 0 && weight.dim() > 0 && weight.size(0) % num_heads == 0,
                    "num_heads: expected a divisor of the weight's rows, ", weight.sizes(),
                    ", got ", num_heads);
  const int64_t head_dim = weight.size(0) / num_heads;
  const int64_t start = options.rotary_start;
  const int64_t width = options.rotary_dim.value_or(head_dim);
  TORCH_CHECK_VALUE(width >= 0 && width % 2 == 0 && start >= 0 && start <= head_dim - width,
                    "rotary_dim: expected an even number of components from ", start,
                    " on within head_dim, ", head_dim, ", got ", width);
  const torch::Tensor order = order_of(weight, head_dim, to, start, width);
  torch::Tensor result = weight.detach().clone(at::MemoryFormat::Contiguous);
  for (const int64_t head : chosen(options, num_heads)) {
    const torch::Tensor rows = result.narrow(0, head * head_dim, head_dim);
    rows.copy_(rows.index_select(0, order));
  }
  return result;
}

namespace rotary {
namespace {

torch::Tensor permute_weight(const torch::Tensor& weight, int64_t num_heads, bool interleaved,
                             std::optional<int64_t> rotary_dim, int64_t rotary_start,
                             at::OptionalIntArrayRef heads) {
  PermuteOptions options{rotary_dim, rotary_start};
  if (heads.has_value()) options.heads = heads->vec();
  const Pairing to = interleaved ? Pairing::interleaved : Pairing::half_split;
  return permute_rotary_weight(weight, num_heads, to, options);
}

}  // namespace

// Composite, so that autograd, compilers and backends see the operators inside.
TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) {
  m.impl("rotary_permute_weight", permute_weight);
}

}  // namespace rotary
}  // namespace posembed

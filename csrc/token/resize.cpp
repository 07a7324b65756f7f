// Grows or shrinks a vocabulary. Remaining rows keep their bits; new rows start near the old ones,
// so that logits hardly change (Hewitt, "Initializing New Word Embeddings for Pretrained Language
// Models", 2021).
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/brief.h"
#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"
#include "token/operator.h"

namespace posembed::token {
namespace {

using Generator = std::optional<at::Generator>;

/// The mean row in float32 or wider: [1, embedding_dim].
Tensor mean_of(const Tensor& weight) {
  return at::mean(weight, {0}, /*keepdim=*/true, dispatcher::compute_type(weight));
}

/// Draws from N(mean, scale * covariance) of the rows of `weight`. A combination of the centred
/// rows with normal factors has this distribution. It needs no factorisation, which a singular
/// covariance may not have.
Tensor like_rows(const Tensor& weight, int64_t count, double scale, const Generator& generator) {
  constexpr int64_t at_a_time = 256;  // new rows: their factors need memory for all old rows
  const Tensor mean = mean_of(weight);
  const Tensor centred = at::sub(weight.to(mean.scalar_type()), mean);
  const int64_t rows = weight.size(0);
  std::vector<Tensor> parts;
  for (int64_t done = 0; done < count; done += at_a_time) {
    const int64_t part = std::min(at_a_time, count - done);
    const Tensor factors = at::randn({part, rows}, generator, centred.options());
    parts.push_back(at::addmm(mean, factors, centred, 1, std::sqrt(scale / rows)));
  }
  return at::cat(parts);
}

Tensor new_rows(const Tensor& weight, int64_t count, Text initialization, double covariance_scale,
                const Generator& generator) {
  if (initialization == "normal") {
    return at::empty({count, weight.size(1)}, weight.options()).normal_(0, 1, generator);
  }
  TORCH_CHECK_VALUE(weight.size(0) > 0, "weight: expected rows to take the mean of, got none");
  if (initialization == "mean") return mean_of(weight).expand({count, -1});
  return like_rows(weight, count, covariance_scale, generator);
}

void check(const Tensor& weight, int64_t num_embeddings, const std::optional<Tensor>& rows,
           Text initialization, double covariance_scale) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  TORCH_CHECK_VALUE(num_embeddings >= 0, "num_embeddings: expected 0 or more, got ",
                    num_embeddings);
  dispatcher::check_result({num_embeddings, weight.size(1)}, weight.scalar_type(),
                           "num_embeddings");
  TORCH_CHECK_VALUE(
      initialization == "mean" || initialization == "mean-and-covariance" ||
          initialization == "normal",
      "initialization: expected 'mean', 'mean-and-covariance', 'normal' or new rows, ", "got '",
      core::brief(initialization), "'");
  TORCH_CHECK_VALUE(covariance_scale >= 0, "covariance_scale: expected 0 or more, got ",
                    covariance_scale);
  if (!rows.has_value()) return;
  const c10::DimVector expected = {std::max<int64_t>(0, num_embeddings - weight.size(0)),
                                   weight.size(1)};
  TORCH_CHECK_VALUE(rows->sizes() == expected, "initialization: expected new rows of shape ",
                    at::IntArrayRef(expected), ", got ", rows->sizes());
}

Tensor resize(const Tensor& weight, int64_t num_embeddings, const std::optional<Tensor>& rows,
              Text initialization, double covariance_scale, Generator generator) {
  check(weight, num_embeddings, rows, initialization, covariance_scale);
  const int64_t added = num_embeddings - weight.size(0);
  if (added <= 0) return weight.narrow(0, 0, num_embeddings).clone(at::MemoryFormat::Contiguous);
  const Tensor new_part =
      rows.has_value() ? *rows
                       : new_rows(weight, added, initialization, covariance_scale, generator);
  return at::cat({weight, new_part.to(weight.options())});
}

}  // namespace

// Without the rule for devices: new rows may come from another one.
TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) { m.impl("embedding_resize", resize); }

}  // namespace posembed::token

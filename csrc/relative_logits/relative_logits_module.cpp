// RelativeLogits and the functional interface: thin wrappers around the operators.
#include <torch/nn/init.h>

#include <numeric>
#include <ostream>

#include "posembed/relative_logits.h"
#include "relative_logits/relative_logits_operator.h"

namespace posembed {

namespace relative_logits {
namespace {

Pairs pairs_of(const RelativeLogitsOptions& options, const ALiBiCall& call) {
  TORCH_CHECK_VALUE(!call.causal().contradicts(options.causal()), "causal: expected that of the ",
                    "options, ", options.causal() ? "true" : "false");
  Pairs pairs{{options.max_distance(), options.bidirectional(), options.buckets()}, call};
  pairs.call.causal(options.causal());
  return pairs;
}

int64_t rows_of_table(const RelativeLogitsOptions& options) {
  const std::vector<int64_t>& counts = options.num_buckets();
  const bool grid = options.buckets() == RelativeBuckets::grid;
  return std::accumulate(counts.begin(), counts.end(), int64_t{grid},
                         [grid](int64_t a, int64_t b) { return grid ? a * b : a + b; });
}

}  // namespace
}  // namespace relative_logits

torch::Tensor functional::relative_rows(const torch::Tensor& like, int64_t query_length,
                                        int64_t key_length, const RelativeLogitsOptions& options,
                                        const ALiBiCall& call) {
  return relative_logits::relative_rows(like, query_length, key_length, options.num_buckets(),
                                        relative_logits::pairs_of(options, call));
}

torch::Tensor functional::relative_logits(const torch::Tensor& query, const torch::Tensor& table,
                                          const torch::Tensor& rows, double scale, bool by_key,
                                          const std::optional<torch::Tensor>& scores) {
  return relative_logits::relative_logits({query, table, rows, scale, by_key}, scores);
}

torch::Tensor functional::relative_logits_(const torch::Tensor& scores, const torch::Tensor& query,
                                           const torch::Tensor& table, const torch::Tensor& rows,
                                           double scale, bool by_key) {
  relative_logits::relative_logits_(scores, {query, table, rows, scale, by_key});
  return scores;
}

RelativeLogitsImpl::RelativeLogitsImpl(const RelativeLogitsOptions& options) : options(options) {
  RelativeLogitsImpl::reset();
}

void RelativeLogitsImpl::reset() {
  TORCH_CHECK_VALUE(!options.num_buckets().empty(),
                    "num_buckets: expected a number for each axis, got none");
  dispatcher::check_at_least(options.head_dim(), 1, "head_dim");
  dispatcher::check_at_least(options.num_heads(), 0, "num_heads");
  for (const int64_t count : options.num_buckets()) {  // checks the options
    relative_bias::relative_buckets(
        torch::zeros({0}, torch::kLong), count,
        {options.max_distance(), options.bidirectional(), options.buckets()});
  }
  std::vector<int64_t> sizes{relative_logits::rows_of_table(options), options.head_dim()};
  if (options.num_heads() > 0) sizes.insert(sizes.begin(), options.num_heads());
  weight = register_parameter("weight", torch::empty(sizes));
  reset_parameters();
}

void RelativeLogitsImpl::reset_parameters() { torch::nn::init::normal_(weight, 0.0, 0.02); }

void RelativeLogitsImpl::pretty_print(std::ostream& stream) const {
  const std::vector<int64_t>& counts = options.num_buckets();
  stream << "RelativeLogits(";
  if (counts.size() == 1) {
    stream << counts[0];
  } else {
    for (size_t i = 0; i < counts.size(); ++i) stream << (i == 0 ? "(" : ", ") << counts[i];
    stream << ")";
  }
  stream << ", " << options.head_dim();
  if (options.num_heads() > 0) stream << ", num_heads=" << options.num_heads();
  if (options.buckets() != RelativeBuckets::clipped) {
    stream << ", buckets='" << posembed::name(options.buckets()) << "'";
  }
  if (options.buckets() == RelativeBuckets::t5 || options.buckets() == RelativeBuckets::deberta) {
    stream << ", max_distance=" << options.max_distance();
  }
  if (!options.bidirectional()) stream << ", bidirectional=False";
  if (options.causal()) stream << ", causal=True";
  if (options.by_key()) stream << ", by='key'";
  if (options.scale() != 1.0) stream << ", scale=" << options.scale();
  stream << ")";
}

torch::Tensor RelativeLogitsImpl::rows(int64_t query_length, int64_t key_length,
                                       const ALiBiCall& call) const {
  TORCH_CHECK_VALUE(!call.positions_from_mask().contradicts(true),
                    "positions_from_mask: expected true for a module");
  return functional::relative_rows(weight, query_length, key_length, options,
                                   ALiBiCall(call).positions_from_mask(true));
}

torch::Tensor RelativeLogitsImpl::forward(const torch::Tensor& query,
                                          std::optional<int64_t> other_length,
                                          const ALiBiCall& call,
                                          const std::optional<torch::Tensor>& scores) {
  TORCH_CHECK_VALUE(query.dim() == 4, "query: expected [batch, heads, queries, dim], got ",
                    query.sizes());
  const bool has_lengths = scores.has_value() && scores->dim() == 4;
  const int64_t own = query.size(2);
  const int64_t other =
      other_length.value_or(has_lengths ? scores->size(options.by_key() ? 2 : 3) : own);
  const torch::Tensor all = options.by_key() ? rows(other, own, call) : rows(own, other, call);
  return functional::relative_logits(query, weight, all, options.scale(), options.by_key(), scores);
}

torch::Tensor RelativeLogitsImpl::add_(const torch::Tensor& scores, const torch::Tensor& query,
                                       const ALiBiCall& call) {
  TORCH_CHECK_VALUE(scores.dim() == 4, "scores: expected [batch, heads, queries, keys], got ",
                    scores.sizes());
  return functional::relative_logits_(scores, query, weight,
                                      rows(scores.size(2), scores.size(3), call), options.scale(),
                                      options.by_key());
}

}  // namespace posembed

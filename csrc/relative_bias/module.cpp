// RelativePositionBias and the functional interface: thin wrappers around the operators.
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <ostream>

#include "posembed/relative_bias.h"
#include "relative_bias/operator.h"

namespace posembed {

const char* name(RelativeBuckets buckets) { return buckets == RelativeBuckets::t5 ? "t5" : "bert"; }

namespace relative_bias {
namespace {

Bucketing bucketing_of(const RelativeBiasOptions& options) {
  return {options.max_distance(), options.bidirectional(), options.buckets()};
}

}  // namespace
}  // namespace relative_bias

torch::Tensor functional::relative_buckets(const torch::Tensor& distances,
                                           const RelativeBiasOptions& options) {
  return relative_bias::relative_buckets(distances, options.num_buckets(),
                                         relative_bias::bucketing_of(options));
}

torch::Tensor functional::relative_bias(const torch::Tensor& weight, int64_t query_length,
                                        int64_t key_length, const RelativeBiasOptions& options,
                                        std::optional<int64_t> query_offset) {
  relative_bias::MaybeOffset offset;
  if (query_offset.has_value()) offset = *query_offset;
  return relative_bias::relative_bias(weight, query_length, key_length, offset,
                                      relative_bias::bucketing_of(options));
}

RelativePositionBiasImpl::RelativePositionBiasImpl(const RelativeBiasOptions& options)
    : options(options) {
  RelativePositionBiasImpl::reset();
}

void RelativePositionBiasImpl::reset() {
  TORCH_CHECK_VALUE(options.num_heads() >= 0, "num_heads: expected 0 or more, got ",
                    options.num_heads());
  functional::relative_buckets(torch::zeros({0}, torch::kLong), options);  // checks the options
  weight = register_parameter("weight", torch::empty({options.num_buckets(), options.num_heads()}));
  reset_parameters();
}

void RelativePositionBiasImpl::reset_parameters() { torch::nn::init::normal_(weight, 0.0, 0.02); }

void RelativePositionBiasImpl::pretty_print(std::ostream& stream) const {
  stream << "RelativePositionBias(" << options.num_heads()
         << ", num_buckets=" << options.num_buckets()
         << ", max_distance=" << options.max_distance();
  if (!options.bidirectional()) stream << ", bidirectional=False";
  if (options.buckets() != RelativeBuckets::t5) {
    stream << ", buckets='" << posembed::name(options.buckets()) << "'";
  }
  stream << ")";
}

torch::Tensor RelativePositionBiasImpl::forward(int64_t query_length,
                                                std::optional<int64_t> key_length,
                                                std::optional<int64_t> query_offset) {
  return functional::relative_bias(weight, query_length, key_length.value_or(query_length), options,
                                   query_offset);
}

}  // namespace posembed

// RelativePositionBias and the functional interface: thin wrappers around the operators.
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <limits>
#include <ostream>

#include "learned/learned_operator.h"
#include "posembed/relative_bias.h"
#include "relative_bias/relative_bias_operator.h"
#include "relative_logits/relative_logits.h"
#include "relative_logits/relative_logits_operator.h"
#include "token/token_operator.h"

namespace posembed {

const char* name(RelativeBuckets buckets) { return dispatcher::name_of(buckets); }

const char* name(RelativeMlp rule) { return dispatcher::name_of(rule); }

namespace relative_bias {
namespace {

Bucketing bucketing_of(const RelativeBiasOptions& options) {
  return {options.max_distance(), options.bidirectional(), options.buckets()};
}

using Window = std::vector<int64_t>;

void check_sizes(const Window& window, const char* name, size_t most_axes = 2) {
  check_window(c10::fromIntArrayRefSlow(window), name, most_axes);
}

void check_window_options(const RelativeBiasOptions& options) {
  TORCH_CHECK_VALUE(options.mlp_rule() == RelativeMlp::swin ||
                        (options.mlp_dim() > 0 && options.pretrained_window().empty()),
                    "mlp_rule: expected 'swin' without mlp_dim or with pretrained_window");
  if (options.window().empty()) {
    TORCH_CHECK_VALUE(
        !options.class_token() && options.mlp_dim() == 0 && options.pretrained_window().empty(),
        "window: expected one beside class_token, mlp_dim or pretrained_window");
    functional::relative_buckets(torch::zeros({0}, torch::kLong), options);  // checks the options
    return;
  }
  check_sizes(options.window(), "window", options.mlp_dim() == 0 ? 3 : 2);
  learned::check_resampling(options.resampling());
  dispatcher::check_at_least(options.mlp_dim(), 0, "mlp_dim");
  TORCH_CHECK_VALUE(options.mlp_dim() == 0 || !options.class_token(),
                    "class_token: expected False beside mlp_dim");
  if (options.pretrained_window().empty()) return;
  check_sizes(options.pretrained_window(), "pretrained_window");
  TORCH_CHECK_VALUE(options.mlp_dim() > 0, "pretrained_window: expected none without mlp_dim, got ",
                    options.pretrained_window());
}

int64_t rows_of_table(const RelativeBiasOptions& options) {
  int64_t rows = 1;
  for (const int64_t size : options.window()) rows *= 2 * size - 1;
  return rows + (options.class_token() ? 3 : 0);
}

void print_window(const RelativeBiasOptions& options, std::ostream& stream) {
  const auto print = [&](const char* name, const Window& window) {
    stream << ", " << name << "=(" << window[0];
    for (size_t i = 1; i < window.size(); ++i) stream << ", " << window[i];
    stream << ")";
  };
  stream << "RelativePositionBias(" << options.num_heads();
  print("window", options.window());
  if (options.class_token()) stream << ", class_token=True";
  if (options.mlp_dim() > 0) stream << ", mlp_dim=" << options.mlp_dim();
  if (options.mlp_rule() == RelativeMlp::cr) stream << ", mlp_rule='cr'";
  if (!options.pretrained_window().empty()) print("pretrained_window", options.pretrained_window());
  learned::print_resampling(options.resampling(), "bilinear", stream);
  stream << ")";
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

torch::Tensor functional::relative_window_bias(const torch::Tensor& weight,
                                               const std::vector<int64_t>& window,
                                               bool class_token) {
  return relative_bias::relative_window_bias(weight, c10::fromIntArrayRefSlow(window), class_token);
}

torch::Tensor functional::relative_window_resample(const torch::Tensor& weight,
                                                   const std::vector<int64_t>& window,
                                                   const std::vector<int64_t>& new_window,
                                                   const Resampling& how) {
  return relative_bias::relative_window_resample(weight, c10::fromIntArrayRefSlow(window),
                                                 c10::fromIntArrayRefSlow(new_window), {how});
}

void RelativePositionBiasImpl::reset() {
  dispatcher::check_at_least(options.num_heads(), 0, "num_heads");
  relative_bias::check_window_options(options);
  if (options.mlp_dim() > 0) {
    mlp = register_module(
        "mlp",
        torch::nn::Sequential(
            torch::nn::Linear(2, options.mlp_dim()), torch::nn::ReLU(),
            torch::nn::Linear(torch::nn::LinearOptions(options.mlp_dim(), options.num_heads())
                                  .bias(options.mlp_rule() == RelativeMlp::cr))));
  } else {
    if (!options.window().empty()) options.num_buckets(relative_bias::rows_of_table(options));
    weight =
        register_parameter("weight", torch::empty({options.num_buckets(), options.num_heads()}));
  }
  reset_parameters();
}

void RelativePositionBiasImpl::reset_parameters() {
  for (torch::Tensor& parameter : parameters()) {
    if (parameter.dim() == 1) {
      torch::nn::init::zeros_(parameter);
    } else {
      torch::nn::init::normal_(parameter, 0.0, 0.02);
    }
  }
}

void RelativePositionBiasImpl::pretty_print(std::ostream& stream) const {
  if (!options.window().empty()) return relative_bias::print_window(options, stream);
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
  TORCH_CHECK_VALUE(options.window().empty(),
                    "query_length: expected of_window(), because the bias has a window");
  return functional::relative_bias(weight, query_length, key_length.value_or(query_length), options,
                                   query_offset);
}

torch::Tensor RelativePositionBiasImpl::of_positions(int64_t query_length,
                                                     std::optional<int64_t> key_length,
                                                     const ALiBiCall& call) {
  TORCH_CHECK_VALUE(options.window().empty(),
                    "query_length: expected of_window(), because the bias has a window");
  relative_logits::Pairs pairs{relative_bias::bucketing_of(options), call};
  if (!call.causal().by_caller()) pairs.call.causal(false);
  if (!call.positions_from_mask().by_caller()) pairs.call.positions_from_mask(true);
  const torch::Tensor rows = relative_logits::relative_rows(
      weight, query_length, key_length.value_or(query_length), {options.num_buckets()}, pairs);
  const torch::Tensor bias = token::look_up(weight, {rows.clamp_min(0)}).movedim(-1, -3);
  return bias.masked_fill(rows.eq(relative_logits::no_row).unsqueeze(-3), 0)
      .masked_fill(rows.eq(relative_logits::hidden_row).unsqueeze(-3),
                   -std::numeric_limits<double>::infinity());
}

torch::Tensor RelativePositionBiasImpl::table(const std::vector<int64_t>& window) {
  const std::vector<int64_t>& own = options.window();
  TORCH_CHECK_VALUE(!own.empty(), "window: expected a bias with a window, got one by distances");
  const std::vector<int64_t>& wanted = window.empty() ? own : window;
  if (mlp) {
    const bool plain = options.mlp_rule() == RelativeMlp::cr;
    const auto& scale =
        options.pretrained_window().empty() && !plain ? wanted : options.pretrained_window();
    const torch::Tensor distances = relative_bias::relative_log_distances(
        mlp->parameters()[0], c10::fromIntArrayRefSlow(wanted), c10::fromIntArrayRefSlow(scale));
    if (plain) return mlp->forward(distances);
    return 16 * torch::sigmoid(mlp->forward(distances));
  }
  if (wanted == own) return weight;
  return functional::relative_window_resample(weight, own, wanted, options.resampling());
}

torch::Tensor RelativePositionBiasImpl::of_window(const std::vector<int64_t>& window) {
  return functional::relative_window_bias(table(window), window.empty() ? options.window() : window,
                                          options.class_token());
}

void RelativePositionBiasImpl::extend(const std::vector<int64_t>& window) {
  relative_bias::check_sizes(window, "window");
  if (!mlp) {
    const torch::NoGradGuard no_grad;
    weight.set_data(table(window));
    weight.mutable_grad() = torch::Tensor();
    options.num_buckets(weight.size(0));
  }
  options.window(window);
}

}  // namespace posembed

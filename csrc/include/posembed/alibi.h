/// ALiBi: attention with linear biases. Every head subtracts a slope of its own times the distance
/// between query and key from its scores; no position embedding is added anywhere.
/// Press, Smith, Lewis, "Train Short, Test Long", arXiv:2108.12409.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "posembed/export.h"

namespace posembed {

/// Which series the slopes of the heads are.
enum class Slopes {
  press,  ///< the paper's; head counts that are no power of two take every second slope of the next
  geometric,  ///< one ratio for every head count
};

/// "press" or "geometric".
POSEMBED_API const char* name(Slopes slopes);

namespace functional {

/// How the bias of a block of scores is made.
struct AlibiCall {
  std::optional<int64_t>
      query_offset;         ///< position of the first query; none: last query at last key
  bool causal = true;       ///< -slope (i - j); otherwise -slope |i - j|
  bool hide_future = true;  ///< causal: keys after the query get -infinity, otherwise 0
};

/// Slopes of heads head_start … head_start + num_heads - 1 of a model with total_heads heads
/// (default: num_heads): float32 [num_heads].
/// @throws c10::ValueError no heads, or heads outside total_heads
POSEMBED_API torch::Tensor alibi_slopes(int64_t num_heads, Slopes kind = Slopes::press,
                                        double max_bias = 8.0,
                                        std::optional<int64_t> total_heads = std::nullopt,
                                        int64_t head_start = 0,
                                        std::optional<torch::Device> device = std::nullopt);

/// The bias [heads, query_length, key_length] that SDPA takes as attn_mask; gradients flow to
/// slopes.
/// @param slopes  floating [heads]; [2, heads]: for keys left and right of the query
/// @param dtype  of the result; default: of slopes
/// @throws c10::ValueError shapes and lengths; c10::TypeError dtypes
POSEMBED_API torch::Tensor alibi_bias(const torch::Tensor& slopes, int64_t query_length,
                                      int64_t key_length, const AlibiCall& call = {},
                                      std::optional<torch::Dtype> dtype = std::nullopt);

/// scores + bias in one pass; gradients flow to both.
/// @param scores  floating [batch, heads, query, key] or [heads, query, key]
POSEMBED_API torch::Tensor alibi_add(const torch::Tensor& scores, const torch::Tensor& slopes,
                                     const AlibiCall& call = {});

/// The same in place, for inference: raises where a gradient would be lost.
POSEMBED_API void alibi_add_(const torch::Tensor& scores, const torch::Tensor& slopes,
                             const AlibiCall& call = {});

}  // namespace functional

/// Options of ALiBi.
struct POSEMBED_API ALiBiOptions {
  using SlopesOption = std::variant<Slopes, torch::Tensor>;

  /* implicit */ ALiBiOptions(int64_t num_heads);

  /// Heads of this module.
  TORCH_ARG(int64_t, num_heads);
  /// A series, or the slopes themselves: [total_heads]; [2, total_heads]: left and right of the
  /// query.
  TORCH_ARG(SlopesOption, slopes) = Slopes::press;
  /// The last of a power of two of heads has slope 2^-max_bias.
  TORCH_ARG(double, max_bias) = 8.0;
  /// -slope (i - j), keys after the query hidden; otherwise -slope |i - j|.
  TORCH_ARG(bool, causal) = true;
  /// Heads of the whole model, where this module has a part of them; default: num_heads.
  TORCH_ARG(std::optional<int64_t>, total_heads) = std::nullopt;
  /// The first head of this module among them.
  TORCH_ARG(int64_t, head_start) = 0;
  /// Slopes are a parameter.
  TORCH_ARG(bool, learned) = false;
};

/// Biases of attention scores. Unless learned, slopes come from the options each time: there is no
/// tensor to cast or save.
///
///     posembed::ALiBi alibi(posembed::ALiBiOptions(8));
///     auto y = at::scaled_dot_product_attention(q, k, v, alibi->forward(q.size(2)));
class POSEMBED_API ALiBiImpl : public torch::nn::Cloneable<ALiBiImpl> {
 public:
  explicit ALiBiImpl(int64_t num_heads) : ALiBiImpl(ALiBiOptions(num_heads)) {}
  explicit ALiBiImpl(const ALiBiOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Slopes follow the module to devices, and to dtypes where they are learned.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// float32 [num_heads] or [2, num_heads]; the parameter where they are learned.
  torch::Tensor slopes() const;

  /// The bias [num_heads, query_length, key_length]; key_length: default query_length.
  /// dtype: default that of the module. See functional::alibi_bias.
  torch::Tensor forward(int64_t query_length, std::optional<int64_t> key_length = std::nullopt,
                        std::optional<int64_t> query_offset = std::nullopt,
                        std::optional<torch::Dtype> dtype = std::nullopt);

  /// Adds the bias to scores [batch, num_heads, query, key] in place, for inference.
  void add_(const torch::Tensor& scores, std::optional<int64_t> query_offset = std::nullopt);

  /// softmax(query key^T scale + bias) value; query [batch, num_heads, seq, head_dim], key and
  /// value with num_heads or a divisor of it; scale: default 1 / sqrt(head_dim).
  torch::Tensor attention(const torch::Tensor& query, const torch::Tensor& key,
                          const torch::Tensor& value,
                          std::optional<int64_t> query_offset = std::nullopt,
                          std::optional<double> scale = std::nullopt);

  /// Read at construction and by reset().
  ALiBiOptions options;

 private:
  torch::Tensor derived_slopes() const;

  torch::Tensor parameter_;  // defined where slopes are learned
  torch::TensorOptions like_ = torch::TensorOptions(torch::kFloat).device(torch::kCPU);
};

TORCH_MODULE(ALiBi);

}  // namespace posembed

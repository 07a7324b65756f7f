/// ALiBi: attention with linear biases. Each head subtracts its own slope times the distance
/// between query and key from the attention scores; no position embedding is added anywhere. Press,
/// Smith, Lewis, "Train Short, Test Long", arXiv:2108.12409.
#pragma once

#include <c10/core/SymInt.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "posembed/export.h"
#include "posembed/given.h"

namespace posembed {

/// The series that the heads' slopes follow.
enum class Slopes {
  /// The paper's series: for n = 2^k heads, head h has slope 2^(-max_bias (h + 1) / n). Other head
  /// counts take the series of the next lower power of two, then every second slope of the next
  /// higher one.
  paper,
  geometric,  ///< 2^(-max_bias (h + 1) / n) for any number n of heads
};

/// "paper" or "geometric".
POSEMBED_API const char* name(Slopes slopes);

/// Options of a call of ALiBi: which keys a query sees, and the positions of both.
///
///     alibi->softmax_(scores, posembed::ALiBiCall().scale(0.125).attention_mask(mask));
struct POSEMBED_API ALiBiCall {
  /// Multiplies the scores, not the bias; default: 1, in attention 1 / sqrt(head_dim). Functions
  /// without scores refuse it.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// true: bias -slope (i - j), and keys after the query are hidden. false: bias -slope |i - j|. A
  /// module has its own and refuses the other one.
  TORCH_ARG(Given<bool>, causal) = Given<bool>::default_to(true);
  /// Position of the first query; default: the last query is at the last key.
  TORCH_ARG(std::optional<c10::SymInt>, query_offset) = std::nullopt;
  /// int32 or int64 [batch]: the position of each sample's first query, without query_offset and
  /// cu_seqlens, for caches of different lengths.
  TORCH_ARG(std::optional<torch::Tensor>, query_offsets) = std::nullopt;
  /// [key] or [batch, key], bool or integers: keys with 0 are hidden.
  TORCH_ARG(std::optional<torch::Tensor>, attention_mask) = std::nullopt;
  /// With attention_mask and without positions, only visible keys are numbered, as in Bloom; see
  /// functional::alibi_positions. Otherwise all keys are. A module always does so, and refuses
  /// false.
  TORCH_ARG(Given<bool>, positions_from_mask) = Given<bool>::default_to(false);
  /// int32 or int64 [query] or [batch, query].
  TORCH_ARG(std::optional<torch::Tensor>, query_positions) = std::nullopt;
  /// int32 or int64 [key] or [batch, key].
  TORCH_ARG(std::optional<torch::Tensor>, key_positions) = std::nullopt;
  /// Packed documents, int32 or int64 [documents + 1]: keys of other documents are hidden.
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  /// Hidden keys get -infinity for any score; otherwise nothing is added to their scores.
  TORCH_ARG(bool, apply_mask) = true;
  /// Floating [batch, heads], or [batch, 2, heads] for keys left and right of the query: slopes of
  /// each sample in place of the others, as they are. Gradients flow to them.
  TORCH_ARG(std::optional<torch::Tensor>, sample_slopes) = std::nullopt;
};

namespace functional {

/// The slopes of heads head_start … head_start + num_heads - 1 of a model with total_heads heads
/// (default: num_heads): float32 [num_heads]. If equal shards do not divide the heads, the last
/// one is padded with slopes of 0.
/// @throws c10::ValueError no heads, or heads outside total_heads
POSEMBED_API torch::Tensor alibi_slopes(int64_t num_heads, Slopes kind = Slopes::paper,
                                        double max_bias = 8.0,
                                        std::optional<int64_t> total_heads = std::nullopt,
                                        int64_t head_start = 0,
                                        std::optional<torch::Device> device = std::nullopt);

/// The slopes of JAIS and BTLM: divided by key_length / train_length if key_length exceeds
/// train_length; otherwise `slopes` itself.
/// @throws c10::ValueError a train_length of 0 or less
POSEMBED_API torch::Tensor alibi_scaled_slopes(const torch::Tensor& slopes, int64_t key_length,
                                               int64_t train_length);

/// Positions as Bloom counts them: visible keys are numbered from 0, and padding, on either side or
/// in between, gets 0. int64, in the shape of attention_mask: [key_length] or [batch, key_length].
POSEMBED_API torch::Tensor alibi_positions(const torch::Tensor& attention_mask);

/// The bias [heads, query_length, key_length] that SDPA takes as attn_mask, with a batch in front
/// where positions or mask have one; gradients flow to slopes.
/// @param slopes  floating [heads]; without causal also [2, heads] for keys left and right of the
///     query; or [batch, 1 or 2, heads], those of each sample. ALiBiCall::sample_slopes precede
///     them
/// @param dtype  of the result; default: of slopes
/// @throws c10::ValueError shapes and lengths; c10::TypeError dtypes; c10::IndexError positions
POSEMBED_API torch::Tensor alibi_bias(const torch::Tensor& slopes, int64_t query_length,
                                      int64_t key_length, const ALiBiCall& call = {},
                                      std::optional<torch::Dtype> dtype = std::nullopt);

/// alibi_bias() into existing memory; returns `out`. For inference: raises if a gradient would be
/// lost.
/// @param out  in the shape of the result, any strides with a contiguous last dimension
POSEMBED_API torch::Tensor alibi_bias_out(const torch::Tensor& out, const torch::Tensor& slopes,
                                          const ALiBiCall& call = {});

/// scores * scale + bias in one pass; gradients flow to both.
/// @param scores  floating [batch, heads, query, key] or [heads, query, key]
POSEMBED_API torch::Tensor alibi_add(const torch::Tensor& scores, const torch::Tensor& slopes,
                                     const ALiBiCall& call = {});

/// alibi_add() in place; returns `scores`. For inference: raises if a gradient would be lost.
POSEMBED_API torch::Tensor alibi_add_(const torch::Tensor& scores, const torch::Tensor& slopes,
                                      const ALiBiCall& call = {});

/// Attention weights: softmax(scores * scale + bias) over keys, in one pass over the scores;
/// gradients flow to both. A query that sees no key has weights 0.
POSEMBED_API torch::Tensor alibi_softmax(const torch::Tensor& scores, const torch::Tensor& slopes,
                                         const ALiBiCall& call = {});

/// alibi_softmax() in place; returns `scores`. For inference: raises if a gradient would be lost.
POSEMBED_API torch::Tensor alibi_softmax_(const torch::Tensor& scores, const torch::Tensor& slopes,
                                          const ALiBiCall& call = {});

/// softmax(query key^T scale + bias) value; gradients flow to all of them.
/// @param query  [batch, num_heads, seq, head_dim]
/// @param key  [batch, heads, keys, head_dim], heads being num_heads or a divisor of it
/// @param value  [batch, heads, keys, value_dim]
/// @param slopes  floating [num_heads] or [2, num_heads]
/// @param dropout  probability with which weights are zeroed
/// @throws c10::ValueError shapes and dropout; c10::TypeError dtypes, outside autocast
POSEMBED_API torch::Tensor alibi_attention(const torch::Tensor& query, const torch::Tensor& key,
                                           const torch::Tensor& value, const torch::Tensor& slopes,
                                           const ALiBiCall& call = {}, double dropout = 0.0);

/// For ring and blocked attention, which merges blocks of keys by their log-sum-exp. If a kernel
/// computes biases from query index i and key index j within its block, each query's log-sum-exp is
/// off by a constant. Returns those constants, [heads, query_length]; add them before merging the
/// blocks.
/// @param query_start  position of the block's first query
/// @param key_start  position of the block's first key
/// @param form  what the kernel added to the scores: "distance": slope (j - i); "key": slope j
/// @throws c10::ValueError an unknown form
POSEMBED_API torch::Tensor alibi_lse_correction(const torch::Tensor& slopes, int64_t query_length,
                                                int64_t query_start, int64_t key_start,
                                                const std::string& form = "distance",
                                                bool causal = true);

}  // namespace functional

/// Options of ALiBi.
struct POSEMBED_API ALiBiOptions {
  using SlopesOption = std::variant<Slopes, torch::Tensor>;

  /* implicit */ ALiBiOptions(int64_t num_heads);

  /// The options that a family of models was trained with: "bloom", "mpt", "falcon", "baichuan",
  /// "jais", "btlm", "refact", "mosaicbert", "jina". The result covers the whole model; for a
  /// shard, set its num_heads, total_heads and head_start.
  /// @param head_dim  needed for falcon, which adds the bias before scaling by 1 / sqrt(head_dim)
  /// @throws c10::ValueError an unknown name, or falcon without head_dim
  static ALiBiOptions preset(const std::string& name, int64_t total_heads,
                             std::optional<int64_t> head_dim = std::nullopt);

  /// Heads of this module.
  TORCH_ARG(int64_t, num_heads);
  /// The name of a series, or the slopes themselves: [total_heads], or [2, total_heads] for keys
  /// left and right of the query if `causal` is false. Those of each sample are an option of calls.
  TORCH_ARG(SlopesOption, slopes) = Slopes::paper;
  /// With 2^k heads, the last one has slope 2^-max_bias.
  TORCH_ARG(double, max_bias) = 8.0;
  /// true: bias -slope (i - j), and keys after the query are hidden. false: bias -slope |i - j|.
  TORCH_ARG(bool, causal) = true;
  /// Heads of the whole model, if this module has only some of them; default: num_heads.
  TORCH_ARG(std::optional<int64_t>, total_heads) = std::nullopt;
  /// Index of this module's first head among them. If equal shards do not divide the heads, the
  /// last one is padded with slopes of 0.
  TORCH_ARG(int64_t, head_start) = 0;
  /// Slopes are divided by factor (alibi_scaling of JAIS and BTLM).
  TORCH_ARG(double, factor) = 1.0;
  /// With more keys than this, slopes are divided by key_length / train_length.
  TORCH_ARG(std::optional<int64_t>, train_length) = std::nullopt;
  /// Make the slopes a parameter.
  TORCH_ARG(bool, learned) = false;
};

/// Adds ALiBi biases to attention scores. Slopes that are not learned are derived from the options
/// whenever the module moves, so there is no state to cast or save.
///
/// Methods take `causal` from the module's options, and `positions_from_mask` is true.
///
///     posembed::ALiBi alibi(posembed::ALiBiOptions(8));
///     auto y = at::scaled_dot_product_attention(q, k, v, alibi->forward(q.size(2)));
///
/// In a torch::nn::Sequential the module comes first: it takes query_length, an int64_t.
class POSEMBED_API ALiBiImpl : public torch::nn::Cloneable<ALiBiImpl> {
 public:
  explicit ALiBiImpl(int64_t num_heads) : ALiBiImpl(ALiBiOptions(num_heads)) {}
  explicit ALiBiImpl(const ALiBiOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Slopes move with the module; learned ones also take its dtype.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// float32 [num_heads] or [2, num_heads]; learned slopes are the parameter, in the module's
  /// dtype.
  torch::Tensor slopes() const;

  /// Slopes for FlashAttention-2, positive: float32 [num_heads], or [batch_size, num_heads]. No
  /// gradient flows back to learned slopes.
  /// @param key_length  required with train_length
  /// @throws c10::ValueError slopes that differ left and right of the query
  torch::Tensor alibi_slopes(std::optional<int64_t> batch_size = std::nullopt,
                             std::optional<int64_t> key_length = std::nullopt) const;

  /// The bias [num_heads, query_length, key_length], with a batch in front where positions or mask
  /// have one; see functional::alibi_bias.
  /// @param key_length  default: query_length
  /// @param dtype  default: the module's
  torch::Tensor forward(int64_t query_length, std::optional<int64_t> key_length = std::nullopt,
                        const ALiBiCall& call = {},
                        std::optional<torch::Dtype> dtype = std::nullopt);

  /// forward() into `out`, for inference; returns `out`. See functional::alibi_bias_out.
  torch::Tensor forward_out(const torch::Tensor& out, const ALiBiCall& call = {}) const;

  /// scores [batch, num_heads, query, key] = scores * scale + bias, in place, for inference;
  /// returns `scores`.
  torch::Tensor add_(const torch::Tensor& scores, const ALiBiCall& call = {}) const;

  /// Attention weights: softmax(scores * scale + bias). See functional::alibi_softmax.
  torch::Tensor softmax(const torch::Tensor& scores, const ALiBiCall& call = {}) const;

  /// softmax() in place, for inference; returns `scores`.
  torch::Tensor softmax_(const torch::Tensor& scores, const ALiBiCall& call = {}) const;

  /// See functional::alibi_lse_correction.
  torch::Tensor lse_correction(int64_t query_length, int64_t query_start, int64_t key_start,
                               const std::string& form = "distance") const;

  /// softmax(query key^T scale + bias) value. See functional::alibi_attention.
  torch::Tensor attention(const torch::Tensor& query, const torch::Tensor& key,
                          const torch::Tensor& value, const ALiBiCall& call = {},
                          double dropout = 0.0) const;

  /// Read at construction and by reset().
  ALiBiOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<int64_t>())},
                           {2, torch::nn::AnyValue(ALiBiCall())},
                           {3, torch::nn::AnyValue(std::optional<torch::Dtype>())})

 private:
  ALiBiCall own_call(const ALiBiCall& call) const;
  torch::Tensor derived_slopes() const;
  torch::Tensor slopes_for(int64_t key_length) const;
  torch::Tensor slopes_for(const torch::Tensor& scores) const;
  void follow(const torch::TensorOptions& like);

  torch::Tensor parameter_;  // defined if slopes are learned
  torch::Tensor derived_;    // the slopes of the options, on the module's device
  torch::TensorOptions like_ = torch::TensorOptions(torch::kFloat).device(torch::kCPU);
};

TORCH_MODULE(ALiBi);

}  // namespace posembed

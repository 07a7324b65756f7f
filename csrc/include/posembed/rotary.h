/// Rotary position embedding (RoPE): query and key are turned by an angle that grows with position,
/// so that their product depends on the distance between them. Su et al., "RoFormer: Enhanced
/// Transformer with Rotary Position Embedding", arXiv:2104.09864.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "posembed/export.h"
#include "posembed/rotary_specification.h"

namespace posembed {

/// Which dimension is which in query and key.
enum class Layout {
  bshd,  ///< [batch, seq, heads, head_dim]
  bhsd,  ///< [batch, heads, seq, head_dim]
  sbhd,  ///< [seq, batch, heads, head_dim]
  thd,   ///< [tokens, heads, head_dim]
};

/// "bshd", "bhsd", "sbhd" or "thd".
POSEMBED_API const char* name(Layout layout);

/// Which components form a pair.
enum class Pairing {
  half_split,   ///< (i, i + rotary_dim / 2), as GPT-NeoX and Llama in transformers
  interleaved,  ///< (2i, 2i + 1), as GPT-J and Meta's Llama
};

/// What permute_rotary_weight() leaves where it is.
struct PermuteOptions {
  std::optional<int64_t> rotary_dim = std::nullopt;          ///< default: the whole head
  int64_t rotary_start = 0;                                  ///< the first rotated component
  std::optional<std::vector<int64_t>> heads = std::nullopt;  ///< default: all
};

/// Reorders the rows that make a head's components for the other pairing: queries and keys permuted
/// alike have the same products, so attention scores stay as they are.
///
///     weight = posembed::permute_rotary_weight(weight, 32, posembed::Pairing::interleaved);
///
/// @param weight  [num_heads * head_dim, ...]: a projection's weight or bias, a LoRA B matrix; of a
///     norm over one head [head_dim] with one head
/// @param num_heads  heads in the rows: of keys with grouped queries, of all three if packed
/// @param to  the pairing that it is to have; it has the other
/// @param options  the rotated window, and of packed weights the heads of query and key
/// @throws c10::ValueError rows do not fit num_heads, or the window does not fit the head
POSEMBED_API torch::Tensor permute_rotary_weight(const torch::Tensor& weight, int64_t num_heads,
                                                 Pairing to, const PermuteOptions& options = {});

namespace functional {

/// How rotary() reads its arguments.
struct RotaryCall {
  Layout layout = Layout::bshd;
  int64_t offset = 0;    ///< position of the first token where no positions are given
  bool inverse = false;  ///< undo the rotation
  /// int32/int64 [documents + 1], from 0 to the number of tokens: where documents begin that lie
  /// one behind the other (Layout::thd, or a batch of 1). Positions restart there, at `offset`.
  std::optional<torch::Tensor> cu_seqlens = std::nullopt;
  /// float32/float64 [rotary_dim / 2], radians per position, instead of the specification's.
  std::optional<torch::Tensor> frequencies = std::nullopt;
};

/// Rotates `query`; gradients flow.
/// @param query  floating, in `call.layout`
/// @param positions  int32/int64 [seq], [batch, seq] or [tokens]; with sections also
///     [axes, batch, seq] or [axes, tokens]; -1 on any axis leaves a token as it is
/// @param spec  RotarySpec::to_json()
/// @param no_key  std::nullopt: a second tensor would be the key
/// @throws c10::ValueError shapes, options, cu_seqlens; c10::TypeError dtypes; c10::IndexError
///     positions
POSEMBED_API torch::Tensor rotary(const torch::Tensor& query, std::nullopt_t no_key,
                                  const std::optional<torch::Tensor>& positions,
                                  std::string_view spec, const RotaryCall& call = {});

/// Rotates `query` and `key` (any number of heads each) in one launch.
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& positions, std::string_view spec,
    const RotaryCall& call = {});

/// The same in place, for inference: raises where a gradient would be lost.
POSEMBED_API void rotary_(const torch::Tensor& query, std::nullopt_t no_key,
                          const std::optional<torch::Tensor>& positions, std::string_view spec,
                          const RotaryCall& call = {});
POSEMBED_API void rotary_(const torch::Tensor& query, const torch::Tensor& key,
                          const std::optional<torch::Tensor>& positions, std::string_view spec,
                          const RotaryCall& call = {});

/// Moves rotated keys to other positions, or to another specification, in place: as if rotated
/// anew, but for one rounding to their dtype. Works on a float64 copy.
/// @param key  what `spec` rotated at `old_positions`, in `layout`
/// @param new_positions  where the keys shall be, as rotary() takes positions
/// @param new_spec  what shall have rotated them; default: the same
/// @param frequencies  those of RotaryCall, where the rotation had them; `new_spec` is without
/// @throws as rotary_()
POSEMBED_API void rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                            const torch::Tensor& new_positions, const std::string& spec,
                            const std::optional<std::string>& new_spec = std::nullopt,
                            Layout layout = Layout::bshd,
                            const std::optional<torch::Tensor>& frequencies = std::nullopt);

/// The same into memory of the same shape and dtype, with any strides but for a contiguous last
/// dimension; it may be the input itself. For inference, and for speed: fresh memory costs more
/// than the rotation.
POSEMBED_API void rotary_out(const torch::Tensor& out, const torch::Tensor& query,
                             std::nullopt_t no_key, const std::optional<torch::Tensor>& positions,
                             std::string_view spec, const RotaryCall& call = {});
POSEMBED_API void rotary_out(const torch::Tensor& query_out, const torch::Tensor& key_out,
                             const torch::Tensor& query, const torch::Tensor& key,
                             const std::optional<torch::Tensor>& positions, std::string_view spec,
                             const RotaryCall& call = {});

}  // namespace functional

/// Options of RotaryEmbedding, as RotarySpec plus the layout.
struct POSEMBED_API RotaryOptions {
  /* implicit */ RotaryOptions(int64_t head_dim);
  /// The options that give this specification.
  explicit RotaryOptions(const RotarySpec& spec);

  /// Components of one head.
  TORCH_ARG(int64_t, head_dim);
  /// Pair i turns by base^(-2i / rotary_dim) radians per position.
  TORCH_ARG(double, base) = 10000.0;
  /// Components that are rotated; default: all of them.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  /// The first component that is rotated.
  TORCH_ARG(int64_t, rotary_start) = 0;
  /// Pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
  TORCH_ARG(bool, interleaved) = false;
  /// Rotate the other way.
  TORCH_ARG(bool, reverse) = false;
  /// How frequencies are stretched to a longer context.
  TORCH_ARG(RotaryScaling, scaling) = {};
  /// The position axis of each pair, where positions have several.
  TORCH_ARG(std::optional<Sections>, sections) = std::nullopt;
  /// Radians per position [rotary_dim / 2], instead of a series.
  TORCH_ARG(std::optional<std::vector<double>>, custom_frequencies) = std::nullopt;
  /// How angles and products are rounded.
  TORCH_ARG(Numerics, numerics) = Numerics::exact;
  /// Which dimension is which in query and key.
  TORCH_ARG(Layout, layout) = Layout::bshd;
  /// Train the frequencies, as a parameter.
  TORCH_ARG(bool, learned_frequencies) = false;

 public:
  RotarySpec spec() const;
};

class RotaryEmbedding;

/// Rotates query and key by their positions. Holds no tensor unless frequencies are learned:
/// nothing to cast, move or save.
///
///     posembed::RotaryEmbedding rope(posembed::RotaryOptions(128).base(500000.0));
///     auto [q, k] = rope->forward(query, key);
class POSEMBED_API RotaryEmbeddingImpl : public torch::nn::Cloneable<RotaryEmbeddingImpl> {
 public:
  explicit RotaryEmbeddingImpl(int64_t head_dim) : RotaryEmbeddingImpl(RotaryOptions(head_dim)) {}
  explicit RotaryEmbeddingImpl(const RotaryOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Rotates query; see functional::rotary for shapes and errors.
  torch::Tensor forward(const torch::Tensor& query, std::nullopt_t no_key = std::nullopt,
                        const std::optional<torch::Tensor>& positions = std::nullopt,
                        int64_t offset = 0, bool inverse = false,
                        const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);
  /// Rotates query and key in one launch.
  std::tuple<torch::Tensor, torch::Tensor> forward(
      const torch::Tensor& query, const torch::Tensor& key,
      const std::optional<torch::Tensor>& positions = std::nullopt, int64_t offset = 0,
      bool inverse = false, const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  /// The same in place, for inference.
  void rotate_(const torch::Tensor& query, std::nullopt_t no_key = std::nullopt,
               const std::optional<torch::Tensor>& positions = std::nullopt, int64_t offset = 0,
               bool inverse = false, const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);
  void rotate_(const torch::Tensor& query, const torch::Tensor& key,
               const std::optional<torch::Tensor>& positions = std::nullopt, int64_t offset = 0,
               bool inverse = false, const std::optional<torch::Tensor>& cu_seqlens = std::nullopt);

  /// Casting a model leaves learned frequencies in float32 or float64: positions multiply what a
  /// cast to bfloat16 would round away.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// Moves rotated keys in place, to other positions or to another specification (default: the
  /// same); see functional::rerotate_.
  void rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                 const torch::Tensor& new_positions,
                 const std::optional<RotarySpec>& new_spec = std::nullopt);

  /// The module for sequences of that length, where frequencies depend on it (dynamic NTK,
  /// LongRoPE). A key cache belongs to one of them. Learned frequencies are shared.
  RotaryEmbedding resolve(int64_t seq_len) const;

  /// Read at construction and by reset().
  RotaryOptions options;

  /// Learned frequencies [rotary_dim / 2], radians per position, float32; undefined without.
  torch::Tensor frequencies;

 private:
  functional::RotaryCall call(int64_t offset, bool inverse,
                              const std::optional<torch::Tensor>& cu_seqlens) const;
  torch::Dtype wide(torch::Dtype dtype) const;

  std::string text_;  // options.spec().to_json(), which the operator reads
};

TORCH_MODULE(RotaryEmbedding);

}  // namespace posembed

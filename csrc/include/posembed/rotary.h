/// Rotary position embedding (RoPE): query and key are rotated by an angle that grows with
/// position, so that their product depends on the distance between them. Su et al., "RoFormer:
/// Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "posembed/export.h"
#include "posembed/given.h"
#include "posembed/offset.h"
#include "posembed/rotary_specification.h"

namespace posembed {

/// The order of the dimensions of query and key.
enum class Layout {
  bshd,  ///< [batch, seq, heads, head_dim]
  bhsd,  ///< [batch, heads, seq, head_dim]
  sbhd,  ///< [seq, batch, heads, head_dim]
  thd,   ///< [tokens, heads, head_dim]
};

/// "bshd", "bhsd", "sbhd" or "thd".
POSEMBED_API const char* name(Layout layout);

/// How heads follow one another in a packed projection.
enum class PackedOrder {
  blocks,  ///< all heads of the query, all of the key, all of the value: Phi-3
  groups,  ///< for each key head: its query heads, the key, the value: Megatron-LM, GPT-NeoX
};

/// "blocks" or "groups".
POSEMBED_API const char* name(PackedOrder order);

/// Which components form a pair.
enum class Pairing {
  half_split,   ///< (i, i + rotary_dim / 2): GPT-NeoX, Llama in transformers
  interleaved,  ///< (2i, 2i + 1): GPT-J, Meta's Llama
};

/// Which rows permute_rotary_weight() permutes.
struct PermuteOptions {
  std::optional<int64_t> rotary_dim = std::nullopt;          ///< default: the whole head
  int64_t rotary_start = 0;                                  ///< the first rotated component
  std::optional<std::vector<int64_t>> heads = std::nullopt;  ///< default: all
};

/// Converts a projection weight of query or key to the other pairing by reordering the rows that
/// produce a head's components. If both are converted, attention scores stay the same.
///
///     weight = posembed::permute_rotary_weight(weight, 32, posembed::Pairing::interleaved);
///
/// @param weight  [num_heads * head_dim, ...]: a projection's weight or bias, or a LoRA B matrix;
///     for the weight of a norm over one head, [head_dim] with num_heads 1
/// @param num_heads  heads in the rows: the key heads of a key projection, all heads of packed QKV
/// @param to  the pairing of the result; the weight has the other one
/// @param options  the rotated window and, for packed QKV, the heads of query and key
/// @throws c10::ValueError rows do not fit num_heads, or the window does not fit the head
POSEMBED_API torch::Tensor permute_rotary_weight(const torch::Tensor& weight, int64_t num_heads,
                                                 Pairing to, const PermuteOptions& options = {});

/// Options of a call of RotaryEmbedding or of the functions below:
///
///     auto [q, k] = rope->forward(query, key, posembed::RotaryCall().offset(17));
///
/// A tensor of positions is also a RotaryCall: rope->forward(query, key, positions).
struct POSEMBED_API RotaryCall {
  RotaryCall() = default;
  /* implicit */ RotaryCall(torch::Tensor positions) : positions_(std::move(positions)) {}
  /// A number does not compile.
  template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
  /* implicit */ RotaryCall(Number) {
    static_assert(!std::is_arithmetic_v<Number>,
                  "the first position is an option: rope(query, key, RotaryCall().offset(17))");
  }

  /// int32, int64, float32 or float64 [seq], [batch, seq] or [tokens]; with sections also [axes,
  /// batch, seq] or [axes, tokens], where the batch may be 1. The integer -1, on all axes, leaves
  /// the token unrotated; on some but not all, it raises c10::IndexError. Floating positions may
  /// have fractions, with angles as exact as those of whole numbers. Negative ones rotate
  /// backwards, -1.0 too. Default: offset, offset + 1, …
  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  /// The position of the first token if no positions are given.
  TORCH_ARG(Offset, offset) = 0;
  /// Undo the rotation.
  TORCH_ARG(bool, inverse) = false;
  /// For documents packed one after another (Layout::thd, or a batch of 1): int32/int64 [documents
  /// + 1], the token at which each begins, then the number of tokens. Positions restart at `offset`
  /// in each.
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  /// The order of the dimensions. A module has its own and refuses another one.
  TORCH_ARG(Given<Layout>, layout) = Given<Layout>::default_to(Layout::bshd);
  /// Frequencies to use instead of the specification's: float32/float64 [rotary_dim / 2], [heads,
  /// rotary_dim / 2] or [axes, heads, rotary_dim / 2], in radians per position. With axes, the
  /// angle of a pair is the sum of position times frequency over all axes. A module has its own and
  /// refuses others.
  TORCH_ARG(std::optional<torch::Tensor>, frequencies) = std::nullopt;
  /// The length of each sample's sequence, by which LongRoPE chooses one of its two forms: int32/
  /// int64 [batch], or [tokens] with Layout::thd. Both forms are computed. Only rotary() and
  /// RotaryEmbedding::forward() take it. For one length of all: RotarySpec::resolve.
  TORCH_ARG(std::optional<torch::Tensor>, seq_len) = std::nullopt;
};

/// The heads of a packed projection: Packing(32).key_heads(8).
struct POSEMBED_API Packing {
  /* implicit */ Packing(int64_t heads) : heads_(heads) {}

  /// Query heads.
  TORCH_ARG(int64_t, heads);
  /// Key heads, a divisor of `heads`; the value has as many. Default: `heads`.
  TORCH_ARG(std::optional<int64_t>, key_heads) = std::nullopt;
  TORCH_ARG(PackedOrder, order) = PackedOrder::blocks;
};

namespace functional {

/// Rotates `query`; gradients flow. Each call serialises `spec`; a RotaryEmbedding does so once.
///
///     query = posembed::functional::rotary(query, spec, posembed::RotaryCall().offset(17));
///
/// @param query  floating, in `call.layout()`
/// @throws c10::ValueError shapes, options, cu_seqlens; c10::TypeError dtypes; c10::IndexError
///     positions
POSEMBED_API torch::Tensor rotary(const torch::Tensor& query, const RotarySpec& spec,
                                  const RotaryCall& call = {});

/// Rotates `query` and `key` (any number of heads each) in one launch.
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary(const torch::Tensor& query,
                                                             const torch::Tensor& key,
                                                             const RotarySpec& spec,
                                                             const RotaryCall& call = {});

/// rotary() in place; returns its tensors. For inference: raises if a gradient would be lost.
POSEMBED_API torch::Tensor rotary_(const torch::Tensor& query, const RotarySpec& spec,
                                   const RotaryCall& call = {});
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary_(const torch::Tensor& query,
                                                              const torch::Tensor& key,
                                                              const RotarySpec& spec,
                                                              const RotaryCall& call = {});

/// rotary() into existing memory, which saves an allocation; returns `out`. For inference: raises
/// if a gradient would be lost.
/// @param out  in the shape and dtype of `query`, any strides with a contiguous last dimension; may
///     be `query` itself, but must not overlap it otherwise
POSEMBED_API torch::Tensor rotary_out(const torch::Tensor& out, const torch::Tensor& query,
                                      const RotarySpec& spec, const RotaryCall& call = {});
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary_out(
    const torch::Tensor& query_out, const torch::Tensor& key_out, const torch::Tensor& query,
    const torch::Tensor& key, const RotarySpec& spec, const RotaryCall& call = {});

/// Rotates query and key of a packed projection into new tensors; the value is a view of it. One
/// gradient flows to it, into which those of query and key are rotated.
///
///     auto [query, key, value] = posembed::functional::rotary_packed(
///         qkv, posembed::Packing(32).key_heads(8), spec);
///
/// @param qkv  [batch, seq, (heads + 2 * key_heads) * head_dim], [seq, batch, …] for Layout::sbhd
///     or [tokens, …] for Layout::thd; Layout::bhsd gives views with heads first
/// @throws as rotary()
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> rotary_packed(
    const torch::Tensor& qkv, const Packing& packing, const RotarySpec& spec,
    const RotaryCall& call = {});

/// rotary_packed() in place; returns `qkv`. For inference: raises if a gradient would be lost.
POSEMBED_API torch::Tensor rotary_packed_(const torch::Tensor& qkv, const Packing& packing,
                                          const RotarySpec& spec, const RotaryCall& call = {});

/// Moves cached keys to other positions, or to another specification, in place; returns `key`. The
/// result equals a new rotation of the original keys, up to one rounding to their dtype. Computes
/// on a float64 copy.
/// @param key  keys in `call.layout()`, rotated by `spec` at `old_positions`; also float8_e4m3fn
/// @param new_positions  the positions to move to; shapes as in RotaryCall
/// @param new_spec  the specification to move to; default: `spec`
/// @param call  layout, and frequencies if `key` was rotated with any. They do not apply to
///     `new_spec`, which uses its own.
/// @throws as rotary_(); c10::ValueError other options of the call
POSEMBED_API torch::Tensor rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                                     const torch::Tensor& new_positions, const RotarySpec& spec,
                                     const std::optional<RotarySpec>& new_spec = std::nullopt,
                                     const RotaryCall& call = {});

}  // namespace functional

/// A setter and getters of a field of the specification, as TORCH_ARG has them.
#define POSEMBED_SPEC_ARG(name)                                                  \
  RotaryOptions& name(decltype(RotarySpec::name) value) {                        \
    spec_.name = std::move(value);                                               \
    return *this;                                                                \
  }                                                                              \
  const decltype(RotarySpec::name)& name() const noexcept { return spec_.name; } \
  decltype(RotarySpec::name)& name() noexcept { return spec_.name; }

/// Options of RotaryEmbedding: a RotarySpec, whose fields can be set here too, and the layout.
struct POSEMBED_API RotaryOptions {
  /* implicit */ RotaryOptions(int64_t head_dim) : spec_(head_dim) {}
  /// The options that correspond to a specification.
  explicit RotaryOptions(const RotarySpec& spec) : rotary_dim_(spec.rotary_dim), spec_(spec) {}

  POSEMBED_SPEC_ARG(head_dim)
  POSEMBED_SPEC_ARG(base)
  POSEMBED_SPEC_ARG(rotary_start)
  POSEMBED_SPEC_ARG(interleaved)
  POSEMBED_SPEC_ARG(reverse)
  POSEMBED_SPEC_ARG(scaling)
  POSEMBED_SPEC_ARG(sections)
  POSEMBED_SPEC_ARG(custom_frequencies)
  POSEMBED_SPEC_ARG(custom_attention_factor)
  POSEMBED_SPEC_ARG(numerics)
  /// Number of components that are rotated; default: all.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  /// The order of the dimensions of query and key.
  TORCH_ARG(Layout, layout) = Layout::bshd;
  /// Make the frequencies a parameter.
  TORCH_ARG(bool, learned_frequencies) = false;
  /// Sizes of learned frequencies before rotary_dim / 2: {heads}, if each head has its own, or
  /// {axes, heads}, if angles are also summed over the axes of positions.
  TORCH_ARG(std::vector<int64_t>, frequency_sizes);
  /// The numbers of heads of each query and key, or a divisor of them, as under tensor parallelism;
  /// keys may also be repeated to the query's heads. Default: any number.
  TORCH_ARG(std::optional<int64_t>, heads) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, key_heads) = std::nullopt;

 public:
  RotarySpec spec() const;

 private:
  RotarySpec spec_;  // but for rotary_dim
};

#undef POSEMBED_SPEC_ARG

class RotaryEmbedding;

/// Rotates query and key by their positions. Holds no tensor unless frequencies are learned, so
/// there is nothing to cast, move or save.
///
///     posembed::RotaryEmbedding rope(posembed::RotaryOptions(128).base(500000.0));
///     auto [q, k] = rope(query, key);
class POSEMBED_API RotaryEmbeddingImpl : public torch::nn::Cloneable<RotaryEmbeddingImpl> {
 public:
  explicit RotaryEmbeddingImpl(int64_t head_dim) : RotaryEmbeddingImpl(RotaryOptions(head_dim)) {}
  explicit RotaryEmbeddingImpl(const RotarySpec& spec) : RotaryEmbeddingImpl(RotaryOptions(spec)) {}
  explicit RotaryEmbeddingImpl(const RotaryOptions& options);
  /// More numbers do not compile.
  template <typename... More>
  RotaryEmbeddingImpl(int64_t head_dim, int64_t, More...) : RotaryEmbeddingImpl(head_dim) {
    static_assert(sizeof...(More) > 99,
                  "RotaryEmbedding takes head_dim alone or RotaryOptions(head_dim), such as "
                  "RotaryOptions(128).base(500000.0); there is no largest position");
  }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Rotates query; see functional::rotary for shapes and errors.
  /// @throws c10::ValueError the call has another layout than the module, or frequencies
  torch::Tensor forward(const torch::Tensor& query);
  torch::Tensor forward(const torch::Tensor& query, const RotaryCall& call);
  /// Rotates query and key in one launch.
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& query,
                                                   const torch::Tensor& key,
                                                   const RotaryCall& call = {});

  /// forward() in place, for inference; returns its tensors. See functional::rotary_.
  torch::Tensor rotate_(const torch::Tensor& query, const RotaryCall& call = {});
  std::tuple<torch::Tensor, torch::Tensor> rotate_(const torch::Tensor& query,
                                                   const torch::Tensor& key,
                                                   const RotaryCall& call = {});

  /// Query, key and value of a packed projection. See functional::rotary_packed.
  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> rotate_packed(
      const torch::Tensor& qkv, const Packing& packing, const RotaryCall& call = {});
  torch::Tensor rotate_packed_(const torch::Tensor& qkv, const Packing& packing,
                               const RotaryCall& call = {});

  /// Learned frequencies stay in float32 or float64 when the module is cast, because positions
  /// would multiply the rounding error of a 16-bit type.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// Moves cached keys to other positions, or to another specification, in place; returns them. See
  /// functional::rerotate_.
  torch::Tensor rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                          const torch::Tensor& new_positions,
                          const std::optional<RotarySpec>& new_spec = std::nullopt);

  /// Returns the module for sequences of one length, if frequencies depend on the length (dynamic
  /// NTK, LongRoPE). All keys of a cache must come from the same one. Learned frequencies are
  /// shared.
  RotaryEmbedding resolve(int64_t seq_len) const;

  /// Read at construction and by reset().
  RotaryOptions options;

  /// Learned frequencies, float32 (float64 after to(torch::kDouble)) [rotary_dim / 2] or, with
  /// options.frequency_sizes(), [heads, rotary_dim / 2] or [axes, heads, rotary_dim / 2], radians
  /// per position; undefined if not learned.
  torch::Tensor frequencies;

 private:
  RotaryCall own_options(RotaryCall call) const;
  RotaryCall own_call(const RotaryCall& call, const torch::Tensor& query) const;
  torch::Dtype wide(torch::Dtype dtype) const;

  std::string text_;  // options.spec().to_json() after any heads, which the operator reads
};

class RotaryEmbedding : public torch::nn::ModuleHolder<RotaryEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<RotaryEmbeddingImpl>::ModuleHolder;
  using Impl = RotaryEmbeddingImpl;

  /// Calls RotaryEmbeddingImpl::forward. Torch's own operator() does not support overloads.
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return get()->forward(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace posembed

namespace torch::nn {

/// In a Sequential, a RotaryEmbedding rotates one tensor. AnyModule cannot choose among overloads.
template <>
inline AnyModule::AnyModule(std::shared_ptr<posembed::RotaryEmbeddingImpl> module)
    : content_(make_holder(std::move(module),
                           static_cast<Tensor (posembed::RotaryEmbeddingImpl::*)(const Tensor&)>(
                               &posembed::RotaryEmbeddingImpl::forward))) {}

}  // namespace torch::nn

// The rotary operators, as C++ code calls them and as their kernels are registered: their arguments
// form one struct, Rotation. Then specifications as operators need them, and the checks and the
// arguments of kernels that all operators that rotate share.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/double_double.h"
#include "core/turn.h"
#include "dispatcher/checks.h"
#include "dispatcher/fork.h"
#include "dispatcher/operator.h"
#include "posembed/rotary.h"
#include "rotary/rotary.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<Layout> {
  static constexpr const char* argument = "layout";
  static constexpr const char* names[] = {"bshd", "bhsd", "sbhd", "thd"};
};

template <>
struct EnumArgument<Numerics> {
  static constexpr const char* argument = "numerics";
  static constexpr const char* names[] = {"exact", "float32", "float32_product",
                                          "float32_rounded_table", "float32_polar"};
};

template <>
struct EnumArgument<PackedOrder> {
  static constexpr const char* argument = "order";
  static constexpr const char* names[] = {"blocks", "groups"};
};

}  // namespace posembed::dispatcher

namespace posembed::rotary {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// The arguments that define a rotation. Refers to the text, which must outlive it.
struct Rotation {
  Text spec;        // RotarySpec::to_json()
  RotaryCall call;  // whose offset is a number
  bool transpose = false;

  POSEMBED_FIELDS(self.spec, self.call.positions(), self.call.layout(), self.call.offset(),
                  self.call.inverse(), self.call.cu_seqlens(), self.call.frequencies(),
                  self.transpose)
};

/// Operators that take a Rotation after the tensors.
template <typename Result, typename... Tensors>
using Operator = dispatcher::Operator<Result(Tensors...), Rotation>;

using Two = std::tuple<Tensor, Tensor>;

inline const Operator<Tensor, const Tensor&> rotary{"rotary"};
inline const Operator<Two, const Tensor&, const Tensor&> rotary_pair{"rotary_pair"};

/// In place.
inline const Operator<void, const Tensor&> rotary_{"rotary_"};
inline const Operator<void, const Tensor&, const Tensor&> rotary_pair_{"rotary_pair_"};

/// Into given memory, which comes first.
inline const Operator<void, const Tensor&, const Tensor&> rotary_out{"rotary_out"};
inline const Operator<void, const Tensor&, const Tensor&, const Tensor&, const Tensor&>
    rotary_pair_out{"rotary_pair_out"};

/// The tangent of a result of a rotation, for the tangent of its frequencies, which stands in their
/// place.
inline const Operator<Tensor, const Tensor&> rotary_tangent{"rotary_tangent"};

/// The gradient of frequencies, in their shape and dtype, from the gradient of query and query.
inline const Operator<Tensor, const Tensor&, const Tensor&> rotary_frequencies_backward{
    "rotary_frequencies_backward"};

/// The heads of a packed projection.
struct PackedHeads {
  int64_t heads = 0, key_heads = 0;
  PackedOrder order = PackedOrder::blocks;

  int64_t groups() const { return order == PackedOrder::groups ? key_heads : 1; }
};

inline PackedHeads heads_of(const Packing& packing) {
  return {packing.heads(), packing.key_heads().value_or(packing.heads()), packing.order()};
}

/// Arguments of the operators on packed projections, after the tensors. Refers to the text.
struct PackedRotation : PackedHeads {
  Rotation rotation;

  POSEMBED_FIELDS(self.heads, self.key_heads, self.order, self.rotation.spec,
                  self.rotation.call.positions(), self.rotation.call.layout(),
                  self.rotation.call.offset(), self.rotation.call.inverse(),
                  self.rotation.call.cu_seqlens(), self.rotation.call.frequencies(),
                  self.rotation.transpose)
};

using Three = std::tuple<Tensor, Tensor, Tensor>;

template <typename Result, typename... Tensors>
using PackedOperator = dispatcher::Operator<Result(Tensors...), PackedRotation>;

/// Rotated query and key of a packed projection, and a view of its value.
inline const PackedOperator<Three, const Tensor&> rotary_packed{"rotary_packed"};

/// Without the value.
inline const PackedOperator<Two, const Tensor&> rotary_packed_pair{"rotary_packed_pair"};

/// In place.
inline const PackedOperator<void, const Tensor&> rotary_packed_{"rotary_packed_"};

/// The gradient of a packed projection from those of query, key and value.
inline const PackedOperator<Tensor, const Tensor&, const Tensor&, const Tensor&>
    rotary_packed_backward{"rotary_packed_backward"};

/// Moves rotated keys in place: key, old and new positions, the specification, the new one if it
/// differs, the layout, and frequencies.
inline const dispatcher::Operator<void(const Tensor&, const Tensor&, const Tensor&, Text,
                                       std::optional<Text>, Text, const MaybeTensor&)>
    rotary_rerotate_{"rotary_rerotate_"};

inline const dispatcher::Operator<Tensor(Text, std::optional<at::Device>)> rotary_frequencies{
    "rotary_frequencies"};

// ---------------------------------------------------------------------------------- specifications

/// A specification ready for the kernel.
struct Specification {
  /// Raises c10::ValueError for text or numbers that are not a specification. A module with heads
  /// writes them in front: "heads 8 2 {…}".
  explicit Specification(std::string_view text);

  RotarySpec spec;
  int64_t heads = 0, key_heads = 0;             // of the model; 0: any
  std::vector<core::DoubleDouble> frequencies;  // [rotary_dim / 2], radians per position
  std::vector<core::Turn64> turns;              // the same as fractions of a turn
  std::vector<core::Turn128> wide_turns;
  double attention_factor = 1.0;      // multiplies rotated pairs
  std::vector<uint8_t> axis_of_pair;  // empty: positions have one axis
  std::vector<int64_t> windows;       // see Arguments; empty: pairs are not within axes
  int64_t axes = 1;                   // of positions, at most
  int64_t used_axes = 1;              // of positions, at least
  std::vector<double> decay;          // xPos: see Arguments; empty otherwise
  double decay_center = 0.0;
  std::string for_keys;  // the text for rotating keys without a query
  // For numerics other than exact, computed at first use: see use_tables().
  dispatcher::FirstUseMember<std::vector<float>> float32_frequencies;  // [rotary_dim / 2]
};

using SpecificationPointer = std::shared_ptr<const Specification>;

/// Parses a specification's JSON text; keeps the latest texts. Raises c10::ValueError for text or
/// numbers that are not a specification.
SpecificationPointer specification(std::string_view text);

// --------------------------------------------------------------------------------------- arguments
// Turns tensors into the rotary kernels' arguments. All operators that rotate share these checks
// and the reading of layouts, positions and strides.

/// The index of each dimension of a layout; batch is -1 if it has none.
struct Dimensions {
  int64_t rank, batch, seq, heads;
  const char* shape;
  Layout layout;
};

Dimensions dimensions(Layout layout);

/// The positions of a call, which has a layout: those given or, if each sample has its own offset
/// or there are documents, those counted from it.
template <typename Call>
MaybeTensor positions_of(const Call& call, const Tensor& query,
                         const MaybeTensor& cu_seqlens = std::nullopt) {
  const Dimensions where = dimensions(call.layout());
  if (cu_seqlens.has_value() && !call.offset().of_samples().has_value()) {
    const c10::SymInt offset = call.offset().number();
    TORCH_CHECK_VALUE(offset >= 0, "offset: expected 0 or more, got ", offset);
  }
  return call.offset().positions(call.positions(), query, where.batch, where.seq, cu_seqlens);
}

/// An operator's names for the arguments that check() reads.
struct Names {
  const char* query = "query";
  const char* key = "key";
  const char* positions = "positions";
};

/// The checks that need no values. Eager and Meta kernels share them. Returns the specification.
SpecificationPointer check(const Tensor& query, const Tensor* key, const Rotation& rotation,
                           const Names& names = {});

/// Checks that a key's dtype, batch and seq are those of `query`.
void check_key(const Tensor& key, const char* name, const Tensor& query, const Dimensions& where);

/// Checks the memory of results for query and key: each may share memory only with its own input,
/// and only if it is that input.
void check_pair_memory(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                       const Tensor& key);

/// Throws c10::IndexError for integers below -1 in a contiguous CPU tensor, and for -1 on some axes
/// of a token but not on all.
void check_position_values(const Tensor& positions, const char* argument, Layout layout);

/// The optional tensors of a RotaryCall as kernels read them: contiguous where kernels need it,
/// undefined if not given.
struct Inputs {
  Tensor positions, cu_seqlens, frequencies;
};

/// Checks the values of CPU tensors, in a call for the tokens of `query`, before anything is
/// written; CUDA kernels record bad positions.
Inputs checked_inputs(const RotaryCall& call, const Tensor& query);

/// @param out  nullptr if rows are only read: asking for a mutable pointer would copy copy-on-write
///             memory
HeadView head_view(const Tensor& in, const Tensor* out, const Dimensions& where);

/// One or two tensors to rotate, each with the destination of its result, if any.
struct Job {
  const Tensor* in[2];
  const Tensor* out[2];
  int64_t count;
};

/// The kernel's arguments that tensors and a layout define.
Arguments arguments(const Job& job, const Dimensions& where);

/// The kernel's arguments, which point into the others.
Arguments arguments(const Job& job, const Inputs& inputs, const Rotation& rotation,
                    const Specification& spec);

/// Runs the rotation kernel on the device of `query`, one of the tensors that `call` rotates.
void launch_rotation(Arguments& call, const Tensor& query);

/// Rotates the tensors of a job, which has been checked.
void rotate(const Job& job, const Rotation& rotation, const Specification& spec);

/// Throws c10::ValueError for xPos and for numerics other than exact. For operators whose kernels
/// compute only exact angles.
void check_exact_angles(const Specification& spec, const char* operator_name);

/// Like at::empty_like in the dtype `type`, but always with the contiguous last dimension that
/// kernels need.
Tensor empty_result(const Tensor& input, at::ScalarType type);
inline Tensor empty_result(const Tensor& input) { return empty_result(input, input.scalar_type()); }

/// Views of query, key and value by token: [.., groups, heads of a group, head_dim].
Three parts_of(const Tensor& qkv, const PackedHeads& packing);

/// From heads by token to a layout and back.
Tensor exchanged(const Tensor& heads, Layout layout);

/// From heads in a layout to a part of a projection: [.., groups, heads of a group, head_dim].
Tensor by_group(const Tensor& heads, const PackedHeads& packing, Layout layout);

void check_packed(const Tensor& qkv, const PackedRotation& call);

// ----------------------------------------------------------------------------------- specification
// Parts of a specification: its scaling, presets, JSON and accuracy.

struct Scaled {
  Series frequencies;              // [rotary_dim / 2], radians per position
  double attention_factor = 1.0;   // multiplies rotated pairs
  std::vector<double> decay = {};  // xPos: log2 of a query's amplitude per position; or empty
  double decay_center = 0.0;
};

/// Requires a specification that passes RotarySpec::check(). Dynamic scalings give the frequencies
/// for lengths within the original context.
Scaled scaled(const RotarySpec& spec);

/// Throws c10::ValueError, which names the field, if the scaling's numbers are invalid.
void check_scaling(const RotarySpec& spec);

// ----------------------------------------------------------------------------------------- presets
// Rotations of image and video models by name: see RotarySpec::from_preset. rotary_presets.json has
// their numbers, each with its source.

/// What a preset leaves open, and a model's configuration states.
struct PresetNumbers {
  std::optional<int64_t> head_dim = std::nullopt;
  std::optional<std::vector<int64_t>> axes = std::nullopt;  ///< components of each axis
  std::optional<double> base = std::nullopt;
  std::optional<std::vector<double>> ntk = std::nullopt;  ///< NtkScaling of each axis
};

/// The specification of a preset. Throws c10::ValueError as RotarySpec::from_preset.
RotarySpec preset(const std::string& name, const PresetNumbers& stated);

// -------------------------------------------------------------------------------------------- json
// Reads a specification from its canonical JSON text.

/// Reads the text of RotarySpec::to_json(); missing keys have their defaults. Throws
/// c10::ValueError for text that is not JSON and for unknown keys; does not check values.
RotarySpec parse(const std::string& text);

/// RotarySpec::to_json() with the keys that it leaves out.
std::string complete_text(const RotarySpec& spec);

// ---------------------------------------------------------------------------------------- numerics
// Angles as PyTorch programs compute them: float32 frequencies times float32 positions, torch's
// sine and cosine. Models were trained with these; docs/guide/rotary_bits.md lists the programs.

/// Radians per position as in transformers' ROPE_INIT_FUNCTIONS: float32 [pairs].
at::Tensor float32_frequencies(const RotarySpec& spec);

/// Sines and cosines of tokens.
struct AngleTables {
  at::Tensor cosines, sines;  // float32 [seq, pairs] or [batch, seq, pairs]
};

/// Computes the tables for numerics other than exact, and points `call` to them.
AngleTables use_tables(const Specification& spec, const Tensor& query, const Inputs& inputs,
                       Arguments* call);

// ------------------------------------------------------------------------------------------- forms

/// The kernels of six operators. Rules: Call, the type of their arguments after the tensors;
/// check(), which needs no values and returns what its rotate() takes; check_written(), for memory
/// that results go to; empty(), memory for a result; readable(), an input as kernels read it.
template <typename Rules>
struct Forms {
  using Call = typename Rules::Call;
  using Two = std::tuple<at::Tensor, at::Tensor>;
  using Checked = decltype(Rules::check(at::Tensor(), nullptr, Call()));

  template <typename Result>
  struct Prepared {
    Checked checked;
    Result result;
  };

  static Prepared<Tensor> prepare(const Tensor& query, const Call& call) {
    return {Rules::check(query, nullptr, call), Rules::empty(query, call)};
  }

  static void rotate(const Tensor& query, const Call& call, const Prepared<Tensor>& prepared) {
    const Tensor in = Rules::readable(query, call);
    Rules::rotate({{&in, nullptr}, {&prepared.result, nullptr}, 1}, call, prepared.checked);
  }

  static Prepared<Two> prepare_pair(const Tensor& query, const Tensor& key, const Call& call) {
    return {Rules::check(query, &key, call), {Rules::empty(query, call), Rules::empty(key, call)}};
  }

  static void rotate_pair(const Tensor& query, const Tensor& key, const Call& call,
                          const Prepared<Two>& prepared) {
    const Tensor query_in = Rules::readable(query, call), key_in = Rules::readable(key, call);
    const auto& [query_out, key_out] = prepared.result;
    Rules::rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, call, prepared.checked);
  }

  static Checked check_in_place(const Tensor& query, const Call& call) {
    return check_out(query, query, call, "query");
  }

  static void rotate_in_place(const Tensor& query, const Call& call, const Checked& checked) {
    Rules::rotate({{&query, nullptr}, {&query, nullptr}, 1}, call, checked);
  }

  static Checked check_pair_in_place(const Tensor& query, const Tensor& key, const Call& call) {
    return check_pair_out(query, key, query, key, call, "query", "key");
  }

  static void rotate_pair_in_place(const Tensor& query, const Tensor& key, const Call& call,
                                   const Checked& checked) {
    dispatcher::check_no_overlap(key, "key", query, "query");
    Rules::rotate({{&query, &key}, {&query, &key}, 2}, call, checked);
  }

  static Checked check_into(const Tensor& out, const Tensor& query, const Call& call) {
    return check_out(out, query, call, "out");
  }

  static void rotate_into(const Tensor& out, const Tensor& query, const Call& call,
                          const Checked& checked) {
    dispatcher::check_no_overlap_or_same(out, "out", query, "query");
    const Tensor in = Rules::readable(query, call);
    Rules::rotate({{&in, nullptr}, {&out, nullptr}, 1}, call, checked);
  }

  static Checked check_pair_into(const Tensor& query_out, const Tensor& key_out,
                                 const Tensor& query, const Tensor& key, const Call& call) {
    return check_pair_out(query_out, key_out, query, key, call, "query_out", "key_out");
  }

  static void rotate_pair_into(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                               const Tensor& key, const Call& call, const Checked& checked) {
    check_pair_memory(query_out, key_out, query, key);
    const Tensor query_in = Rules::readable(query, call), key_in = Rules::readable(key, call);
    Rules::rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, call, checked);
  }

  /// Registers all but the derivatives of `one` and `pair`.
  template <auto& one, auto& pair, auto& one_, auto& pair_, auto& one_out, auto& pair_out>
  static void implement(torch::Library& library) {
    one.template implement<prepare, rotate>(library);
    pair.template implement<prepare_pair, rotate_pair>(library);
    one_.template implement<check_in_place, rotate_in_place>(library);
    pair_.template implement<check_pair_in_place, rotate_pair_in_place>(library);
    one_out.template implement<check_into, rotate_into>(library);
    pair_out.template implement<check_pair_into, rotate_pair_into>(library);
    one_.refuse_gradients(library);
    pair_.refuse_gradients(library);
    one_out.refuse_gradients(library);
    pair_out.refuse_gradients(library);
  }

 private:
  static Checked check_out(const Tensor& out, const Tensor& query, const Call& call,
                           const char* name) {
    Checked checked = Rules::check(query, nullptr, call);
    Rules::check_written(out, name, query, "query", call);
    return checked;
  }

  static Checked check_pair_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                                const Tensor& key, const Call& call, const char* query_name,
                                const char* key_name) {
    Checked checked = Rules::check(query, &key, call);
    Rules::check_written(query_out, query_name, query, "query", call);
    Rules::check_written(key_out, key_name, key, "key", call);
    return checked;
  }
};

}  // namespace posembed::rotary

// Derivatives: the node of an operator, in the form of PyTorch's generated nodes, what it saves,
// tangents, a node from a function of gradients and saved arguments, and all derivatives of an
// operator that is linear in its first argument from its transpose.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatcher/operator.h"

namespace posembed::dispatcher {

// torch::autograd::Function would be shorter but does not support torch.func. A derived node lists
// its members once, in members(), and inherits release, compiled autograd and locking.

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline SavedVariable save(const at::Tensor& tensor) { return SavedVariable(tensor, false); }
inline SavedVariable save(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? save(*tensor) : SavedVariable();
}

/// A saved result of the operator itself: the result owns the node, so the node must not own the
/// result.
class SavedOutput : public SavedVariable {
 public:
  SavedOutput() = default;
  /* implicit */ SavedOutput(SavedVariable&& saved) : SavedVariable(std::move(saved)) {}
};

/// Call after set_history().
inline SavedOutput save_output(const at::Tensor& tensor) { return SavedVariable(tensor, true); }

/// The saved tensor; nullopt if there was none.
inline std::optional<at::Tensor> unpack(const SavedVariable& saved) {
  at::Tensor tensor = saved.unpack();
  return tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt;
}

/// Base of every operator's node. Derived provides
///   static constexpr const char* label; or a NodeName          the name that shows in grad_fn
///   template <typename Visitor> void members(Visitor& visit);  calls visit(member) for each member
///   variable_list backward(variable_list&& gradients);         calls registered operators only
template <typename Derived>
class OperatorNode : public torch::autograd::Node {
 public:
  std::string name() const override { return Derived::label; }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return derived().backward(std::move(gradients));
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto release = [](auto& member) {
      if constexpr (is_saved<decltype(member)>) member.reset_data();
    };
    derived().members(release);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& arguments) const override {
    auto collect = [&arguments](auto& member) {
      if constexpr (is_saved<decltype(member)>) {
        arguments.collect(member, std::is_same_v<std::decay_t<decltype(member)>, SavedOutput>);
      } else {
        arguments.collect(member);
      }
    };
    const_cast<OperatorNode*>(this)->derived().members(collect);
  }

  /// Compiled autograd traces with placeholders for gradients, which must not be read here: the
  /// node becomes one call in its graph, with the members as arguments.
  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    auto before = [&saved](auto& member) { saved.before(member); };
    auto after = [&saved](auto& member) { saved.after(member); };
    derived().members(before);
    static const std::string bound = compiler->bind_function(
        saved.get_py_compiler(), Derived::label, apply_packed, packed_types());
    variable_list result = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", bound, gradients, pack().vec(),
        Metadata::pack(torch::dynamo::autograd::get_input_metadata(next_edges())));
    derived().members(after);
    return result;
  }

 protected:
  /// Whether the gradient of input `edge` is needed; backward() may leave the others undefined.
  bool needs(size_t edge) const {
    return needed_.has_value() ? (*needed_ >> edge & 1) != 0 : task_should_compute_output(edge);
  }

  /// needs(edge) as bits, below one bit that marks their number.
  int64_t needed() const {
    if (needed_.has_value()) return *needed_;
    int64_t bits = int64_t{1} << num_outputs();
    for (size_t edge = 0; edge < num_outputs(); ++edge) bits |= int64_t{needs(edge)} << edge;
    return bits;
  }

  /// The number of inputs, from needed().
  static size_t count_of(int64_t needed) {
    size_t count = 0;
    while ((needed >>= 1) != 0) ++count;
    return count;
  }

  at::Tensor unpack_output(const SavedOutput& saved) {
    using Pointer = decltype(torch::autograd::Edge::function);
    return saved.unpack(needed_.has_value() ? Pointer() : Pointer(this->getptr()));
  }

 private:
  template <typename Member>
  static constexpr bool is_saved = std::is_base_of_v<SavedVariable, std::decay_t<Member>>;

  using Arguments = torch::dynamo::autograd::PackedArgs;
  using Metadata = torch::dynamo::autograd::IValuePacker<
      std::vector<std::optional<torch::autograd::InputMetadata>>>;

  Derived& derived() { return static_cast<Derived&>(*this); }

  /// The arguments of the call in a compiled graph: which inputs need a gradient, then the members.
  Arguments pack() {
    Arguments arguments;
    arguments.pack(needed());
    auto add = [this, &arguments](auto& member) {
      if constexpr (std::is_same_v<std::decay_t<decltype(member)>, SavedOutput>) {
        arguments.pack(std::optional<at::Tensor>(unpack_output(member)));
      } else if constexpr (is_saved<decltype(member)>) {
        arguments.pack(unpack(member));
      } else {
        arguments.pack(member);
      }
    };
    derived().members(add);
    return arguments;
  }

  std::vector<at::TypePtr> packed_types() {
    using torch::dynamo::autograd::IValuePacker;
    std::vector<at::TypePtr> types = {IValuePacker<int64_t>::packed_type()};
    auto add = [&types](auto& member) {
      using Member = std::decay_t<decltype(member)>;
      using Packed = std::conditional_t<is_saved<Member>, std::optional<at::Tensor>, Member>;
      types.push_back(IValuePacker<Packed>::packed_type());
    };
    derived().members(add);
    return types;
  }

  /// The function that a compiled graph calls: creates a node from packed members and runs it.
  static variable_list apply_packed(const variable_list& gradients,
                                    const std::vector<at::IValue>& packed) {
    Arguments arguments(packed);
    Derived node;
    node.needed_ = arguments.unpack<int64_t>();
    auto take = [&arguments](auto& member) {
      using Member = std::decay_t<decltype(member)>;
      if constexpr (is_saved<Member>) {
        member = save(arguments.unpack<std::optional<at::Tensor>>());
      } else {
        member = arguments.unpack<Member>();
      }
    };
    node.members(take);
    return node.backward(variable_list(gradients));
  }

  std::optional<int64_t> needed_;  // set if the engine cannot be asked
};

/// This torch version's pointer to a node: std::shared_ptr in older versions, then an intrusive
/// one.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Derived, typename Pointer = NodePointer>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    // deleteNode is found by argument-dependent lookup: versions that take the other branch lack
    // it.
    return std::shared_ptr<Derived>(new Derived(), [](Derived* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Derived>();
  }
}

/// A node with edges to `inputs`, or null if none of them needs a gradient.
template <typename Derived, typename... Inputs>
auto node_for(const Inputs&... inputs) {
  decltype(make_node<Derived>()) node;
  if (torch::autograd::compute_requires_grad(inputs...)) {
    node = make_node<Derived>();
    node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  }
  return node;
}

// ------------------------------------------------------------------------------------- saved calls
// The arguments of a call, saved for its backward pass in a member of an autograd node.

/// How a node keeps a field: a tensor as a SavedVariable, text as a string, a dtype as its number,
/// everything else in the type that schemas use.
template <typename Field>
struct SavedField {
  using Passed = std::decay_t<typename SchemaType<Field>::Type>;
  using Type = std::conditional_t<std::is_same_v<Passed, std::string_view>, std::string, Passed>;
  static Type save(const Field& field) { return Type(SchemaType<Field>::to(field)); }
  static Field unpack(const Type& saved) { return SchemaType<Field>::from(saved); }
};

template <>
struct SavedField<at::ScalarType> {
  using Type = int64_t;
  static Type save(at::ScalarType field) { return static_cast<Type>(field); }
  static at::ScalarType unpack(Type saved) { return static_cast<at::ScalarType>(saved); }
};

template <>
struct SavedField<at::Tensor> {
  using Type = SavedVariable;
  static Type save(const at::Tensor& field) { return dispatcher::save(field); }
  static at::Tensor unpack(const Type& saved) { return saved.unpack(); }
};

template <>
struct SavedField<std::optional<at::Tensor>> {
  using Type = SavedVariable;
  static Type save(const std::optional<at::Tensor>& field) { return dispatcher::save(field); }
  static std::optional<at::Tensor> unpack(const Type& saved) { return dispatcher::unpack(saved); }
};

template <typename Call, typename Fields>
class SavedFields;

template <typename Call, typename... Fields>
class SavedFields<Call, std::tuple<Fields...>> {
 public:
  void save(const Call& call) {
    saved_ = std::apply(
        [](const auto&... fields) {
          return Saved(SavedField<std::decay_t<Fields>>::save(fields)...);
        },
        Call::fields(call));
  }

  /// The arguments, after save(). Text in them refers to this object.
  Call unpack() const {
    Call call;
    std::apply(
        [&call](const auto&... saved) {
          Call::fields(call) = std::make_tuple(SavedField<std::decay_t<Fields>>::unpack(saved)...);
        },
        saved_);
    return call;
  }

  /// Lists the members for OperatorNode.
  template <typename Visitor>
  void members(Visitor& visit) {
    std::apply([&visit](auto&... saved) { (visit(saved), ...); }, saved_);
  }

 private:
  using Saved = std::tuple<typename SavedField<std::decay_t<Fields>>::Type...>;
  Saved saved_;
};

/// `Call` is a struct with fields().
template <typename Call>
using SavedCall = SavedFields<Call, FieldsOf<Call>>;

// ---------------------------------------------------------------------------------------- tangents
// Forward-mode derivatives, and Autograd kernels of linear operators, whose gradients and tangents
// are operator calls too.

/// The forward-mode tangent of `tensor`; undefined if it has none.
inline at::Tensor tangent(const at::Tensor& tensor) {
  return tensor.defined() ? at::Tensor(tensor._fw_grad(/*level=*/0)) : at::Tensor();
}

/// A copy of the tangent, for an output whose tangent is that of `tensor`.
inline at::Tensor copied_tangent(const at::Tensor& tensor) {
  const at::Tensor direction = tangent(tensor);
  return direction.defined() ? direction.clone() : direction;
}

inline void set_tangent(const at::Tensor& output, const at::Tensor& value) {
  if (value.defined()) output._set_fw_grad(value, /*level=*/0, /*is_inplace_op=*/false);
}

/// `tensor` without its tangent. Operators that compute a tangent take primals, because otherwise
/// they would differentiate again.
inline at::Tensor primal(const at::Tensor& tensor) {
  return tangent(tensor).defined() ? tensor._fw_primal(/*level=*/0) : tensor;
}

/// a + b, where either may be undefined.
inline at::Tensor accumulate(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a.add(b) : a;
}

/// Calls `function` with autograd's dispatch keys excluded. An operator's Autograd kernel calls the
/// operator itself this way.
template <typename Function>
auto below_autograd(const Function& function) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return function();
}

/// The same, and gives what it returns the history of `node`, which is null if none is needed.
template <typename Node, typename Function>
auto recorded(const Node& node, const Function& function) {
  auto output = below_autograd(function);
  if (!node) return output;
  if constexpr (std::is_same_v<decltype(output), at::Tensor>) {
    torch::autograd::set_history(output, node);
  } else {
    std::apply([&](auto&... each) { torch::autograd::set_history(variable_list{each...}, node); },
               output);
  }
  return output;
}

/// The Autograd kernel of an operator that is linear in `input`: `function` calls the operator with
/// a tensor in its place.
template <typename Node, typename Function>
at::Tensor linear(const Node& node, const at::Tensor& input, const Function& function) {
  at::Tensor output = recorded(node, [&] { return function(input); });
  if (const at::Tensor direction = tangent(input); direction.defined()) {
    set_tangent(output, function(direction));
  }
  return output;
}

/// The same for an operator that is linear in each of two inputs, of which one may be undefined.
template <typename Node, typename Function>
at::Tensor bilinear(const Node& node, const at::Tensor& a, const at::Tensor& b,
                    const Function& function) {
  at::Tensor output = recorded(node, [&] { return function(a, b); });
  at::Tensor direction;
  if (const at::Tensor tangent_of_a = tangent(a); tangent_of_a.defined())
    direction = function(tangent_of_a, primal(b));
  if (const at::Tensor tangent_of_b = tangent(b); tangent_of_b.defined()) {
    direction = accumulate(direction, function(primal(a), tangent_of_b));
  }
  set_tangent(output, direction);
  return output;
}

// ---------------------------------------------------------------------------------------- autocast
// For operators whose data and parameters share a dtype: the float32 parameters are cast to the
// dtype that autocast gave the data.

/// A parameter, or an optional one, in the dtype of `data`; cast once per autocast region.
template <typename Parameter>
Parameter follow(const Parameter& parameter, const at::Tensor& data) {
  return at::autocast::cached_cast(data.scalar_type(), parameter, data.device().type());
}

// -------------------------------------------------------------------------------------- norm chain
// LayerNorm and RMSNorm over the last dimension, without weight and bias, as chains of operators
// that have derivatives of every order.

struct Normed {
  at::Tensor rows, rstd;
};

/// @param centred  true for LayerNorm, which subtracts the mean
inline Normed norm_chain(const at::Tensor& x, bool centred, double eps) {
  const at::Tensor rows = centred ? at::sub(x, x.mean(-1, true)) : x;
  const at::Tensor rstd = at::rsqrt(at::add(at::square(rows).mean(-1, true), eps));
  return {at::mul(rows, rstd), rstd};
}

/// The gradient of x, from the gradient of the normalised rows.
inline at::Tensor norm_backward_chain(const Normed& x, bool centred, const at::Tensor& gradient) {
  const at::Tensor projection = at::mul(gradient, x.rows).mean(-1, true);
  at::Tensor rest = at::sub(gradient, at::mul(x.rows, projection));
  if (centred) rest = at::sub(rest, gradient.mean(-1, true));
  return at::mul(rest, x.rstd);
}

// ---------------------------------------------------------------------- derivatives from functions

/// An argument that a node keeps: a struct with fields as SavedCall, others as SavedField.
template <typename Argument, typename = void>
class SavedArgument {
 public:
  void save(const Argument& argument) { saved_ = SavedField<Argument>::save(argument); }
  Argument unpack() const { return SavedField<Argument>::unpack(saved_); }

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(saved_);
  }

 private:
  typename SavedField<Argument>::Type saved_{};
};

template <typename Call>
class SavedArgument<Call, std::enable_if_t<has_fields<Call>::value>> : public SavedCall<Call> {};

/// The gradients of an operator's results, of which at least one is defined.
class Gradients {
 public:
  /// @param needed  see OperatorNode::needed()
  Gradients(const variable_list& gradients, int64_t needed)
      : gradients_(gradients), needed_(needed) {}

  const at::Tensor& operator[](size_t result) const { return gradients_[result]; }
  size_t size() const { return gradients_.size(); }

  /// Whether the gradient of an input of node_for() is needed; others may stay undefined.
  bool needs(size_t input) const { return (needed_ >> input & 1) != 0; }

 private:
  const variable_list& gradients_;
  int64_t needed_;
};

/// 'alibi_bias' as 'AlibiBiasBackward'.
inline std::string name_of_node(std::string_view name) {
  std::string result;
  bool starts_word = true;
  for (const char letter : name) {
    if (letter != '_') result += static_cast<char>(starts_word ? letter - 'a' + 'A' : letter);
    starts_word = letter == '_';
  }
  return result + "Backward";
}

/// Made when it is asked for: a static of first use would take a lock.
template <auto& op>
struct NodeName {
  /* implicit */ operator std::string() const { return name_of_node(op.name()); }
};

/// The node of an operator, named after it. `function` takes the Gradients, then what save() keeps,
/// and returns the gradients of the inputs of node_for(). It calls registered operators only.
template <auto& op, auto function, typename = decltype(function)>
class FunctionNode;

template <auto& op, auto function, typename... Arguments>
class FunctionNode<op, function, variable_list (*)(const Gradients&, Arguments...)>
    : public OperatorNode<FunctionNode<op, function>> {
 public:
  static constexpr NodeName<op> label{};

  void save(const std::decay_t<Arguments>&... arguments) {
    std::apply([&](auto&... saved) { (saved.save(arguments), ...); }, saved_);
  }

  template <typename Visitor>
  void members(Visitor& visit) {
    std::apply([&](auto&... saved) { (saved.members(visit), ...); }, saved_);
  }

  /// Unpacks each argument once: checkpointing forbids a second time.
  variable_list backward(variable_list&& gradients) {
    const int64_t needed = this->needed();
    bool any = false;
    for (const at::Tensor& gradient : gradients) any = any || gradient.defined();
    if (!any) return variable_list(this->count_of(needed));
    return std::apply(
        [&](const auto&... saved) {
          return function(Gradients(gradients, needed), saved.unpack()...);
        },
        saved_);
  }

 private:
  std::tuple<SavedArgument<std::decay_t<Arguments>>...> saved_;
};

/// The shape and dtype of an operator's first argument.
struct Shape {
  std::vector<c10::SymInt> sizes;
  at::ScalarType dtype = at::kFloat;

  POSEMBED_FIELDS(self.sizes, self.dtype)
};

template <auto& op, auto transpose, typename Kernel>
struct Linear;

template <auto& op, auto transpose, typename... Rest>
struct Linear<op, transpose, at::Tensor (*)(const at::Tensor&, Rest...)> {
  static variable_list gradient(const Gradients& gradients, const Shape& shape,
                                const std::decay_t<Rest>&... rest) {
    return {transpose(gradients[0], shape, rest...)};
  }

  static at::Tensor kernel(const at::Tensor& input, Rest... rest) {
    auto node = node_for<FunctionNode<op, &gradient>>(input);
    if (node) node->save({input.sym_sizes().vec(), input.scalar_type()}, rest...);
    return linear(node, input, [&](const at::Tensor& other) { return op(other, rest...); });
  }
};

/// Registers the Autograd kernel of an operator that is linear in its first argument:
/// transpose(gradient, shape, rest…) is the gradient of that argument, which had this shape; `rest`
/// are the operator's other arguments.
template <auto& op, auto transpose>
void differentiate_linear(torch::Library& library) {
  using Kernel = typename std::decay_t<decltype(op)>::Kernel;
  op.template differentiate<Linear<op, transpose, Kernel>::kernel>(library);
}

}  // namespace posembed::dispatcher

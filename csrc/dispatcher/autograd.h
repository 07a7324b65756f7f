// Base class of autograd nodes in the form of PyTorch's generated nodes: torch::autograd::Function
// would be shorter but does not support torch.func. A derived node lists its members once, in
// members(), and inherits release, compiled autograd and locking.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace posembed::dispatcher {

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

}  // namespace posembed::dispatcher

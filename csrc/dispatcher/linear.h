// Derivatives from functions: an autograd node from a function of gradients and saved arguments,
// and all derivatives of an operator that is linear in its first argument from its transpose.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatcher/operator.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"

namespace posembed::dispatcher {

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

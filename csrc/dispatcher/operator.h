// An operator, declared once: an object that holds its name and C++ signature, calls it through the
// dispatcher, as Python does, and registers its kernels. Autograd, Meta kernels, autocast and
// functionalization thus apply to C++ and Python alike.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/cuda_launch.h"
#include "dispatcher/checks.h"
#include "dispatcher/declaration.h"
#include "dispatcher/fork.h"
#include "dispatcher/spread.h"

namespace posembed::dispatcher {

// --------------------------------------------------------------------------------------- arguments
// Visits an operator's arguments in the order of its schema, for rules that hold for all operators.

template <typename Argument, typename = void>
struct has_fields : std::false_type {};

template <typename Argument>
struct has_fields<Argument, std::void_t<decltype(Argument::fields(std::declval<Argument&>()))>>
    : std::true_type {};

/// Calls visit(argument, index), or does so for the fields of a struct; index counts arguments.
template <typename Visit, typename Argument>
void visit_argument(const Visit& visit, size_t* index, const Argument& argument) {
  if constexpr (has_fields<Argument>::value) {
    std::apply([&](const auto&... fields) { (visit_argument(visit, index, fields), ...); },
               Argument::fields(argument));
  } else {
    visit(argument, (*index)++);
  }
}

template <typename Visit, typename... Arguments>
void for_each_argument(const Visit& visit, const Arguments&... arguments) {
  size_t index = 0;
  (visit_argument(visit, &index, arguments), ...);
}

/// Calls visit(tensor, index) for the tensors among the arguments that are given.
template <typename Visit, typename... Arguments>
void for_each_tensor(const Visit& visit, const Arguments&... arguments) {
  for_each_argument(
      [&](const auto& argument, size_t index) {
        using Argument = std::decay_t<decltype(argument)>;
        if constexpr (std::is_same_v<Argument, at::Tensor>) {
          if (argument.defined()) visit(argument, index);
        } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
          if (argument.has_value() && argument->defined()) visit(*argument, index);
        }
      },
      arguments...);
}

/// Calls visit(index) for tensors that are required but not given: None in Python, which a schema
/// accepts as an undefined tensor.
template <typename Visit, typename... Arguments>
void for_each_missing(const Visit& visit, const Arguments&... arguments) {
  for_each_argument(
      [&](const auto& argument, size_t index) {
        if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, at::Tensor>) {
          if (!argument.defined()) visit(index);
        }
      },
      arguments...);
}

// ---------------------------------------------------------------------------------------- operator

/// torch makes a table in each file that calls operators, at its first use and under a lock. This
/// makes it while the library is loaded.
[[maybe_unused]] static const int made_while_loading =
    c10::DispatchKeySet(c10::DispatchKey::CPU).getDispatchTableIndexForDispatchKeySet();

/// The result of an operator from what its first half returned: the result itself, or a struct with
/// a member `result`; nothing for operators that write to their arguments.
template <typename Result, typename Work>
Result result_of(Work&& work) {
  if constexpr (std::is_void_v<Result>) {
    return;
  } else if constexpr (std::is_convertible_v<Work, Result>) {
    return std::forward<Work>(work);
  } else {
    return std::move(work.result);
  }
}

template <typename Schema, typename Function = typename Schema::Function>
class OperatorOf;

template <typename Schema, typename Result, typename... Arguments>
class OperatorOf<Schema, Result(Arguments...)> {
 public:
  using Kernel = Result (*)(Arguments...);

  /// @param name  without the namespace posembed; a string literal
  constexpr explicit OperatorOf(const char* name) : name_(name) {}

  const char* name() const { return name_; }

  Result operator()(Arguments... arguments) const {
    return Schema::call(found().typed, std::forward<Arguments>(arguments)...);
  }

  /// Registers the CPU, CUDA and Meta kernels as two halves of one: prepare(arguments…) checks what
  /// needs no values and allocates the result; compute(arguments…, prepared) fills it. If
  /// compute(arguments…) returns a result of its own, prepare returns its shape (Unallocated). The
  /// Meta kernel is the first half, so it raises the same errors.
  template <auto prepare, auto compute>
  void implement(torch::Library& library) const {
    on_devices(library, [this](Arguments... arguments) -> Result {
      check_tensors(arguments...);
      return computed<prepare, compute>(arguments...);
    });
    on(c10::DispatchKey::Meta, library, [this](Arguments... arguments) -> Result {
      check_tensors(arguments...);
      if constexpr (std::is_void_v<Work<prepare>>) {
        return prepare(arguments...);
      } else {
        return result_of<Result>(prepare(arguments...));
      }
    });
  }

  /// Registers a CPU and CUDA kernel whose result has sizes that depend on values. Its rule for
  /// unknown sizes is in Python (posembed/shapes.py).
  template <Kernel kernel>
  void implement_sized_by_values(torch::Library& library) const {
    on_devices(library, checked<kernel>());
  }

  /// Registers the Autograd kernel.
  template <Kernel kernel>
  void differentiate(torch::Library& library) const {
    on(c10::DispatchKey::Autograd, library, kernel);
  }

  /// Registers the Autograd kernel of operators that write to their arguments: they keep no history
  /// and increment the versions of what they write.
  void refuse_gradients(torch::Library& library) const {
    static_assert(std::is_void_v<Result>, "what is written in place is not returned");
    on(c10::DispatchKey::Autograd, library, [this](Arguments... arguments) -> Result {
      const Declaration& declaration = found().declaration;
      for_each_tensor(
          [&](const at::Tensor& tensor, size_t index) {
            if (has_history(tensor)) declaration.raise_history(tensor, index);
            if (declaration.writes(index)) check_versioned(tensor, declaration.name_of(index));
          },
          arguments...);
      {
        const at::AutoDispatchBelowADInplaceOrView below;
        (*this)(arguments...);
      }
      for_each_tensor(
          [&](const at::Tensor& tensor, size_t index) {
            if (declaration.writes(index)) tensor.unsafeGetTensorImpl()->bump_version();
          },
          arguments...);
    });
  }

  /// Registers `kernel` for autocast, which it runs without.
  template <Kernel kernel>
  void autocast(torch::Library& library) const {
    for (const auto key : {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}) {
      on(key, library, [](Arguments... arguments) -> Result {
        const c10::impl::ExcludeDispatchKeyGuard disabled(c10::autocast_dispatch_keyset);
        return kernel(std::forward<Arguments>(arguments)...);
      });
    }
  }

  /// Registers a composition of operators, whose gradients and Meta kernels come from its parts.
  template <Kernel kernel>
  void compose(torch::Library& library) const {
    on(c10::DispatchKey::CompositeImplicitAutograd, library, checked<kernel>());
  }

  /// The same for torch.func.vmap, which would otherwise run the operator sample by sample, with a
  /// warning.
  template <Kernel kernel>
  void compose_batched(torch::Library& library) const {
    compose<kernel>(library);
    on(c10::DispatchKey::FuncTorchBatchedDecomposition, library, checked<kernel>());
  }

 private:
  struct Found {
    explicit Found(const char* name)
        : declaration(name), typed(declaration.typed<typename Schema::Signature>()) {
      Schema::check(declaration);
    }

    Declaration declaration;
    c10::TypedOperatorHandle<typename Schema::Signature> typed;
  };

  template <auto prepare>
  using Work = std::invoke_result_t<decltype(prepare), std::add_lvalue_reference_t<Arguments>...>;

  template <auto prepare, auto compute>
  static Result computed(Arguments... arguments) {
    if constexpr (std::is_void_v<Work<prepare>>) {
      prepare(arguments...);
      return compute(arguments...);
    } else if constexpr (std::is_invocable_v<decltype(compute),
                                             std::add_lvalue_reference_t<Arguments>...>) {
      [[maybe_unused]] const auto checked = prepare(arguments...);
      return compute(arguments...);
    } else {
      auto work = prepare(arguments...);
      compute(arguments..., work);
      return result_of<Result>(std::move(work));
    }
  }

  template <Kernel kernel>
  auto checked() const {
    return [this](Arguments... arguments) -> Result {
      check_tensors(arguments...);
      return kernel(std::forward<Arguments>(arguments)...);
    };
  }

  template <typename Function>
  void on(c10::DispatchKey key, torch::Library& library, const Function& kernel) const {
    library.impl(name_, torch::dispatch(key, Schema::kernel(kernel)));
  }

  template <typename Function>
  void on_devices(torch::Library& library, const Function& kernel) const {
    on(c10::DispatchKey::CPU, library, kernel);
    if (core::built_with_cuda) on(c10::DispatchKey::CUDA, library, kernel);
  }

  /// Throws c10::TypeError for a required tensor that is undefined, and c10::ValueError unless all
  /// tensors are on the device of the first.
  void check_tensors(const std::decay_t<Arguments>&... arguments) const {
    for_each_missing([this](size_t index) { found().declaration.raise_missing(index); },
                     arguments...);
    const at::Tensor* first = nullptr;
    size_t first_index = 0;
    for_each_tensor(
        [&](const at::Tensor& tensor, size_t index) {
          if (first == nullptr) {
            first = &tensor;
            first_index = index;
          } else if (tensor.device() != first->device()) {
            found().declaration.raise_devices(*first, first_index, tensor, index);
          }
        },
        arguments...);
  }

  /// Looked up at the first call, because other files may define the schema later.
  const Found& found() const {
    return found_.get([this] { return Found(name_); });
  }

  const char* name_;
  FirstUse<Found> found_;
};

/// An operator that takes the arguments of `Function`, then the fields of `Call` (spread.h), if
/// there is one, then `Trailing`.
template <typename Function, typename Call = void, typename... Trailing>
using Operator = OperatorOf<Spread<Function, Call, Trailing...>>;

}  // namespace posembed::dispatcher

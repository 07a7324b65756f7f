// An operator, declared once: an object that holds its name and C++ signature, calls it through the
// dispatcher, as Python does, and registers its kernels. Autograd, Meta kernels, autocast and
// functionalization thus apply to C++ and Python alike.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>

#include "core/cuda_launch.h"
#include "dispatcher/inference_only.h"
#include "dispatcher/one_device.h"
#include "dispatcher/spread.h"

namespace posembed::dispatcher {

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

  Result operator()(Arguments... arguments) const {
    return Schema::call(handle(), std::forward<Arguments>(arguments)...);
  }

  /// Registers the CPU, CUDA and Meta kernels as two halves of one: prepare(arguments…) checks what
  /// needs no values and allocates the result; compute(arguments…, prepared) fills it. If
  /// compute(arguments…) returns a result of its own, prepare returns its shape (Unallocated). The
  /// Meta kernel is the first half, so it raises the same errors.
  template <auto prepare, auto compute>
  void implement(torch::Library& library) const {
    registered<prepare> = this;
    on_devices(library, Schema::template kernel<eager<prepare, compute>>);
    on(c10::DispatchKey::Meta, library, Schema::template kernel<meta<prepare>>);
  }

  /// Registers a CPU and CUDA kernel whose result has sizes that depend on values. Its rule for
  /// unknown sizes is in Python (posembed/shapes.py).
  template <Kernel kernel>
  void implement_sized_by_values(torch::Library& library) const {
    registered<kernel> = this;
    on_devices(library, Schema::template kernel<checked<kernel>>);
  }

  /// Registers the Autograd kernel.
  template <Kernel kernel>
  void differentiate(torch::Library& library) const {
    on(c10::DispatchKey::Autograd, library, Schema::template kernel<kernel>);
  }

  /// Registers the Autograd kernel of operators that write to their arguments and keep no history.
  void refuse_gradients(torch::Library& library) const {
    library.impl(name_,
                 torch::dispatch(c10::DispatchKey::Autograd,
                                 torch::CppFunction::makeFromBoxedFunction<&inference_only>()));
  }

  /// Registers `kernel` for autocast, which it runs without.
  template <Kernel kernel>
  void autocast(torch::Library& library) const {
    on(c10::DispatchKey::AutocastCPU, library, Schema::template kernel<without_autocast<kernel>>);
    on(c10::DispatchKey::AutocastCUDA, library, Schema::template kernel<without_autocast<kernel>>);
  }

  /// Registers a composition of operators, whose gradients and Meta kernels come from its parts.
  template <Kernel kernel>
  void compose(torch::Library& library) const {
    registered<kernel> = this;
    on(c10::DispatchKey::CompositeImplicitAutograd, library,
       Schema::template kernel<checked<kernel>>);
  }

  /// The same for torch.func.vmap, which would otherwise run the operator sample by sample, with a
  /// warning.
  template <Kernel kernel>
  void compose_batched(torch::Library& library) const {
    compose<kernel>(library);
    on(c10::DispatchKey::FuncTorchBatchedDecomposition, library,
       Schema::template kernel<checked<kernel>>);
  }

 private:
  using Handle = c10::TypedOperatorHandle<typename Schema::Signature>;

  /// The object that registered a kernel, for the names of its arguments.
  template <auto kernel>
  static inline const OperatorOf* registered = nullptr;

  template <auto prepare, auto compute>
  static Result eager(Arguments... arguments) {
    registered<prepare>->check_device(arguments...);
    using Work = std::invoke_result_t<decltype(prepare), Arguments&...>;
    if constexpr (std::is_void_v<Work>) {
      prepare(arguments...);
      return compute(arguments...);
    } else if constexpr (std::is_invocable_v<decltype(compute), Arguments&...>) {
      [[maybe_unused]] const auto work = prepare(arguments...);
      return compute(arguments...);
    } else {
      auto work = prepare(arguments...);
      compute(arguments..., work);
      return result_of<Result>(std::move(work));
    }
  }

  template <auto prepare>
  static Result meta(Arguments... arguments) {
    registered<prepare>->check_device(arguments...);
    if constexpr (std::is_void_v<std::invoke_result_t<decltype(prepare), Arguments&...>>) {
      return prepare(arguments...);
    } else {
      return result_of<Result>(prepare(arguments...));
    }
  }

  template <Kernel kernel>
  static Result checked(Arguments... arguments) {
    registered<kernel>->check_device(arguments...);
    return kernel(std::forward<Arguments>(arguments)...);
  }

  template <Kernel kernel>
  static Result without_autocast(Arguments... arguments) {
    const c10::impl::ExcludeDispatchKeyGuard disabled(c10::autocast_dispatch_keyset);
    return kernel(std::forward<Arguments>(arguments)...);
  }

  template <typename Function>
  void on(c10::DispatchKey key, torch::Library& library, Function* kernel) const {
    library.impl(name_, torch::dispatch(key, kernel));
  }

  template <typename Function>
  void on_devices(torch::Library& library, Function* kernel) const {
    on(c10::DispatchKey::CPU, library, kernel);
    if (core::built_with_cuda) on(c10::DispatchKey::CUDA, library, kernel);
  }

  /// Throws c10::ValueError unless all tensors are on the device of the first.
  void check_device(const std::decay_t<Arguments>&... arguments) const {
    OneDevice devices;
    (devices.add(arguments), ...);
    if (devices.other()) devices.raise(handle().schema());
  }

  /// Looked up at the first call, because other files may define the schema later. Without a lock,
  /// which a fork could copy locked.
  const Handle& handle() const {
    const Handle* found = handle_.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    auto made = std::make_unique<const Handle>(c10::Dispatcher::singleton()
                                                   .findSchemaOrThrow(full_name().c_str(), "")
                                                   .template typed<typename Schema::Signature>());
    if (handle_.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
      return *made.release();
    }
    return *found;
  }

  std::string full_name() const { return std::string("posembed::") + name_; }

  const char* name_;
  mutable std::atomic<const Handle*> handle_{nullptr};
};

/// An operator that takes the arguments of `Function`, then the fields of `Call` (spread.h), if
/// there is one, then `Trailing`.
template <typename Function, typename Call = void, typename... Trailing>
using Operator = OperatorOf<Spread<Function, Call, Trailing...>>;

}  // namespace posembed::dispatcher

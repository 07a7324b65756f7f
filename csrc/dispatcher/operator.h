// An operator, declared once: an object that holds its name and C++ signature, calls it through the
// dispatcher, as Python does, and registers its kernels. Autograd, Meta kernels, autocast and
// functionalization thus apply to C++ and Python alike.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/brief.h"
#include "core/cuda_launch.h"
#include "dispatcher/checks.h"
#include "dispatcher/fork.h"
#include "posembed/given.h"
#include "posembed/offset.h"

namespace posembed::dispatcher {

// ------------------------------------------------------------------------------------- declaration
// What a schema says, looked up once: its handle, the names of its arguments and which of them it
// writes.

/// The operator posembed::<name>, and a bit for each argument that its schema marks as written.
class Declaration {
 public:
  explicit Declaration(const char* name);

  template <typename Signature>
  c10::TypedOperatorHandle<Signature> typed() const {
    return operator_.typed<Signature>();
  }

  const char* name_of(size_t argument) const {
    return operator_.schema().arguments()[argument].name().c_str();
  }

  bool writes(size_t argument) const { return (written_ >> argument & 1) != 0; }

  /// Fails unless the arguments from `first` on have these names: "self.ids, self.offset()".
  void check_names(std::string_view expressions, size_t first) const;

  /// Throws c10::TypeError for a required tensor that is undefined.
  [[noreturn]] void raise_missing(size_t argument) const;

  /// Throws c10::ValueError for tensors on two devices: `other` is not on that of `first`.
  [[noreturn]] void raise_devices(const at::Tensor& first, size_t first_argument,
                                  const at::Tensor& other, size_t other_argument) const;

  /// Throws c10::ValueError for a tensor whose gradient or tangent would be lost. Refers from
  /// posembed::f_ and posembed::f_out to posembed::f.
  [[noreturn]] void raise_history(const at::Tensor& tensor, size_t argument) const;

 private:
  c10::OperatorHandle operator_;
  uint64_t written_ = 0;
};

// ------------------------------------------------------------------------------------ registration
// Families register schemas with TORCH_LIBRARY_FRAGMENT(posembed, m) in x_operator.cpp. `spec` is
// the JSON text of a specification: numbers that no dtype cast can change. Lengths and offsets are
// SymInt, so that a compiled graph serves every length. Operators without tensor arguments take a
// device, as FakeTensorMode requires. "(a!)" marks a tensor that the operator writes to; such
// operators return nothing, which functionalization expects.

// torch's conjugate and negative bits: views such as x.conj() and x.conj().imag, whose memory
// differs from their values. torch's own rule expects that operators return what they write, which
// posembed's do not.

/// Registers one rule for the operator of a schema: arguments that it reads are resolved; one that
/// it writes raises c10::ValueError, because a copy would be written instead.
void define_math_bits(torch::Library& library, const std::string& schema);

/// Defines an operator: its name and its arguments, then its result.
inline void define(torch::Library& library, const std::string& schema) {
  library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  define_math_bits(library, schema);
}

// ---------------------------------------------------------------------------- structs of arguments
// Derives the C++ signatures of a family's operators from a struct of arguments, which names its
// fields once, in the order of the schemas: POSEMBED_FIELDS(self.ids, self.offset())

// ------------------------------------------------------------------------------------- schema type
// How schemas pass the fields of a struct of arguments: an enum as its name, an Offset as a SymInt,
// a Given<T> as T, everything else unchanged.

/// An enum's argument, and the name of each value, from 0. Specialise it beside the operators that
/// take the enum:
///   static constexpr const char* argument = "layout";
///   static constexpr const char* names[] = {"bshd", …};
template <typename Enum>
struct EnumArgument;

/// The value of an enum by its name. Throws c10::ValueError for an unknown one.
template <typename Enum>
Enum enum_from(std::string_view text) {
  return static_cast<Enum>(index_of(text, EnumArgument<Enum>::argument, EnumArgument<Enum>::names));
}

template <typename Enum>
const char* name_of(Enum value) {
  return EnumArgument<Enum>::names[static_cast<size_t>(value)];
}

/// The type in which a schema passes a field, and the conversions.
template <typename Field, typename = void>
struct SchemaType {
  using Type = Field;
  static const Field& to(const Field& field) { return field; }
  static Field from(Type value) { return value; }
};

template <typename Field>
struct SchemaType<Field, std::enable_if_t<std::is_same_v<Field, at::Tensor> ||
                                          std::is_same_v<Field, std::optional<at::Tensor>>>> {
  using Type = const Field&;
  static Type to(Type field) { return field; }
  static Type from(Type value) { return value; }
};

template <>
struct SchemaType<std::string> {
  using Type = std::string_view;
  static Type to(const std::string& field) { return field; }
  static std::string from(Type value) { return std::string(value); }
};

template <typename Enum>
struct SchemaType<Enum, std::enable_if_t<std::is_enum_v<Enum>>> {
  using Type = std::string_view;
  static Type to(Enum field) { return name_of(field); }
  static Enum from(Type value) { return enum_from<Enum>(value); }
};

template <typename T>
struct SchemaType<Given<T>> : SchemaType<T> {};

template <>
struct SchemaType<Offset> {
  using Type = c10::SymInt;
  static const c10::SymInt& to(const Offset& field) { return field.number(); }
  static Offset from(Type value) { return Offset(std::move(value)); }
};

}  // namespace posembed::dispatcher

// ------------------------------------------------------------------------------------------ spread

/// Members of a struct of arguments: a tuple of references to its fields, and their names, which
/// are compared with the schema's.
#define POSEMBED_FIELDS(...)                               \
  static constexpr const char* field_names = #__VA_ARGS__; \
  template <typename Self>                                 \
  static auto fields(Self& self) {                         \
    return std::tie(__VA_ARGS__);                          \
  }

namespace posembed::dispatcher {

/// std::tuple of references to the fields of `Call`.
template <typename Call>
using FieldsOf = decltype(Call::fields(std::declval<Call&>()));

template <typename Field>
using Schema = SchemaType<std::decay_t<Field>>;

template <typename Call, typename Fields, typename Function, typename... Trailing>
struct SpreadFields;

template <typename Call, typename... Fields, typename Result, typename... Leading,
          typename... Trailing>
struct SpreadFields<Call, std::tuple<Fields...>, Result(Leading...), Trailing...> {
  /// What kernels and callers see, and what the dispatcher sees.
  using Function = Result(Leading..., const Call&, Trailing...);
  using Signature = Result(Leading..., typename Schema<Fields>::Type..., Trailing...);

  static void check(const Declaration& declaration) {
    declaration.check_names(Call::field_names, sizeof...(Leading));
  }

  /// The kernel to register: `function` with a parameter for each field.
  template <typename Kernel>
  static auto kernel(const Kernel& function) {
    return [function](Leading... leading, typename Schema<Fields>::Type... fields,
                      Trailing... trailing) -> Result {
      Call call;
      Call::fields(call) = std::forward_as_tuple(
          Schema<Fields>::from(std::forward<typename Schema<Fields>::Type>(fields))...);
      return function(leading..., call, trailing...);
    };
  }

  /// Calls the operator.
  static Result call(const c10::TypedOperatorHandle<Signature>& handle, Leading... leading,
                     const Call& call, Trailing... trailing) {
    return std::apply(
        [&](const auto&... fields) -> Result {
          return handle.call(leading..., Schema<Fields>::to(fields)..., trailing...);
        },
        Call::fields(call));
  }
};

/// The signature of operators that take the arguments of `Function`, then the fields of `Call`,
/// then `Trailing`, and return the result of `Function`.
template <typename Function, typename Call, typename... Trailing>
struct Spread : SpreadFields<Call, FieldsOf<Call>, Function, Trailing...> {};

/// The same without a struct.
template <typename Result, typename... Arguments>
struct Spread<Result(Arguments...), void> {
  using Function = Result(Arguments...);
  using Signature = Result(Arguments...);

  static void check(const Declaration&) {}

  template <typename Kernel>
  static auto kernel(const Kernel& function) {
    return [function](Arguments... arguments) -> Result {
      return function(std::forward<Arguments>(arguments)...);
    };
  }

  static Result call(const c10::TypedOperatorHandle<Signature>& handle, Arguments... arguments) {
    return handle.call(std::forward<Arguments>(arguments)...);
  }
};

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

/// An operator that takes the arguments of `Function`, then the fields of `Call`, if
/// there is one, then `Trailing`.
template <typename Function, typename Call = void, typename... Trailing>
using Operator = OperatorOf<Spread<Function, Call, Trailing...>>;

}  // namespace posembed::dispatcher

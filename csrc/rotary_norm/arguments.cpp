#include "rotary_norm/arguments.h"

#include <array>
#include <cmath>
#include <utility>

#include "dispatcher/checks.h"
#include "dispatcher/tensors.h"
#include "rotary/arguments.h"

namespace posembed::rotary_norm {
namespace {

/// A parameter of the norm, its name and the tensor that it belongs to.
struct Parameter {
  const MaybeTensor& tensor;
  const char* argument;
  const Tensor& rows;
};

std::array<Parameter, 4> parameters_of(const Call& call) {
  const NormRotaryCall& options = call.options;
  return {{{call.query_weight, "query_weight", call.query},
           {call.key_weight, "key_weight", call.key},
           {options.query_bias(), "query_bias", call.query},
           {options.key_bias(), "key_bias", call.key}}};
}

void check_parameter(const Parameter& parameter, const Call& call) {
  if (!parameter.tensor.has_value()) return;
  // weight, bias: [head_dim], or [heads * head_dim] of a norm over all heads
  const Tensor& tensor = *parameter.tensor;
  const char* const argument = parameter.argument;
  const bool all_heads = call.options.all_heads();
  dispatcher::check_rank(tensor, argument, 1, all_heads ? "[heads * head_dim]" : "[head_dim]");
  if (tensor.scalar_type() != at::kFloat || call.query.scalar_type() == at::kDouble) {
    dispatcher::check_same_dtype(tensor, argument, call.query, "query");
  }
  const Tensor& first = *any_parameter(call);
  TORCH_CHECK_TYPE(tensor.scalar_type() == first.scalar_type(), argument, ": expected ",
                   dispatcher::dtype_name(first.scalar_type()),
                   ", as of the other parameters, got ",
                   dispatcher::dtype_name(tensor.scalar_type()));
  const int64_t heads = rotary::dimensions(call.options.layout()).heads;
  const c10::SymInt size =
      call.query.sym_size(-1) * (all_heads ? parameter.rows.sym_size(heads) : c10::SymInt(1));
  dispatcher::check_size(tensor.sym_size(0), size, argument,
                         all_heads ? "heads * head_dim" : "head_dim");
}

}  // namespace

const Tensor* any_parameter(const Call& call) {
  for (const Parameter& parameter : parameters_of(call)) {
    if (parameter.tensor.has_value()) return &*parameter.tensor;
  }
  return nullptr;
}

void check_parameters(const Call& call) {
  const NormRotaryCall& options = call.options;
  for (const Parameter& parameter : parameters_of(call)) check_parameter(parameter, call);
  for (const auto& [bias, argument] : {std::pair(&options.query_bias(), "query_bias"),
                                       std::pair(&options.key_bias(), "key_bias")}) {
    TORCH_CHECK_VALUE(!bias->has_value() || options.centred(), argument,
                      ": expected none without LayerNorm");
  }
  dispatcher::check_eps(options.eps());
  TORCH_CHECK_VALUE(std::isfinite(options.weight_offset()),
                    "weight_offset: expected a finite number, got ", options.weight_offset());
  const bool weighted = call.query_weight.has_value() || call.key_weight.has_value();
  TORCH_CHECK_VALUE(options.weight_offset() == 0 || weighted,
                    "weight_offset: expected 0 without weights, got ", options.weight_offset());
}

void set_norm(const Call& call, Parameters* parameters, Arguments* result) {
  Arguments& arguments = *result;
  const std::array<Parameter, 4> all = parameters_of(call);
  arguments.parameter_scalar = arguments.rotation.scalar;
  for (size_t i = 0; i < 4; ++i) {
    if (!all[i].tensor.has_value()) continue;
    const Tensor& parameter = parameters->tensor[i] = all[i].tensor->contiguous();
    (i < 2 ? arguments.weight : arguments.bias)[i % 2] = parameter.const_data_ptr();
    arguments.parameter_scalar = dispatcher::scalar_of(parameter);
  }
  arguments.centred = call.options.centred();
  arguments.all_heads = call.options.all_heads();
  arguments.weight_offset = call.options.weight_offset();
  arguments.eps = call.options.eps();
}

}  // namespace posembed::rotary_norm

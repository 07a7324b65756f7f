// A step on rows: state and options are checked against the rule before anything is written.
#include "optim/optim_operator.h"

#include <cmath>

#include "core/index.h"
#include "core/philox.h"
#include "dispatcher/launch.h"
#include "optim/optim.h"

namespace posembed::optim {
namespace {

using MaybeTensor = std::optional<Tensor>;

bool is_adam(StepRule rule) { return rule == StepRule::adam || rule == StepRule::rowwise_adam; }
bool is_rowwise(StepRule rule) {
  return rule == StepRule::rowwise_adagrad || rule == StepRule::rowwise_adam;
}

// ------------------------------------------------------------------------------------- checks

void check_number(double value, const char* argument, double limit = INFINITY) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0 && value <= limit, argument,
                    ": expected a finite number of at least 0",
                    limit < INFINITY ? " and at most 1" : "", ", got ", value);
}

void check_options(const RowStep& step) {
  check_number(step.lr(), "lr");
  check_number(step.first_decay(), "first_decay", 1.0);
  check_number(step.second_decay(), "second_decay", 1.0);
  const bool decays = step.first_decay() < 1.0 && step.second_decay() < 1.0;
  TORCH_CHECK_VALUE(!is_adam(step.rule()) || decays,
                    "first_decay: expected decays below 1 for Adam, got ", step.first_decay(),
                    " and ", step.second_decay());
  check_number(step.eps(), "eps");
  check_number(step.weight_decay(), "weight_decay");
  TORCH_CHECK_VALUE(std::isfinite(step.gradient_scale()),
                    "gradient_scale: expected a finite number, got ", step.gradient_scale());
  dispatcher::check_at_least(step.step(), 1, "step");
  dispatcher::check_at_least(step.first_row(), 0, "first_row");
}

/// State of the rule: [rows, dim], or [rows] if not `wide`.
void check_state(const MaybeTensor& state, const char* argument, bool needed, bool wide,
                 at::ScalarType type, const Call& call) {
  TORCH_CHECK_VALUE(state.has_value() == needed, argument, ": expected ", needed ? "state" : "none",
                    " for rule '", name(call.step.rule()), "' and rounding '",
                    name(call.step.rounding()), "', got ", needed ? "none" : "state");
  if (!needed) return;
  TORCH_CHECK_TYPE(state->scalar_type() == type, argument, ": expected ",
                   dispatcher::dtype_name(type), ", got ",
                   dispatcher::dtype_name(state->scalar_type()));
  const auto sizes = call.weight.sym_sizes();
  TORCH_CHECK_VALUE(state->sym_sizes() == (wide ? sizes : sizes.slice(0, 1)), argument,
                    ": expected the shape ", wide ? sizes : sizes.slice(0, 1), ", got ",
                    state->sym_sizes());
  TORCH_CHECK_VALUE(state->is_contiguous(), argument, ": expected contiguous memory, got strides ",
                    state->sym_strides());
}

void check_weight(const Tensor& weight) {
  TORCH_CHECK_TYPE(weight.scalar_type() != at::kHalf,
                   "weight: expected float32, float64 or bfloat16, got float16, whose smallest "
                   "number is too large for small steps");
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[rows, dim]");
  dispatcher::check_writable(weight, "weight");
}

void check_gradient(const Call& call) {
  // gradient: [count, dim]
  const Tensor& gradient = call.gradient;
  const bool wide = call.weight.scalar_type() == at::kBFloat16;
  if (!wide || gradient.scalar_type() != at::kFloat) {
    dispatcher::check_same_dtype(gradient, "gradient", call.weight, "weight");
  }
  dispatcher::check_rank(gradient, "gradient", 2, "[count, dim]");
  dispatcher::check_size(gradient.sym_size(1), call.weight.sym_size(1), "gradient", "dim");
  const MaybeTensor& ids = call.step.ids();
  if (!ids.has_value()) {
    dispatcher::check_size(gradient.sym_size(0), call.weight.sym_size(0), "gradient", "rows");
    return;
  }
  dispatcher::check_integers(*ids, "ids");
  dispatcher::check_rank(*ids, "ids", 1, "[count]");
  dispatcher::check_size(ids->sym_size(0), gradient.sym_size(0), "ids", "count");
}

void check(const Call& call) {
  const RowStep& step = call.step;
  check_options(step);
  check_weight(call.weight);
  check_gradient(call);
  const at::ScalarType compute = dispatcher::compute_type(call.weight);
  const bool momentum = step.rule() == StepRule::sgd && step.first().has_value();
  check_state(step.first(), "first", is_adam(step.rule()) || momentum, true, compute, call);
  check_state(step.second(), "second", step.rule() != StepRule::sgd, !is_rowwise(step.rule()),
              compute, call);
  TORCH_CHECK_VALUE(step.rule() != StepRule::sgd || momentum || step.first_decay() == 0.0,
                    "first: expected state for momentum ", step.first_decay(), ", got none");
  TORCH_CHECK_TYPE(
      step.rounding() == StepRounding::nearest || call.weight.scalar_type() == at::kBFloat16,
      "weight: expected bfloat16 for rounding '", name(step.rounding()), "', got ",
      dispatcher::dtype_name(call.weight.scalar_type()));
  check_state(step.remainder(), "remainder", step.rounding() == StepRounding::remainder, true,
              at::kShort, call);
  if (!step.owed().has_value()) return;
  TORCH_CHECK_TYPE(step.owed()->scalar_type() == compute, "owed: expected ",
                   dispatcher::dtype_name(compute), ", got ",
                   dispatcher::dtype_name(step.owed()->scalar_type()));
  dispatcher::check_rank(*step.owed(), "owed", 2, "[count, 3]");
  dispatcher::check_size(step.owed()->sym_size(0), call.gradient.sym_size(0), "owed", "count");
  dispatcher::check_size(step.owed()->sym_size(1), 3, "owed", "columns");
}

/// Checks that no tensor that is written shares memory with another.
void check_memory(const Call& call) {
  struct Named {
    const Tensor* tensor;
    const char* name;
    bool written;
  };
  const auto given = [](const MaybeTensor& tensor) { return tensor ? &*tensor : nullptr; };
  const RowStep& step = call.step;
  const Named all[] = {
      {&call.weight, "weight", true},         {given(step.first()), "first", true},
      {given(step.second()), "second", true}, {given(step.remainder()), "remainder", true},
      {&call.gradient, "gradient", false},    {given(step.ids()), "ids", false},
      {given(step.owed()), "owed", false}};
  for (const Named& written : all) {
    if (written.tensor == nullptr || !written.written) continue;
    for (const Named* other = &written + 1; other != std::end(all); ++other) {
      if (other->tensor == nullptr) continue;
      dispatcher::check_no_overlap(*written.tensor, written.name, *other->tensor, other->name);
    }
  }
}

/// Checks on the CPU that ids are rows and ascend, before anything is written.
void check_ids(const Tensor& ids, int64_t rows) {
  const core::IndexView view = dispatcher::index_view(ids);
  const int64_t count = ids.numel(), outside = core::find_outside(view, count, 0, rows);
  TORCH_CHECK_INDEX(outside < 0, "ids: expected 0 to ", rows - 1, ", a row of the table, got ",
                    core::read(view, outside), " at index ", outside);
  for (int64_t i = 1; i < count; ++i) {
    const int64_t before = core::read(view, i - 1), row = core::read(view, i);
    TORCH_CHECK_VALUE(before < row, "ids: expected ascending rows, each once, got ", row, " after ",
                      before, " at index ", i);
  }
}

// --------------------------------------------------------------------------------- the kernel

Numbers numbers_of(const RowStep& step) {
  Numbers numbers;
  numbers.gradient_scale = step.gradient_scale();
  numbers.eps = step.eps();
  numbers.rate = step.lr();
  numbers.keep = 1.0 - step.lr() * step.weight_decay();
  numbers.first_decay = step.first_decay();
  numbers.second_decay = is_adam(step.rule()) ? step.second_decay() : 1.0;
  if (!is_adam(step.rule())) return numbers;
  numbers.first_weight = 1.0 - step.first_decay();
  numbers.second_weight = 1.0 - step.second_decay();
  const auto corrected = [&](double decay) {
    return 1.0 - std::pow(decay, static_cast<double>(step.step()));
  };
  numbers.rate /= corrected(step.first_decay());
  if (step.rule() == StepRule::adam) {  // as torch, which adds eps before the correction
    numbers.rate *= std::sqrt(corrected(step.second_decay()));
  } else {
    numbers.second_scale = 1.0 / corrected(step.second_decay());
  }
  return numbers;
}

uint64_t key_of(const RowStep& step) {
  const auto random =
      core::philox(static_cast<uint64_t>(step.seed()), static_cast<uint64_t>(step.step()));
  return random.words[0] | uint64_t{random.words[1]} << 32;
}

void* data_of(const MaybeTensor& tensor) {
  return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr;
}

void step_on_rows(const Call& call) {
  const RowStep& step = call.step;
  check_memory(call);
  Arguments arguments;
  Tensor ids, owed;
  if (step.ids().has_value()) {
    ids = step.ids()->contiguous();
    if (!dispatcher::on_cuda(call.weight)) check_ids(ids, call.weight.size(0));
    arguments.ids = dispatcher::index_view(ids);
  }
  if (step.owed().has_value()) {
    owed = step.owed()->contiguous();
    arguments.owed = owed.const_data_ptr();
  }
  const Tensor gradient = dispatcher::with_contiguous_last_dim(call.gradient);
  arguments.weight = call.weight.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(call.weight);
  arguments.rows = call.weight.size(0);
  arguments.dim = call.weight.size(1);
  arguments.weight_stride = call.weight.stride(0);
  arguments.gradient = gradient.const_data_ptr();
  arguments.gradient_stride = gradient.stride(0);
  arguments.wide_gradient = gradient.scalar_type() != call.weight.scalar_type();
  arguments.count = gradient.size(0);
  arguments.first = data_of(step.first());
  arguments.second = data_of(step.second());
  arguments.second_of_rows = is_rowwise(step.rule());
  arguments.numbers = numbers_of(step);
  arguments.store = static_cast<Store>(step.rounding());
  arguments.remainder = static_cast<int16_t*>(data_of(step.remainder()));
  arguments.key = key_of(step);
  arguments.first_row = step.first_row();
  arguments.error = dispatcher::device_error(call.weight.device());
  if (arguments.dim == 0) return;
  const int64_t elements = arguments.dim * (3 + 2 * int64_t{step.first().has_value()});
  dispatcher::launch(arguments, call.weight, arguments.count,
                     elements * core::size_of(arguments.scalar), step_cpu,
                     POSEMBED_CUDA_LAUNCHER(step_cuda));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  posembed::dispatcher::define(m,
                               "step_rows_("
                               "Tensor(a!) weight, "
                               "Tensor gradient, "
                               "str rule, "
                               "float lr, "
                               "int step=1, "
                               "Tensor? ids=None, "
                               "Tensor(b!)? first=None, "
                               "Tensor(c!)? second=None, "
                               "Tensor? owed=None, "
                               "Tensor(d!)? remainder=None, "
                               "float first_decay=0.0, "
                               "float second_decay=0.0, "
                               "float eps=1e-8, "
                               "float weight_decay=0.0, "
                               "float gradient_scale=1.0, "
                               "str rounding=\"nearest\", "
                               "int seed=0, "
                               "int first_row=0) -> ()");
  step_rows_.implement<check, step_on_rows>(m);
  step_rows_.refuse_gradients(m);
}

}  // namespace posembed::optim

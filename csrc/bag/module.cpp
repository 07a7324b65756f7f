// TokenBag and functional::token_bag: thin wrappers around the operators.
#include <ostream>

#include "bag/operator.h"
#include "posembed/bag.h"
#include "token/table_module.h"

namespace posembed {

const char* name(BagMode mode) {
  if (mode == BagMode::sum) return "sum";
  return mode == BagMode::mean ? "mean" : "max";
}

torch::Tensor functional::token_bag(const torch::Tensor& ids, const torch::Tensor& weight,
                                    const BagCall& call) {
  return bag::token_bag(
      weight, {ids, call.offsets(), call.padding_idx().value_or(-1), call.include_last_offset()},
      posembed::name(call.mode()), call.weights(), posembed::name(call.gradient()));
}

TokenBagImpl::TokenBagImpl(TokenBagOptions options_) : options(std::move(options_)) {
  TokenBagImpl::reset();
}

void TokenBagImpl::reset() {
  token::check_table_options(options);
  token::reset_table(*this);
}

void TokenBagImpl::reset_parameters() { token::reset_table_parameters(*this); }

void TokenBagImpl::pretty_print(std::ostream& stream) const {
  stream << "TokenBag(" << options.num_embeddings() << ", " << options.embedding_dim() << ", mode='"
         << posembed::name(options.mode()) << "'";
  if (options.padding_idx().has_value()) stream << ", padding_idx=" << *options.padding_idx();
  if (options.include_last_offset()) stream << ", include_last_offset=True";
  if (options.gradient() == TableGradient::rows) stream << ", gradient='rows'";
  stream << ")";
}

torch::Tensor TokenBagImpl::forward(const torch::Tensor& ids,
                                    const std::optional<torch::Tensor>& offsets,
                                    const std::optional<torch::Tensor>& weights) {
  return functional::token_bag(ids, weight,
                               BagCall()
                                   .offsets(offsets)
                                   .weights(weights)
                                   .mode(options.mode())
                                   .padding_idx(options.padding_idx())
                                   .include_last_offset(options.include_last_offset())
                                   .gradient(options.gradient()));
}

TokenBag TokenBag::from_pretrained(const torch::Tensor& weight, bool freeze,
                                   TokenBagOptions options) {
  return token::over_table<TokenBag>(weight, freeze, std::move(options));
}

}  // namespace posembed

// TokenBag and functional::token_bag: thin wrappers around the operators.

#include <ostream>

#include "bag/bag_operator.h"
#include "posembed/bag.h"
#include "pretrained/source.h"
#include "token/token_operator.h"

namespace posembed {

const char* name(BagMode mode) { return dispatcher::name_of(mode); }

torch::Tensor functional::token_bag(const torch::Tensor& ids, const torch::Tensor& weight,
                                    const BagCall& call) {
  return bag::token_bag(
      weight, {ids, call.offsets(), call.padding_idx().value_or(-1), call.include_last_offset()},
      posembed::name(call.mode()), call.weights(), posembed::name(call.gradient()));
}

torch::Tensor functional::token_bag(const torch::Tensor& ids, const QuantizedRows& rows,
                                    const BagCall& call, torch::Dtype dtype) {
  // The rows of all ids become a table of their own, with one more row for padding.
  const torch::Dtype wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const torch::Tensor flat = ids.reshape(-1);
  const int64_t padding = call.padding_idx().value_or(-1);
  const torch::Tensor weight =
      functional::embedding(at::cat({flat, flat.new_zeros({1})}), rows, 1.0, wide);
  const torch::Tensor places = at::arange(flat.numel(), flat.options().dtype(at::kLong));
  BagCall inner = call;
  inner.padding_idx(flat.numel());
  if (call.weights().has_value()) inner.weights(call.weights()->to(wide));
  const torch::Tensor kept = at::where(flat.eq(padding), flat.numel(), places).view(ids.sizes());
  return functional::token_bag(kept, weight, inner).to(dtype);
}

TokenBagImpl::TokenBagImpl(TokenBagOptions options_) : options(std::move(options_)) {
  TokenBagImpl::reset();
}

void TokenBagImpl::reset() {
  token::check_table_options(options);
  if (table.is_empty()) {
    token::reset_table(*this);
  } else {
    table = register_module("table", token::same_codes(table));
  }
}

void TokenBagImpl::quantize(const std::string& format, int64_t block) {
  table = register_module("table", token::codes_of(*this, format, block));
  parameters_.erase("weight");
  weight = torch::Tensor();
}

int64_t TokenBagImpl::memory() const { return token::table_bytes(*this); }

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
  const BagCall call = BagCall()
                           .offsets(offsets)
                           .weights(weights)
                           .mode(options.mode())
                           .padding_idx(options.padding_idx())
                           .include_last_offset(options.include_last_offset())
                           .gradient(options.gradient());
  return table.is_empty() ? functional::token_bag(ids, weight, call)
                          : functional::token_bag(ids, table->rows, call, table->dtype);
}

TokenBag TokenBag::from_pretrained(const torch::Tensor& weight, bool freeze,
                                   TokenBagOptions options) {
  return token::over_table<TokenBag>(weight, freeze, std::move(options));
}

TokenBag TokenBag::from_file(const std::string& path,
                             const std::optional<std::vector<std::string>>& vocabulary,
                             const pretrained::ReadOptions& read, bool freeze,
                             TokenBagOptions options, const pretrained::OpenOptions& open) {
  const torch::Tensor table = pretrained::table_from_file(path, vocabulary, read, open);
  return from_pretrained(table, freeze, std::move(options));
}

}  // namespace posembed

// NgramEmbedding, PerLayerEmbedding and functional::ngram_ids: thin wrappers around operators.
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "ngram/ngram_operator.h"
#include "posembed/bag.h"
#include "posembed/memory.h"
#include "posembed/ngram.h"
#include "token/token_operator.h"

namespace posembed {

const char* name(NgramRule rule) { return dispatcher::name_of(rule); }

namespace ngram {
namespace {

/// The first row of each head, where heads follow each other.
std::vector<int64_t> in_turn(const std::vector<int64_t>& moduli) {
  std::vector<int64_t> offsets;
  int64_t first = 0;
  for (const int64_t modulus : moduli) {
    offsets.push_back(first);
    first = dispatcher::sum(first, modulus, "moduli");
  }
  return offsets;
}

Call call_of(const NgramSpec& spec) {
  Call call(spec);
  if (call.offsets().empty()) call.offsets(in_turn(call.moduli()));
  return call;
}

/// The mask of a call, also where it has lengths.
MaybeTensor mask_of(const Tensor& ids, const NgramCall& call) {
  TORCH_CHECK_VALUE(!call.mask().has_value() || !call.lengths().has_value(),
                    "lengths: expected none beside mask");
  if (!call.lengths().has_value()) return call.mask();
  return ngram_mask(ids, *call.lengths());
}

/// The last `kept` tokens before `ids`; a batch of 1 serves every row.
void check_history(const Tensor& history, const Tensor& ids, int64_t kept) {
  dispatcher::check_integers(history, "history");
  const int64_t dim = history.dim();
  const bool row = dim == 1, rows = dim == 2 && ids.dim() == 2 &&
                                    (history.size(0) == 1 || history.size(0) == ids.size(0));
  TORCH_CHECK_VALUE((row || rows) && history.size(-1) == kept, "history: expected ",
                    ids.dim() == 2 ? "[batch, " : "[", kept, "] for ids ", ids.sizes(), ", got ",
                    history.sizes());
}

int64_t padding_of(const NgramSpec& spec) {
  return spec.padding().value_or(spec.boundary().value_or(0));
}

}  // namespace
}  // namespace ngram

NgramSpec NgramSpec::qwen4_exp(int64_t vocab_size, int64_t boundary, int64_t layer,
                               int64_t ngram_size, int64_t heads, int64_t rows, int64_t seed,
                               int64_t divisor) {
  TORCH_CHECK_VALUE(ngram_size >= 2 && heads >= 1 && divisor >= 1,
                    "ngram_size, heads, divisor: expected at least 2, 1 and 1, got ", ngram_size,
                    ", ", heads, " and ", divisor);
  const int64_t columns = dispatcher::product(ngram_size - 1, heads, "heads");
  NgramSpec spec;
  spec.multipliers(ngram::ngram_multipliers(ngram_size, vocab_size, layer, seed))
      .moduli(ngram::ngram_primes(columns, rows, dispatcher::product(layer, columns, "layer")))
      .boundary(boundary);
  return spec.num_embeddings(dispatcher::rounded_up(spec.table_rows(), divisor, "divisor"));
}

NgramSpec NgramSpec::longcat(int64_t vocab_size, int64_t boundary, int64_t ngram_size,
                             int64_t heads, double ratio) {
  TORCH_CHECK_VALUE(ngram_size >= 2 && heads >= 1,
                    "ngram_size, heads: expected at least 2 and 1, got ", ngram_size, " and ",
                    heads);
  std::vector<int64_t> moduli;
  for (int64_t column = 0; column < dispatcher::product(ngram_size - 1, heads, "heads"); ++column) {
    // In float64, as the model computes them.
    const double rows = ratio * static_cast<double>(vocab_size) + static_cast<double>(2 * column);
    moduli.push_back(static_cast<int64_t>(rows + 1));
  }
  NgramSpec spec;
  return spec.multipliers(std::vector<int64_t>(static_cast<size_t>(heads), vocab_size))
      .moduli(std::move(moduli))
      .boundary(boundary)
      .padding(0)
      .rule(NgramRule::modular);
}

int64_t NgramSpec::ngram_size() const {
  ngram::check_spec(*this);
  return ngram::sizes_of(*this).back();
}

int64_t NgramSpec::table_rows() const {
  const ngram::Call call = ngram::call_of(*this);
  ngram::check_spec(call);
  int64_t needed = 0;
  for (size_t i = 0; i < moduli().size(); ++i) {
    needed = std::max(needed, call.offsets()[i] + moduli()[i]);
  }
  const int64_t rows = num_embeddings().value_or(needed);
  TORCH_CHECK_VALUE(rows >= needed, "num_embeddings: expected ", needed,
                    " or more, which the heads need, got ", rows);
  return rows;
}

torch::Tensor functional::ngram_ids(const torch::Tensor& ids, const NgramSpec& spec,
                                    const NgramCall& call) {
  ngram::Call arguments = ngram::call_of(spec);
  arguments.history = call.history();
  arguments.cu_seqlens = call.cu_seqlens();
  arguments.mask = ngram::mask_of(ids, call);
  return ngram::ngram_ids(ids, arguments);
}

NgramEmbeddingImpl::NgramEmbeddingImpl(NgramOptions options_) : options(std::move(options_)) {
  NgramEmbeddingImpl::reset();
}

void NgramEmbeddingImpl::reset() {
  const int64_t rows = options.spec().table_rows(), dim = options.embedding_dim();
  const auto parts =
      options.summed() ? int64_t{1} : static_cast<int64_t>(options.spec().moduli().size());
  TORCH_CHECK_VALUE(dim >= 0 && dim % parts == 0, "embedding_dim: expected a multiple of ", parts,
                    ", the sizes times heads whose rows are joined, got ", dim);
  if (!table.is_empty()) {
    table = register_module("table", token::same_codes(table));
    return;
  }
  weight = register_parameter("weight", torch::empty({rows, dim / parts}));
  reset_parameters();
}

void NgramEmbeddingImpl::quantize(const std::string& format, int64_t block) {
  table = register_module("table", token::codes_of(*this, format, block));
  parameters_.erase("weight");
  weight = torch::Tensor();
}

int64_t NgramEmbeddingImpl::memory() const { return token::table_bytes(*this); }

void NgramEmbeddingImpl::reset_parameters() {
  prefer_huge_pages(weight);
  torch::nn::init::normal_(weight);
}

void NgramEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "NgramEmbedding(" << options.spec().table_rows() << ", " << options.embedding_dim()
         << ", ngram_size=" << options.spec().ngram_size()
         << ", columns=" << options.spec().moduli().size();
  if (options.spec().rule() != NgramRule::products) {
    stream << ", rule='" << posembed::name(options.spec().rule()) << "'";
  }
  if (options.summed()) stream << ", summed=True";
  if (options.gradient() == TableGradient::rows) stream << ", gradient='rows'";
  stream << ")";
}

torch::Tensor NgramEmbeddingImpl::forward(const torch::Tensor& ids, const NgramCall& texts) {
  const torch::Tensor rows = functional::ngram_ids(ids, options.spec(), texts);
  if (!options.summed()) {
    const auto call = EmbeddingCall().gradient(options.gradient());
    const torch::Tensor found =
        table.is_empty() ? functional::embedding(rows, weight, call) : table->forward(rows);
    return found.flatten(-2);
  }
  const torch::Tensor bags = rows.flatten(0, -2);
  const auto call = BagCall().gradient(options.gradient());
  const torch::Tensor found = table.is_empty()
                                  ? functional::token_bag(bags, weight, call)
                                  : functional::token_bag(bags, table->rows, call, table->dtype);
  return found.unflatten(0, rows.sizes().slice(0, rows.dim() - 1));
}

torch::Tensor NgramEmbeddingImpl::next_history(const torch::Tensor& ids,
                                               const NgramCall& call) const {
  const int64_t kept = options.spec().ngram_size() - 1;
  std::vector<int64_t> shape = ids.sizes().vec();
  dispatcher::check_integers(ids, "ids");
  TORCH_CHECK_VALUE(shape.size() == 1 || shape.size() == 2,
                    "ids: expected [seq] or [batch, seq], got ", ids.sizes());
  TORCH_CHECK_VALUE(!call.cu_seqlens().has_value(), "cu_seqlens: expected none for a history");
  if (call.history().has_value()) ngram::check_history(*call.history(), ids, kept);
  shape.back() = kept;
  const torch::Tensor before =
      call.history().has_value()
          ? call.history()->to(ids.scalar_type()).expand(shape)
          : at::full(shape, ngram::padding_of(options.spec()), ids.options());
  const torch::Tensor text = at::cat({before, ids}, -1);
  const auto mask = ngram::mask_of(ids, call);
  if (!mask.has_value()) return text.narrow(-1, ids.size(-1), kept).clone();
  ngram::check_mask(*mask, ids);
  // The places of the last tokens that are text; the history always has enough.
  const torch::Tensor places = at::arange(1, 1 + ids.size(-1), ids.options());
  const torch::Tensor found = at::cat(
      {at::arange(1 - kept, 1, ids.options()).expand(shape), at::where(mask->ne(0), places, -kept)},
      -1);
  const torch::Tensor last = std::get<0>(found.topk(kept)).flip(-1) + (kept - 1);
  return text.gather(-1, last.to(at::kLong));
}

PerLayerEmbeddingImpl::PerLayerEmbeddingImpl(int64_t num_embeddings, int64_t num_layers,
                                             int64_t layer_dim, double scale)
    : num_embeddings(num_embeddings), num_layers(num_layers), layer_dim(layer_dim), scale(scale) {
  PerLayerEmbeddingImpl::reset();
}

void PerLayerEmbeddingImpl::reset() {
  dispatcher::check_at_least(num_embeddings, 0, "num_embeddings");
  dispatcher::check_at_least(num_layers, 1, "num_layers");
  dispatcher::check_at_least(layer_dim, 0, "layer_dim");
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale: expected a finite number, got ", scale);
  if (!table.is_empty()) {
    table = register_module("table", token::same_codes(table));
    return;
  }
  const int64_t columns = dispatcher::product(num_layers, layer_dim, "layer_dim");
  weight = register_parameter("weight", torch::empty({num_embeddings, columns}));
  reset_parameters();
}

void PerLayerEmbeddingImpl::quantize(const std::string& format, int64_t block) {
  table = register_module("table", token::codes_of(*this, format, block));
  parameters_.erase("weight");
  weight = torch::Tensor();
}

int64_t PerLayerEmbeddingImpl::memory() const { return token::table_bytes(*this); }

void PerLayerEmbeddingImpl::reset_parameters() {
  prefer_huge_pages(weight);
  torch::nn::init::normal_(weight);
}

void PerLayerEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "PerLayerEmbedding(" << num_embeddings << ", " << num_layers << ", " << layer_dim;
  if (scale != 1.0) stream << ", scale=" << scale;
  stream << ")";
}

torch::Tensor PerLayerEmbeddingImpl::forward(const torch::Tensor& ids) {
  const torch::Tensor found = table.is_empty()
                                  ? functional::embedding(ids, weight, EmbeddingCall().scale(scale))
                                  : table->forward(ids, scale);
  return found.unflatten(-1, {num_layers, layer_dim});
}

torch::Tensor PerLayerEmbeddingImpl::layer(const torch::Tensor& ids, int64_t index) {
  TORCH_CHECK_INDEX(index >= -num_layers && index < num_layers, "index: expected ", -num_layers,
                    " to ", num_layers - 1, ", got ", index);
  const int64_t place = index < 0 ? index + num_layers : index;
  if (table.is_empty()) {
    return functional::embedding(ids, weight.narrow(1, place * layer_dim, layer_dim),
                                 EmbeddingCall().scale(scale));
  }
  const auto shorter = table->rows.split(num_layers);
  if (!shorter.has_value()) return forward(ids).select(-2, place);
  const torch::Tensor rows = ids.to(at::kLong) * num_layers + place;
  return functional::embedding(rows, *shorter, scale, table->dtype);
}

}  // namespace posembed

// The token operators, as C++ code calls them and as their kernels are registered, and what other
// families share: gradients of tables, and modules with a table.
#pragma once

#include <torch/nn/init.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cuda_launch.h"
#include "dispatcher/autograd.h"
#include "posembed/memory.h"
#include "posembed/quantized.h"
#include "posembed/token.h"
#include "token/token.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<Initialization> {
  static constexpr const char* argument = "initialization";
  static constexpr const char* names[] = {"mean", "mean-and-covariance", "normal"};
};

template <>
struct EnumArgument<TableGradient> {
  static constexpr const char* argument = "gradient";
  static constexpr const char* names[] = {"dense", "rows"};
};

}  // namespace posembed::dispatcher

namespace posembed::token {

using at::Tensor;
using Text = std::string_view;

/// Arguments of the embedding operators, in the order of their schemas.
struct Ids {
  Tensor ids;                       // int [...]
  int64_t padding_idx = -1;         // the id whose row gets no gradient; -1: none
  double scale = 1.0;               // multiplies the result
  bool scale_grad_by_freq = false;  // divides a row's gradient by its id's count
  int64_t vocabulary_start = -1;    // the first row's id if the table is part of a vocabulary

  POSEMBED_FIELDS(self.ids, self.padding_idx, self.scale, self.scale_grad_by_freq,
                  self.vocabulary_start)
};

/// The rows of ids; the last argument is the form of the table's gradient, "dense" or "rows".
inline const dispatcher::Operator<Tensor(const Tensor&), Ids, Text> embedding{"embedding"};

inline Tensor look_up(const Tensor& weight, const Ids& ids) {
  return embedding(weight, ids, "dense");
}

/// The table's gradient, from that of the rows and the number of rows of the table.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymInt), Ids> embedding_backward{
    "embedding_backward"};

/// The same as ids of the touched rows, ascending, and the rows.
inline const dispatcher::Operator<std::tuple<Tensor, Tensor>(const Tensor&, c10::SymInt), Ids>
    embedding_backward_rows{"embedding_backward_rows"};

/// Arguments of embedding_with_features after the tables, in the order of its schema.
struct Places {
  Tensor ids;     // int [...]
  Tensor places;  // bool [...]: rows of features in order; or int [...]: such rows, or -1
  int64_t padding_idx = -1;  // the id whose row gets no gradient; -1: none
  double scale = 1.0;        // multiplies the table's rows

  POSEMBED_FIELDS(self.ids, self.places, self.padding_idx, self.scale)
};

/// Rows of a table, and of features in some places: weight, features; the last argument is the form
/// of the table's gradient.
inline const dispatcher::Operator<Tensor(const Tensor&, const Tensor&), Places, Text>
    embedding_with_features{"embedding_with_features"};

/// Where `rows` [rows], ascending, has each of `ids`: int64 [...]; -1: nowhere.
Tensor places_in(const Tensor& rows, const Tensor& ids);

/// Arguments of embedding_quantized after the codes and scales, in the order of its schema.
struct Codes {
  Tensor ids;                           // int [...]
  std::optional<Tensor> biases;         // as scales; none: 0
  int64_t block_rows = 1;               // rows and columns that share a scale
  int64_t block_columns = 0;            // 0: a row is divided evenly
  double scale = 1.0;                   // multiplies the result
  std::optional<at::ScalarType> dtype;  // of the result; none: float32

  POSEMBED_FIELDS(self.ids, self.biases, self.block_rows, self.block_columns, self.scale,
                  self.dtype)
};

/// Rows of a frozen table of codes: codes, scales.
inline const dispatcher::Operator<Tensor(const Tensor&, const Tensor&), Codes> embedding_quantized{
    "embedding_quantized"};

/// Codes, scales and biases, empty if there are none: weight, format, columns of a block.
inline const dispatcher::Operator<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Text, int64_t)>
    quantize_rows{"quantize_rows"};

/// The table with rows [0, num_embeddings). Old rows keep their bits; new rows are those given, or
/// initialised as the text says.
inline const dispatcher::Operator<Tensor(const Tensor&, int64_t, const std::optional<Tensor>&, Text,
                                         double, std::optional<at::Generator>)>
    embedding_resize{"embedding_resize"};

/// A gradient of shape [num_embeddings, embedding_dim]. `form`: "dense", or "rows" for a sparse
/// tensor of the touched rows.
Tensor table_gradient(const Tensor& gradient, const c10::SymInt& num_embeddings, const Ids& ids,
                      Text form);

/// The same from the touched rows, ascending and each once.
Tensor sparse_gradient(const Tensor& row_ids, const Tensor& rows,
                       const c10::SymInt& num_embeddings);

/// The rows that a gradient of the table sums, one for each id.
struct Gradient {
  // [..., embedding_dim], contiguous: one for each id, or those that `sources` names.
  const Tensor& rows;
  const Tensor& ids;  // [...], contiguous
  int64_t num_embeddings;
  int64_t padding_idx = -1;
  double scale = 1.0;
  bool scale_grad_by_freq = false;
  int64_t vocabulary_start = -1;
  Tensor sources =
      {};  // int32, read as uint32: index of each id's row in `rows`; undefined: its own
  Tensor factors = {};  // for each id, float64 for float64, otherwise float32; undefined: ones
};

/// The table's gradient [num_embeddings, embedding_dim]. Ids must have been checked.
Tensor dense_gradient(const Gradient& gradient);

/// Ids of the touched rows, ascending, and the rows.
std::tuple<Tensor, Tensor> rows_gradient(const Gradient& gradient);

/// Raises c10::ValueError if there are more ids or rows than can be sorted, or than a gradient of
/// the table can hold. `gradient` is that of rows: [..., embedding_dim].
void check_table_size(const Tensor& ids, const c10::SymInt& num_embeddings, const Tensor& gradient);

/// Raises c10::ValueError unless `gradient` is "dense" or "rows".
void check_gradient_form(Text gradient);

/// Throws c10::IndexError for the first id on the CPU that is not a row of the table, before
/// anything is written; `ids` is contiguous. CUDA kernels record bad ids.
void check_ids(const Tensor& ids, int64_t num_embeddings);

/// Options of a look-up: rows [first_row, …) are those of index 0, 1, …
struct Lookup {
  int64_t first_row = 0;
  double scale = 1.0;
  core::ErrorKind kind = core::ErrorKind::token_id;
  bool partial = false;    // part of a vocabulary, where an index outside is not an error
  bool has_holes = false;  // rows of indices that are `hole` (token.h) are left as they are
};

/// Writes weight[ids + first_row] * scale to `out`, on any device; zeros for an index outside,
/// which CUDA records. `ids` is contiguous; on the CPU they must have been checked.
void gather(const Tensor& weight, const Tensor& ids, const Lookup& lookup, const Tensor& out);

// ------------------------------------------------------------------------------------- code blocks
// Blocks of a table of codes, whose numbers share a scale.

struct CodeBlocks {
  int64_t rows, columns;

  /// Blocks in a row of `dim` numbers.
  int64_t in_row(int64_t dim) const { return dim / columns + (dim % columns != 0); }
};

/// The blocks of the same table if each row of `dim` numbers is read as `parts` rows; the scales
/// keep their order. None if a block reaches over the end of a part but not over the whole row.
inline std::optional<CodeBlocks> split(CodeBlocks blocks, int64_t dim, int64_t parts) {
  TORCH_CHECK_VALUE(parts >= 1 && dim % parts == 0, "parts: expected a divisor of ", dim, ", got ",
                    parts);
  const int64_t part = dim / parts;
  if (dim == 0) return std::nullopt;
  if (blocks.columns >= dim)
    return CodeBlocks{dispatcher::product(blocks.rows, parts, "parts"), part};
  if (blocks.rows > 1 || part % blocks.columns != 0) return std::nullopt;
  return blocks;
}

// ----------------------------------------------------------------------------- gradients of tables
// Ids sorted by row, the rows that they touch, and a node with rows.

/// See GroupArguments; owns the memory that its pointers refer to.
struct SortedIds {
  Tensor words, counts;
  uint64_t* entries = nullptr;
  int64_t* starts = nullptr;
  int64_t groups = 0;

  int64_t kept() const { return starts[groups]; }
  int64_t row(int64_t group) const { return static_cast<int64_t>(entries[starts[group]] >> 32); }
  /// The first group that begins at or after `entry`.
  int64_t group_at(int64_t entry) const {
    return std::lower_bound(starts, starts + groups + 1, entry) - starts;
  }
};

/// `ids`: contiguous; `first_row`: the row of id 0.
SortedIds sort_ids(const Tensor& ids, int64_t num_embeddings, int64_t padding_idx,
                   int64_t first_row = 0);

/// Sums all groups of `sorted`.
void sum_groups(const SumArguments& arguments, const SortedIds& sorted);

// ------------------------------------------------------------------------------------- row targets
// Destinations for a kernel that computes the gradient of each token: rows of ids that occur once
// are written directly to the table's gradient.

/// The destinations, on the CPU.
struct RowTargets {
  Tensor row_ids;              // of the touched rows, ascending
  Tensor rows;                 // [row_ids, embedding_dim]: complete after sum_repeated()
  std::vector<void*> targets;  // the address of each token's row; nullptr: not written
  Tensor repeated;             // rows of tokens whose ids occur more than once
  SortedIds sums;              // entries: row of `rows` << 32 | row of `repeated`
};

/// Uninitialised targets for a gradient of `table`; ids are contiguous, and padding has no target.
RowTargets row_targets(const Tensor& table, const Tensor& ids, int64_t padding_idx);

/// Adds the rows of repeated ids. Call it after all targets are written.
void sum_repeated(const RowTargets& destinations);

// --------------------------------------------------------------------------------------- rows node
// A table's gradient in the rows form has no derivative: second derivatives need gradient="dense".

inline constexpr const char* no_second_derivative =
    "posembed: gradient='rows' has no second derivative; use gradient='dense'";

inline dispatcher::variable_list refuse_rows(const dispatcher::Gradients&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, no_second_derivative);
}

/// Calls `function`, which calls `op`, and gives the rows that it returns beside their ids a node
/// that throws when it runs.
template <auto& op, typename Function, typename... Inputs>
std::tuple<Tensor, Tensor> underived_rows(const Function& function, const Inputs&... inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(dispatcher::tangent(inputs).defined() || ...),
                              no_second_derivative);
  auto node = dispatcher::node_for<dispatcher::FunctionNode<op, refuse_rows>>(inputs...);
  std::tuple<Tensor, Tensor> outputs = dispatcher::below_autograd(function);
  if (node) torch::autograd::set_history(std::get<1>(outputs), node);
  return outputs;
}

// ----------------------------------------------------------------------------------------- modules
// Modules with a table of tokens: checks of options, and the table as a parameter.

/// Throws c10::ValueError for bad sizes or padding_idx; converts a negative padding_idx to an index
/// from the start.
template <typename Options>
void check_table_options(Options& options) {
  dispatcher::check_at_least(options.num_embeddings(), 0, "num_embeddings");
  dispatcher::check_at_least(options.embedding_dim(), 0, "embedding_dim");
  if (const auto padding = options.padding_idx(); padding.has_value()) {
    const int64_t rows = options.num_embeddings();
    TORCH_CHECK_VALUE(*padding >= -rows && *padding < rows, "padding_idx: expected ", -rows, " to ",
                      rows - 1, ", got ", *padding);
    if (*padding < 0) options.padding_idx(*padding + rows);
  }
}

/// The codes of module.weight.
template <typename Module>
QuantizedTable codes_of(const Module& module, const std::string& format, int64_t block) {
  TORCH_CHECK_VALUE(module.weight.defined(), "weight: expected a table of numbers, got none");
  return QuantizedTable(functional::quantize_rows(module.weight, format, block),
                        module.weight.scalar_type());
}

/// A table over the same codes. A clone that is reset has the original's, which must stay as it is.
inline QuantizedTable same_codes(const QuantizedTable& table) {
  return QuantizedTable(table->rows, table->dtype);
}

/// The bytes of a module's table.
template <typename Module>
int64_t table_bytes(const Module& module) {
  return module.weight.defined() ? static_cast<int64_t>(module.weight.nbytes())
                                 : module.table->rows.memory();
}

/// Registers module.weight: the table of the options, or a new one with its initial values.
template <typename Module>
void reset_table(Module& module) {
  auto& options = module.options;
  // A clone is reset while it still has the original's table, so a frozen table stays frozen.
  const bool trainable = !module.weight.defined() || module.weight.requires_grad();
  const std::vector<int64_t> sizes = {options.num_embeddings(), options.embedding_dim()};
  if (!options._weight().defined()) {
    module.weight = module.register_parameter("weight", torch::empty(sizes), trainable);
    module.reset_parameters();
    return;
  }
  TORCH_CHECK_VALUE(options._weight().sizes() == torch::IntArrayRef(sizes),
                    "_weight: expected shape ", torch::IntArrayRef(sizes), ", got ",
                    options._weight().sizes());
  module.weight = module.register_parameter("weight", options._weight());
  options._weight(torch::Tensor());  // so that a clone makes its own table
}

/// Fills the table from N(0, 1), and the row of padding_idx with zeros.
template <typename Module>
void reset_table_parameters(Module& module) {
  prefer_huge_pages(module.weight);
  torch::nn::init::normal_(module.weight);
  if (const auto padding = module.options.padding_idx(); padding.has_value()) {
    const torch::NoGradGuard no_grad;
    module.weight[*padding].fill_(0);
  }
}

/// A module that shares `weight`.
template <typename Holder, typename Options>
Holder over_table(const torch::Tensor& weight, bool freeze, Options options) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected [num_embeddings, embedding_dim], got ",
                    weight.sizes());
  dispatcher::check_floating(weight, "weight");
  options.num_embeddings(weight.size(0)).embedding_dim(weight.size(1))._weight(weight);
  Holder module(std::move(options));
  module->weight.set_requires_grad(!freeze);
  return module;
}

}  // namespace posembed::token

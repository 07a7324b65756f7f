#include "pretrained/quantised.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "core/brief.h"
#include "pretrained/bad_file.h"

namespace posembed::pretrained {
namespace {

constexpr int64_t fp8_block = 128;  // rows and columns that share a weight_scale_inv
bool is_float8(const TensorEntry& entry) { return entry.dtype.compare(0, 3, "F8_") == 0; }

bool is_floating(const TensorEntry& entry) {
  return entry.dtype == "F32" || entry.dtype == "F16" || entry.dtype == "BF16" ||
         entry.dtype == "F64";
}

std::string shape_text(const TensorEntry& entry) {
  std::ostringstream text;
  text << torch::IntArrayRef(entry.shape);
  return core::brief(text.str());
}

/// Scales without values, if they fit the table: one for all, one for each row, for groups of a
/// row's columns, or for blocks of 128 rows and columns, as weight_scale_inv always is.
Scales fitted(const TensorEntry& table, const TensorEntry& scale) {
  const auto blocks = [](int64_t size) { return (size + fp8_block - 1) / fp8_block; };
  const int64_t rows = table.shape[0], columns = table.shape[1];
  const std::vector<int64_t>& shape = scale.shape;
  const bool is_column =
      shape == std::vector<int64_t>{rows} || shape == std::vector<int64_t>{rows, 1};
  const bool has_blocks = shape == std::vector<int64_t>{blocks(rows), blocks(columns)};
  const bool has_groups =
      shape.size() == 2 && shape[0] == rows && shape[1] > 0 && columns % shape[1] == 0;
  const std::string inverse = "_scale_inv";
  const bool prefers_blocks =
      scale.name.size() > inverse.size() &&
      scale.name.compare(scale.name.size() - inverse.size(), inverse.size(), inverse) == 0;
  const bool is_one =
      shape.empty() || shape == std::vector<int64_t>{1} || shape == std::vector<int64_t>{1, 1};
  Scales scales;
  if (is_one) {
    scales.block_rows = std::max<int64_t>(1, rows);
    scales.block_columns = std::max<int64_t>(1, columns);
  } else if (has_blocks && (prefers_blocks || !has_groups)) {
    scales.block_rows = scales.block_columns = fp8_block;
  } else if (is_column) {
    scales.block_columns = std::max<int64_t>(1, columns);
  } else if (has_groups) {
    scales.block_columns = columns / shape[1];
  } else {
    TORCH_CHECK_TYPE(false, "tensor ", in_quotes(table.name), ": expected scales for all, for ",
                     "rows, for groups of columns or for blocks of 128 x 128, ",
                     in_quotes(scale.name), " has the shape ", shape_text(scale));
  }
  return scales;
}

/// Throws for codes that only others turn into numbers.
void check_is_read_here(const TensorEntry& table, const CodedTable& coded) {
  const bool shifted = coded.parts.count("zeros") > 0 || coded.parts.count("biases") > 0;
  if (coded.format->read == "rows" && !shifted) return;
  const std::string who = coded.format->read.empty()
                              ? "dequantise it with the program that wrote it"
                              : "Python's VectorFile.table and TokenEmbedding.from_file read them";
  TORCH_CHECK_TYPE(false, "tensor ", in_quotes(table.name), " has codes (", table.dtype, ") of ",
                   coded.format->name, shifted ? ", with zero points: " : ": ", who);
}

}  // namespace

torch::Tensor Scales::applied(const torch::Tensor& codes, const std::vector<int64_t>& rows) const {
  const torch::Tensor row = torch::tensor(rows, torch::kLong);
  const torch::Tensor block = row.clamp_min(0).floor_divide_(block_rows);
  const torch::Tensor of_columns =
      values.index_select(0, block).repeat_interleave(block_columns, 1).narrow(1, 0, codes.size(1));
  const torch::Tensor absent = row.lt(0).unsqueeze_(1);  // rows of zeros, whatever their scale
  return codes.to(torch::kFloat).mul_(of_columns).masked_fill_(absent, 0);
}

Scales scales_without_values(const TensorEntry& table, const Neighbours& neighbours,
                             std::string* found) {
  found->clear();
  const CodedTable coded = coded_table(table, neighbours.entry);
  if (coded.format == nullptr) return {};
  check_is_read_here(table, coded);
  *found = coded.parts.at("scales");
  const TensorEntry scale = neighbours.entry(*found).value();
  TORCH_CHECK_TYPE(is_floating(scale) || is_float8(scale), "tensor ", in_quotes(*found),
                   ": expected scales in a floating dtype, got ", scale.dtype);
  return fitted(table, scale);
}

Scales scales_of(const TensorEntry& table, const Neighbours& neighbours) {
  std::string name;
  Scales scales = scales_without_values(table, neighbours, &name);
  if (name.empty()) return scales;
  const torch::Tensor values = neighbours.read(name).to(torch::kFloat);
  scales.values = values.dim() == 2 ? values : values.reshape({-1, 1});
  return scales;
}

}  // namespace posembed::pretrained

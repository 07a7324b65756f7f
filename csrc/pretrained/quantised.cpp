#include "pretrained/quantised.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "pretrained/bad_file.h"

namespace posembed::pretrained {
namespace {

constexpr int64_t fp8_block = 128;  // rows and columns that share a weight_scale_inv

bool is_float8(const TensorEntry& entry) { return entry.dtype.compare(0, 3, "F8_") == 0; }

/// The tensor beside a table whose name is the table's with one of these ends; empty: none. An end
/// that begins with a point replaces the name's last part.
std::string beside(const std::string& table, const std::vector<std::string>& names,
                   const std::vector<std::string>& ends) {
  for (const std::string& end : ends) {
    const std::string name = (end[0] == '.' ? table.substr(0, table.rfind('.')) : table) + end;
    if (std::find(names.begin(), names.end(), name) != names.end()) return name;
  }
  return {};
}

[[noreturn]] void refuse(const TensorEntry& table, const std::string& why) {
  TORCH_CHECK_TYPE(false, "tensor ", in_quotes(table.name), " has codes (", table.dtype, ") ", why,
                   ": dequantise it with the program that wrote it");
}

/// Scales from a tensor: one for all, one for each row, for groups of a row's columns, or for
/// blocks of 128 rows and columns.
Scales shaped(const TensorEntry& table, const std::string& name, torch::Tensor values) {
  const int64_t rows = table.shape[0], columns = table.shape[1];
  const auto blocks = [](int64_t size) { return (size + fp8_block - 1) / fp8_block; };
  if (values.numel() == 1) return {values.view({1, 1}), rows, columns};
  if (values.dim() == 1 && values.size(0) == rows) values = values.unsqueeze(1);
  if (values.dim() == 2 && values.size(0) == rows && values.size(1) > 0 &&
      columns % values.size(1) == 0) {
    return {values, 1, columns / values.size(1)};
  }
  if (values.dim() == 2 && values.size(0) == blocks(rows) && values.size(1) == blocks(columns)) {
    return {values, fp8_block, fp8_block};
  }
  TORCH_CHECK_TYPE(false, "tensor ", in_quotes(table.name), ": expected scales for all, for rows, ",
                   "for groups of columns or for blocks of 128 x 128, ", in_quotes(name),
                   " has the shape ", values.sizes());
}

}  // namespace

torch::Tensor Scales::applied(const torch::Tensor& codes, const std::vector<int64_t>& rows) const {
  torch::Tensor block = torch::tensor(rows, torch::kLong).clamp_min_(0);  // -1: a row of zeros
  block.floor_divide_(block_rows);
  const torch::Tensor of_columns =
      values.index_select(0, block).repeat_interleave(block_columns, 1).narrow(1, 0, codes.size(1));
  return codes.to(torch::kFloat).mul_(of_columns);
}

Scales scales_of(const TensorEntry& table, const std::vector<std::string>& names,
                 const ReadTensor& read) {
  const bool is_code = is_float8(table) || table.dtype == "I8";
  if (!is_code) {
    const bool is_number = table.dtype[0] == 'F' || table.dtype == "BF16";
    if (!is_number) refuse(table, "and no numbers");
    return {};
  }
  const std::string name = beside(table.name, names, {"_scale_inv", "_scale", ".scales", ".scale"});
  if (name.empty() && !is_float8(table)) refuse(table, "and no scales beside it");
  const std::string zero = beside(table.name, names, {"_zero_point", ".zeros", ".biases"});
  if (!zero.empty()) refuse(table, "with zero points, " + in_quotes(zero));
  return name.empty() ? Scales{} : shaped(table, name, read(name).to(torch::kFloat));
}

}  // namespace posembed::pretrained

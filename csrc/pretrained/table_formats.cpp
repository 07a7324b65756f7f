#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/brief.h"
#include "dispatcher/fork.h"
#include "pretrained/file.h"
#include "pretrained/source.h"

namespace posembed::pretrained {
namespace {

constexpr const char* formats_text =
#include "pretrained/table_formats.inc"
    ;

struct Tables {
  std::vector<TableFormat> formats;
  std::vector<std::string> part_words;
};

const Tables& tables() {
  static dispatcher::FirstUse<Tables> read;
  return read.get([] {
    const auto data = nlohmann::json::parse(formats_text);
    Tables made;
    for (const auto& row : data.at("formats")) {
      made.formats.push_back({row.at("name"), row.at("codes"), row.at("dtypes"), row.at("needs"),
                              row.value("may", TableFormat::Ends()), row.value("read", "")});
    }
    data.at("part_words").get_to(made.part_words);
    return made;
  });
}

bool ends_in(const std::string& name, const std::string& end) {
  return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

bool contains(const std::vector<std::string>& all, const std::string& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

/// A name without its end; ".*" is any last part.
std::optional<std::string> without(const std::string& name, const std::string& end) {
  if (end == ".*") return name.substr(0, name.rfind('.'));
  if (!ends_in(name, end)) return std::nullopt;
  return name.substr(0, name.size() - end.size());
}

/// Adds the names of a module's tensors with these ends; false if one has none.
bool add_parts(CodedTable& coded, const TableFormat::Ends& ends, const EntryOf& entry_of) {
  bool complete = true;
  for (const auto& [role, alternatives] : ends) {
    const auto found = std::find_if(
        alternatives.begin(), alternatives.end(),
        [&](const std::string& end) { return entry_of(coded.module + end).has_value(); });
    complete = complete && found != alternatives.end();
    if (found != alternatives.end()) coded.parts[role] = coded.module + *found;
  }
  return complete;
}

}  // namespace

CodedTable coded_table(const TensorEntry& table, const EntryOf& entry_of) {
  for (const TableFormat& format : tables().formats) {
    const auto module = without(table.name, format.codes);
    if (!module.has_value() || !contains(format.dtypes, table.dtype)) continue;
    CodedTable coded{&format, *module, {}};
    if (!add_parts(coded, format.needs, entry_of)) continue;
    add_parts(coded, format.may, entry_of);
    return coded;
  }
  return {};
}

std::optional<std::string> codes_that_need(const std::string& name, const EntryOf& entry_of) {
  for (const TableFormat& format : tables().formats) {
    const std::string codes_end = format.codes == ".*" ? ".weight" : format.codes;
    for (const TableFormat::Ends* ends : {&format.needs, &format.may}) {
      for (const auto& [role, alternatives] : *ends) {
        for (const std::string& end : alternatives) {
          const auto module = without(name, end);
          if (!module.has_value()) continue;
          const auto codes = entry_of(*module + codes_end);
          if (!codes.has_value()) continue;
          const CodedTable coded = coded_table(*codes, entry_of);
          const auto part = coded.parts.find(role);
          if (part != coded.parts.end() && part->second == name) return codes->name;
        }
      }
    }
  }
  return std::nullopt;
}

std::string codes_of_module(const std::string& name, const EntryOf& entry_of) {
  for (const TableFormat& format : tables().formats) {
    if (format.codes.empty() || format.codes == ".*") continue;
    for (const std::string& module : {name, without(name, ".weight").value_or(name)}) {
      const auto codes = entry_of(module + format.codes);
      if (codes.has_value() && coded_table(*codes, entry_of).format != nullptr) return codes->name;
    }
  }
  return {};
}

bool is_named_as_part(const std::string& name) {
  std::string word;
  const size_t last = name.rfind('.');
  for (size_t i = last == std::string::npos ? 0 : last + 1; i <= name.size(); ++i) {
    if (i < name.size() && name[i] != '_') {
      word += name[i];
    } else {
      if (contains(tables().part_words, word)) return true;
      word.clear();
    }
  }
  return false;
}

const char* table_formats_text() { return formats_text; }

namespace {

// --------------------------------------------------------------------------------------- quantised

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

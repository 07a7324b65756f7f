// Which tensors of a file are one table of codes, as table_formats.json says of each program's
// format. What codes need is never taken for a table itself.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "pretrained/safetensors.h"

namespace posembed::pretrained {

/// A row of table_formats.json: the ends of tensors' names by what they hold.
struct TableFormat {
  using Ends = std::map<std::string, std::vector<std::string>>;

  std::string name;
  std::string codes;
  std::vector<std::string> dtypes;
  Ends needs, may;
  std::string read;  ///< "rows": here; another: by Python; empty: by none
};

/// A table of codes and the names of the tensors that it needs: "scales", "zeros", ...
struct CodedTable {
  const TableFormat* format = nullptr;  ///< null: the numbers are no codes
  std::string module;                   ///< what the names have in common
  std::map<std::string, std::string> parts;
};

/// The entry of a tensor of the file, if it has one of that name.
using EntryOf = std::function<std::optional<TensorEntry>(const std::string&)>;

/// The format of a table, with the tensors beside it.
CodedTable coded_table(const TensorEntry& table, const EntryOf& entry_of);

/// The codes that need this tensor, if any do.
std::optional<std::string> codes_that_need(const std::string& name, const EntryOf& entry_of);

/// The codes of a module, or of its weight, that a caller names as if it were not quantised; empty:
/// none.
std::string codes_of_module(const std::string& name, const EntryOf& entry_of);

/// Whether a name is that of scales or zero points, whatever format they belong to.
bool is_named_as_part(const std::string& name);

/// A table of codes in a file, for those who turn its codes into numbers.
struct StoredCodes {
  std::string format, read, table;
  std::map<std::string, std::string> parts;
  std::string metadata;  ///< what safetensors say of the module's weight; empty: nothing
};

/// The text of table_formats.json.
POSEMBED_API const char* table_formats_text();

}  // namespace posembed::pretrained

#include "pretrained/table_formats.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "dispatcher/first_use.h"

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

}  // namespace posembed::pretrained

#include "configuration/gguf_architectures.h"

#include <c10/util/Exception.h>

#include <utility>

#include "dispatcher/first_use.h"

namespace posembed::configuration::gguf {
namespace {

constexpr const char* table_text =
#include "configuration/gguf_architectures.inc"
    ;

bool starts(const std::string& key, const std::string& start) {
  return key.compare(0, start.size(), start) == 0;
}

/// The keys that start with `start`; the prefix is removed unless `keep`.
Fields starting(const Fields& fields, const std::string& start, bool keep = false) {
  Fields found = Fields::object();
  for (const auto& each : fields.items()) {
    if (!starts(each.key(), start)) continue;
    found[keep ? each.key() : each.key().substr(start.size())] = each.value();
  }
  return found;
}

std::string named(const std::string& architecture) {
  return "general.architecture " + repr(json(architecture));
}

void check_rotated(const Metadata& file) {
  const json& instead = get(file.rules, "instead");
  TORCH_CHECK_VALUE(instead.is_null(), named(file.architecture), " does not rotate: it has ",
                    text_of(instead));
  const json& why = get(file.rules, "refused");
  TORCH_CHECK_VALUE(why.is_null(), named(file.architecture),
                    " has no single specification: ", text_of(why));
}

/// Rejects files whose value of one key makes llama.cpp rotate in another way.
void check_refused(Metadata& file) {
  const json& rule = get(file.rules, "refused_if");
  if (rule.is_null()) return;
  const std::string key = text_of(get(rule, "key"));
  const json value = file.model.take(key);
  const bool refused = rule.contains("equals") ? equal(value, get(rule, "equals")) : truthy(value);
  TORCH_CHECK_VALUE(!refused, key, ": ", repr(value), " is not understood for ",
                    named(file.architecture), ": ", text_of(get(rule, "why")));
}

/// Baichuan: the number of layers tells which of its models rotate.
void check_block_count(Metadata& file) {
  const json& counts = get(file.rules, "block_counts");
  if (counts.is_null()) return;
  const json count = file.model.need("block_count");
  const json& alibi = get(file.rules, "alibi");
  TORCH_CHECK_VALUE(!equal(count, get(alibi, "block_count")), named(file.architecture),
                    " does not rotate with ", repr(count), " layers: it has ALiBi");
  for (const json& known : counts) {
    if (equal(count, known)) return;
  }
  TORCH_CHECK_VALUE(false, "block_count: expected one of ", repr(counts), " for ",
                    named(file.architecture), ", got ", repr(count));
}

}  // namespace

const json& table() {
  static dispatcher::FirstUse<json> parsed;
  return parsed.get([] { return json::parse(table_text); });
}

Fields keys_of_architecture(const Fields& fields, const std::string& architecture) {
  return starting(fields, architecture + ".");
}

const json& rules_of(const std::string& architecture) {
  const json& rules = get(get(table(), "architectures"), architecture);
  TORCH_CHECK_VALUE(!rules.is_null(), named(architecture),
                    " is not known: describe its rotation in full with RotarySpec, from the ",
                    "model's code: head_dim, base, rotary_dim, pairing (interleaved), scaling and ",
                    "sections, one for each kind of layer, and which layers rotate");
  return rules;
}

Metadata metadata_of(Fields fields, const ConfigurationOptions& options) {
  const std::string architecture = text_of(get(fields, "general.architecture"));
  for (const std::string& key : options.ignore()) fields.erase(key);
  const Fields own = keys_of_architecture(fields, architecture);
  Metadata file{architecture, rules_of(architecture), Keys(own, "the metadata"),
                Keys(starting(own, "rope."), architecture + ".rope"),
                Keys(starting(fields, "rope_", true), "tensors")};
  check_rotated(file);
  check_refused(file);
  check_block_count(file);
  return file;
}

}  // namespace posembed::configuration::gguf

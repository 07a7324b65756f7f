// The library, and the operators that belong to no family. Families register theirs in schema.cpp.
#include <torch/library.h>

#include <nlohmann/json.hpp>

#include "dispatcher/device_errors.h"
#include "dispatcher/schema.h"
#include "posembed/build_info.h"
#include "posembed/mapped_memory.h"
#include "posembed/memory.h"

namespace posembed::dispatcher {
namespace {

/// JSON of BuildInfo.
std::string build_info_text() {
  const BuildInfo info = build_info();
  return nlohmann::ordered_json{{"version", info.version},
                                {"torch_version", info.torch_version},
                                {"cuda_version", info.cuda_version},
                                {"cuda_architectures", info.cuda_architectures},
                                {"compiler", info.compiler},
                                {"instruction_sets", info.instruction_sets},
                                {"instruction_set", info.instruction_set}}
      .dump();
}

}  // namespace
}  // namespace posembed::dispatcher

TORCH_LIBRARY(posembed, m) {
  using posembed::dispatcher::define;
  define(m, "check_errors(bool wait=True) -> ()");
  define(m, "build_info() -> str");
  define(m, "empty_cache() -> int");
  define(m, "set_cache_limit(int bytes) -> int");
  define(m, "prefer_huge_pages(Tensor table) -> ()");
  define(m, "mapped(Tensor table, Device device) -> Tensor");
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("check_errors", posembed::dispatcher::check_errors);
  m.impl("build_info", posembed::dispatcher::build_info_text);
  m.impl("empty_cache", posembed::empty_cache);
  m.impl("set_cache_limit", posembed::set_cache_limit);
  m.impl("prefer_huge_pages", posembed::prefer_huge_pages);
  m.impl("mapped", posembed::mapped);
}

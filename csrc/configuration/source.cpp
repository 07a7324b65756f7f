#include "configuration/source.h"

#include <c10/util/Exception.h>

#include <filesystem>

#include "pretrained/bad_file.h"
#include "pretrained/file.h"

namespace posembed::configuration {
namespace {

namespace fs = std::filesystem;

bool is_json_text(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin != std::string::npos && text[begin] == '{';
}

/// The path of a configuration, or of the one in a model's folder: transformers' or Meta's.
fs::path file_of(const fs::path& path) {
  if (!fs::is_directory(path)) return path;
  for (const char* name : {"config.json", "params.json"}) {
    if (fs::is_regular_file(path / name)) return path / name;
  }
  TORCH_CHECK_VALUE(false, path.string(), ": expected a folder with config.json or params.json");
}

/// Throws std::filesystem::filesystem_error if the path is not a readable file.
std::string text_of_file(const fs::path& path) {
  constexpr int64_t most_bytes = 100'000'000;
  const pretrained::File file(path.string());
  TORCH_CHECK_VALUE(file.size() <= most_bytes, path.string(),
                    ": expected a configuration of at most ", most_bytes, " bytes, got ",
                    file.size());
  try {
    return file.head(file.size());
  } catch (const pretrained::BadFile& error) {
    TORCH_CHECK_VALUE(false, path.string(), ": ", error.what());
  }
}

}  // namespace

Fields load(const std::string& config) {
  return parse(is_json_text(config) ? config : text_of_file(file_of(config)));
}

}  // namespace posembed::configuration

#include "configuration/source.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <fstream>
#include <system_error>

namespace posembed::configuration {
namespace {

namespace fs = std::filesystem;

bool is_json_text(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin != std::string::npos && text[begin] == '{';
}

/// A configuration, or the one in a model's folder: transformers' or Meta's.
fs::path file_of(const fs::path& path) {
  if (!fs::is_directory(path)) return path;
  for (const char* name : {"config.json", "params.json"}) {
    if (fs::is_regular_file(path / name)) return path / name;
  }
  TORCH_CHECK_VALUE(false, path.string(), ": expected a folder with config.json or params.json");
}

std::string text_of_file(const fs::path& path) {
  std::string text(fs::file_size(path), ' ');  // throws where there is no file
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    throw fs::filesystem_error("cannot open", path,
                               std::make_error_code(std::errc::permission_denied));
  }
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text;
}

}  // namespace

Fields load(const std::string& config) {
  return parse(is_json_text(config) ? config : text_of_file(file_of(config)));
}

}  // namespace posembed::configuration

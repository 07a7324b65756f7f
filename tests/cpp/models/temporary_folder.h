// A folder for files that a test writes.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace posembed {

/// Removed after the test.
class TemporaryFolder : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) / test->test_suite_name() / test->name();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string folder() const { return folder_; }

  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ / name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  /// Writes safetensors of float32 tensors.
  std::string write_tensors(const std::string& name, const std::map<std::string, torch::Tensor>& tensors) const {
    std::string header, data;
    for (const auto& [key, tensor] : tensors) {
      const torch::Tensor values = tensor.contiguous();
      const size_t begin = data.size();
      data.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
      header += (header.empty() ? "{\"" : ",\"") + key + R"(":{"dtype":"F32","shape":)" + shape_text(values) +
                ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
    }
    header += "}";
    const uint64_t length = header.size();
    const std::string prefix(reinterpret_cast<const char*>(&length), sizeof length);
    return write(name, prefix + header + data);
  }

 private:
  static std::string shape_text(const torch::Tensor& tensor) {
    std::string text;
    for (const int64_t size : tensor.sizes()) {
      text += (text.empty() ? "[" : ",") + std::to_string(size);
    }
    return text + "]";
  }

  std::filesystem::path folder_;
};

/// The message of the exception that a call throws; empty if it does not throw.
template <typename Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace posembed

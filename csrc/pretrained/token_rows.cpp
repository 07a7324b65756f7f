// Source: StaticModel._encode_helper in MinishLab/model2vec.
#include "pretrained/token_rows.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pretrained/narrowing.h"
#include "pretrained/source.h"

namespace posembed::pretrained {
namespace {

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The table's rows in the order of token ids.
torch::Tensor mapped(const torch::Tensor& rows, const std::string& table,
                     const torch::Tensor& mapping) {
  const bool fits = mapping.numel() == 0 || (mapping.min().item<int64_t>() >= 0 &&
                                             mapping.max().item<int64_t>() < rows.size(0));
  TORCH_CHECK_VALUE(fits, "mapping: expected rows of '", table, "', which has ", rows.size(0));
  return rows.index_select(0, mapping);
}

/// The rows times the weights of their tokens, rounded once.
torch::Tensor weighted(const torch::Tensor& rows, const torch::Tensor& weights) {
  TORCH_CHECK_VALUE(weights.size(0) == rows.size(0), "weights: expected ", rows.size(0),
                    ", one for each token, got ", weights.size(0));
  const torch::Dtype own = rows.is_floating_point() ? rows.scalar_type() : torch::kFloat;
  return (rows.to(torch::kDouble) * weights.unsqueeze(1)).to(own);
}

torch::Tensor in_dtype(const torch::Tensor& rows, std::optional<torch::Dtype> dtype,
                       const std::string& path, const std::string& table) {
  if (dtype.value_or(rows.scalar_type()) == rows.scalar_type()) return rows;
  torch::Tensor result = at::empty_like(rows, rows.options().dtype(*dtype));
  if (const std::optional<Lost> lost = convert(rows, result)) {
    const std::string name(c10::getDtypeNames(*dtype).first);
    with_path(path, [&] {
      fail(0, table, ": expected a number that is finite in ", name, ", got ", lost->number);
    });
  }
  return result;
}

}  // namespace

std::optional<torch::Tensor> token_rows(const VectorFile& file, const ReadOptions& options,
                                        bool by_word) {
  const std::vector<std::string> names = file.names();
  const std::string table = has(names, "embeddings") ? "embeddings" : "embedding.weight";
  const bool is_asked_for = options.tensor().empty() || options.tensor() == table;
  if (!has(names, table.c_str()) || !is_asked_for) return std::nullopt;
  const auto beside = [&](const char* name, torch::Dtype dtype) {
    const bool is_list = has(names, name) && file.shape(name).size() == 1;
    return is_list ? file.tensor(name, dtype, nullptr, true) : torch::Tensor();
  };
  const torch::Tensor mapping = beside("mapping", torch::kLong);
  const torch::Tensor weights = beside("weights", torch::kDouble);
  if (!mapping.defined() && !weights.defined()) return std::nullopt;
  if (by_word) {
    TORCH_CHECK_VALUE(!weights.defined() || weights.eq(1).all().item<bool>(),
                      "words: expected none for a file with weights by token id, 'weights'");
    return std::nullopt;
  }
  torch::Tensor rows = file.table(ReadOptions().tensor(table).progress(options.progress()));
  if (mapping.defined()) rows = mapped(rows, table, mapping);
  if (weights.defined()) rows = weighted(rows, weights);
  return in_dtype(rows, options.dtype(), file.path(), table);
}

torch::Tensor table_from_file(const std::string& path,
                              const std::optional<std::vector<std::string>>& vocabulary,
                              const ReadOptions& read, const OpenOptions& open) {
  TORCH_CHECK_VALUE(vocabulary.has_value() || !read.fallback(),
                    "fallback: expected none without a vocabulary");
  const VectorFile file = pretrained::open(path, open);
  const std::optional<torch::Tensor> by_id = token_rows(file, read, vocabulary.has_value());
  const torch::Tensor table = by_id.has_value()        ? *by_id
                              : vocabulary.has_value() ? file.rows(*vocabulary, read).vectors
                                                       : file.table(read);
  if (const int64_t skipped = file.skipped().count; skipped > 0) {
    TORCH_WARN(path, ": skipped ", skipped, " rows that cannot be read, the first of them row ",
               file.skipped().rows[0].row, ": ", file.skipped().rows[0].reason);
  }
  return table;
}

}  // namespace posembed::pretrained

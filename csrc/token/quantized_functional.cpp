// The C++ functions of tables of codes: thin wrappers around the operators.
#include "posembed/quantized.h"
#include "token/operator.h"

namespace posembed {

int64_t QuantizedRows::memory() const {
  const size_t bytes = codes.nbytes() + scales.nbytes() + (biases ? biases->nbytes() : 0);
  return static_cast<int64_t>(bytes);
}

QuantizedRows functional::quantize_rows(const torch::Tensor& weight, const std::string& format,
                                        int64_t block) {
  const auto [codes, scales, biases] = token::quantize_rows(weight, format, block);
  QuantizedRows rows{codes, scales};
  if (format == "int4") rows.biases = biases;
  return rows;
}

torch::Tensor functional::embedding(const torch::Tensor& ids, const QuantizedRows& rows,
                                    double scale, torch::Dtype dtype) {
  return token::embedding_quantized(
      rows.codes, rows.scales,
      {ids, rows.biases, rows.block_rows, rows.block_columns, scale, dtype});
}

}  // namespace posembed

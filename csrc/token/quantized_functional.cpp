// QuantizedTable and the C++ functions of tables of codes: thin wrappers around the operators.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <ostream>
#include <utility>

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

QuantizedTableImpl::QuantizedTableImpl(QuantizedRows rows_, torch::Dtype dtype)
    : rows(std::move(rows_)), dtype(dtype) {
  QuantizedTableImpl::reset();
}

void QuantizedTableImpl::reset() {
  // A clone gets data of its own, which must not become the original's.
  rows.codes = register_buffer("codes", rows.codes.detach());
  rows.scales = register_buffer("scales", rows.scales.detach());
  if (rows.biases.has_value()) rows.biases = register_buffer("biases", rows.biases->detach());
  forward(at::zeros({0}, rows.codes.options().dtype(at::kLong)));  // checks
}

void QuantizedTableImpl::pretty_print(std::ostream& stream) const {
  const bool packed = rows.codes.scalar_type() == at::kByte;
  const char* code = rows.codes.scalar_type() == at::kChar ? "int8" : "float8_e4m3fn";
  stream << "QuantizedTable(" << rows.codes.size(0) << ", " << rows.codes.size(1) * (packed ? 2 : 1)
         << ", " << (packed ? "4 bits" : code) << ", dtype=torch."
         << c10::getDtypeNames(dtype).first << ")";
}

void QuantizedTableImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void QuantizedTableImpl::to(torch::Dtype dtype, bool) { this->dtype = dtype; }

void QuantizedTableImpl::to(torch::Device device, bool non_blocking) {
  for (torch::Tensor buffer : buffers()) buffer.set_data(buffer.to(device, non_blocking));
}

torch::Tensor QuantizedTableImpl::forward(const torch::Tensor& ids, double scale) {
  return functional::embedding(ids, rows, scale, dtype);
}

torch::Tensor QuantizedTableImpl::dequantize() {
  return forward(at::arange(rows.codes.size(0), rows.codes.options().dtype(at::kLong)));
}

}  // namespace posembed

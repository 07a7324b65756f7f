// QuantizedTable and the C++ functions of tables of codes: thin wrappers around the operators.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "dispatcher/checks.h"
#include "posembed/quantized.h"
#include "token/code_blocks.h"
#include "token/operator.h"

namespace posembed {

int64_t QuantizedRows::memory() const {
  const size_t bytes = codes.nbytes() + scales.nbytes() + (biases ? biases->nbytes() : 0);
  return static_cast<int64_t>(bytes);
}

QuantizedRows QuantizedRows::from_rowwise(const torch::Tensor& packed, int64_t bits) {
  TORCH_CHECK_VALUE(bits != 2, "bits: expected 8 or 4, got 2, FBGEMM's INT2, which is not read");
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits: expected 8 or 4, got ", bits);
  const int64_t tail = bits == 8 ? 8 : 4;  // bytes of scale and bias: float32 or float16
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "packed: expected uint8, got ",
                   dispatcher::dtype_name(packed.scalar_type()));
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(1) > tail,
                    "packed: expected [num_embeddings, more than ", tail, " bytes], got ",
                    packed.sizes());
  const int64_t bytes = packed.size(1) - tail;
  const torch::Tensor codes = packed.narrow(1, 0, bytes).contiguous();
  const torch::Tensor pair = packed.narrow(1, bytes, tail)
                                 .clone(at::MemoryFormat::Contiguous)  // aligned
                                 .view(bits == 8 ? at::kFloat : at::kHalf)
                                 .to(at::kFloat);
  const torch::Tensor scales = pair.narrow(1, 0, 1).contiguous();
  const torch::Tensor biases = pair.narrow(1, 1, 1);
  TORCH_CHECK_VALUE(
      packed.is_meta() || (pair.isfinite().all().item<bool>() && scales.ge(0).all().item<bool>()),
      "packed: expected finite scales of 0 or more behind the codes, got others: FBGEMM's "
      "table-batched rows have them before the codes");
  if (bits == 4) return {codes, scales, biases.contiguous()};
  // Codes 0 to 255 as -128 to 127.
  return {codes.bitwise_xor(128).view(at::kChar), scales, biases + 128 * scales};
}

std::optional<QuantizedRows> QuantizedRows::split(int64_t parts) const {
  const int64_t packed = codes.scalar_type() == at::kByte ? 2 : 1, dim = codes.size(1) * packed;
  const int64_t columns =
      block_columns > 0 ? block_columns : dim / std::max<int64_t>(1, scales.size(1));
  const auto blocks = token::split({block_rows, columns}, dim, parts);
  if (!blocks.has_value() || dim / parts % packed != 0) return std::nullopt;
  const int64_t blocks_in_row = blocks->in_row(dim / parts);
  QuantizedRows shorter{codes.view({codes.size(0) * parts, codes.size(1) / parts}),
                        scales.reshape({-1, blocks_in_row}), std::nullopt, blocks->rows,
                        blocks->columns};
  if (biases.has_value()) shorter.biases = biases->reshape({-1, blocks_in_row});
  return shorter;
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

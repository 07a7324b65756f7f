/// Frozen tables of 8- or 4-bit codes with scales, which are widened as they are looked up.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "posembed/export.h"

namespace posembed {

/// A table of codes: its numbers are codes * scales + biases.
struct POSEMBED_API QuantizedRows {
  /// float8_e4m3fn or int8 [num_embeddings, embedding_dim], or uint8 [num_embeddings,
  /// embedding_dim / 2] with two numbers of 4 bits, 0 to 15, the first in the lower half.
  torch::Tensor codes;
  /// float32, or float8_e8m0fnu (powers of two): [num_embeddings / block_rows, embedding_dim /
  /// block_columns], rounded up.
  torch::Tensor scales;
  std::optional<torch::Tensor> biases = std::nullopt;  ///< float32, as scales; none: 0
  int64_t block_rows = 1;                              ///< rows that share a scale
  int64_t block_columns = 0;  ///< columns that share one; 0: scales divide a row evenly

  /// The codes of FBGEMM's row-wise tables, which torch.ops.quantized.embedding_bag_byte_prepack
  /// and _4bit_prepack make too.
  /// @param packed  uint8 [num_embeddings, bytes]: codes from 0, then scale and bias in float32 for
  ///     8 bits, in float16 for 4
  /// @throws c10::ValueError shape, bits; c10::TypeError dtype
  static QuantizedRows from_rowwise(const torch::Tensor& packed, int64_t bits = 8);

  /// The bytes of codes, scales and biases.
  int64_t memory() const;

  /// The same memory as shorter rows: row id * parts + i is part i of row id. None if a
  /// block of columns has several parts, or one of rows a part of the columns.
  /// @throws c10::ValueError `parts` does not divide a row
  std::optional<QuantizedRows> split(int64_t parts) const;
};

namespace functional {

/// Codes and their scales for a floating table [num_embeddings, embedding_dim].
///
///     auto rows = posembed::functional::quantize_rows(token->weight, "float8", 128);
///     auto vectors = posembed::functional::embedding(ids, rows);
///
/// @param format  "float8" or "int8", whose largest code is the largest number of a block; "int4",
///     whose codes lie evenly between its least and its largest
/// @param block  columns that share a scale, a divisor of embedding_dim; 0: all
/// @throws c10::ValueError an unknown format or a block that does not divide a row
POSEMBED_API QuantizedRows quantize_rows(const torch::Tensor& weight, const std::string& format,
                                         int64_t block = 0);

/// scale * (codes * scales + biases) of the rows of `ids`, computed in float32 (float64 for
/// float64) and rounded once; no gradient.
/// @param ids  int32 or int64 [...], from 0 to num_embeddings - 1
/// @param dtype  of the result [..., embedding_dim]: float32, float64, bfloat16 or float16
/// @throws c10::ValueError shapes; c10::TypeError dtypes; c10::IndexError ids
POSEMBED_API torch::Tensor embedding(const torch::Tensor& ids, const QuantizedRows& rows,
                                     double scale = 1.0, torch::Dtype dtype = torch::kFloat);

}  // namespace functional

/// A frozen table of codes as a module; its buffers are codes, scales and biases. Converting it to
/// another dtype changes that of its results, never a bit of the buffers.
///
///     posembed::QuantizedTable table(posembed::functional::quantize_rows(weight, "int8"));
///     auto vectors = table->forward(ids);  // [...] -> [..., embedding_dim]
class POSEMBED_API QuantizedTableImpl : public torch::nn::Cloneable<QuantizedTableImpl> {
 public:
  /// @param dtype  of the results
  /// @throws c10::ValueError shapes that do not fit together; c10::TypeError dtypes
  explicit QuantizedTableImpl(QuantizedRows rows, torch::Dtype dtype = torch::kFloat);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// ids [...] -> scale * rows [..., embedding_dim]; see functional::embedding.
  torch::Tensor forward(const torch::Tensor& ids, double scale = 1.0);
  /// The whole table [num_embeddings, embedding_dim] as numbers.
  torch::Tensor dequantize();

  /// The buffers.
  QuantizedRows rows;
  torch::Dtype dtype;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})
};

TORCH_MODULE(QuantizedTable);

}  // namespace posembed

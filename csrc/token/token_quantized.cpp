// Tables of codes: looked up without a table of numbers, and made from one. They are frozen.

#include <algorithm>
#include <ostream>
#include <utility>

#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "posembed/quantized.h"
#include "token/token.h"
#include "token/token_operator.h"

namespace posembed::token {
namespace {

// ------------------------------------------------------------------------------------- look-up

Code code_of(const Tensor& codes) {
  switch (codes.scalar_type()) {
    case at::kFloat8_e4m3fn:
      return Code::float8;
    case at::kChar:
      return Code::int8;
    case at::kByte:
      return Code::uint4;
    default:
      TORCH_CHECK_TYPE(false,
                       "codes: expected float8_e4m3fn, int8, or uint8 with two numbers of 4 ",
                       "bits, got ", codes.scalar_type());
  }
}

bool has_exponents(const Tensor& scales) { return scales.scalar_type() == at::kFloat8_e8m0fnu; }

c10::SymInt dim_of(const Tensor& codes) {
  return codes.scalar_type() == at::kByte ? 2 * codes.sym_size(1) : codes.sym_size(1);
}

/// Columns that share a scale; 0 means that a row is divided evenly.
c10::SymInt block_columns_of(const Tensor& codes, const Tensor& scales, int64_t given) {
  if (given > 0) return given;
  const c10::SymInt dim = dim_of(codes), blocks = scales.sym_size(1);
  // A table without columns has no block either: 0 columns of a scale would divide by zero.
  TORCH_CHECK_VALUE(blocks > 0 && dim > 0 && dim % blocks == 0,
                    "scales: expected columns that divide ", dim, ", those of the table, got ",
                    blocks);
  return dim / blocks;
}

void check_frozen(const Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(!dispatcher::has_history(tensor), argument,
                    ": expected a tensor that needs no gradient, as codes are frozen");
}

void check_scales(const Tensor& codes, const Tensor& scales, const Codes& in) {
  // scales: [rows / block_rows, dim / block_columns], rounded up
  TORCH_CHECK_TYPE(scales.scalar_type() == at::kFloat || has_exponents(scales),
                   "scales: expected float32 or float8_e8m0fnu, got ", scales.scalar_type());
  dispatcher::check_rank(scales, "scales", 2, "[rows, blocks]");
  constexpr int64_t most = int64_t{1} << 62;
  TORCH_CHECK_VALUE(in.block_rows >= 1 && in.block_rows <= most,
                    "block_rows: expected 1 to 2^62, got ", in.block_rows);
  TORCH_CHECK_VALUE(in.block_columns >= 0 && in.block_columns <= most,
                    "block_columns: expected 0 to 2^62, got ", in.block_columns);
  const c10::SymInt columns = block_columns_of(codes, scales, in.block_columns);
  TORCH_CHECK_VALUE(code_of(codes) != Code::uint4 || columns % 2 == 0 || scales.sym_size(1) == 1,
                    "block_columns: expected an even number for codes of 4 bits, got ", columns);
  const c10::SymInt rows = (codes.sym_size(0) + (in.block_rows - 1)) / in.block_rows;
  TORCH_CHECK_VALUE(scales.sym_size(0) == rows, "scales: expected ", rows, " rows, one for each ",
                    in.block_rows, " of the table, got ", scales.sym_size(0));
  const c10::SymInt blocks = (dim_of(codes) + columns - 1) / columns;
  TORCH_CHECK_VALUE(scales.sym_size(1) == blocks, "scales: expected ", blocks, " columns, one for ",
                    "each ", columns, " of the table, got ", scales.sym_size(1));
  check_frozen(scales, "scales");
  if (!in.biases.has_value()) return;
  TORCH_CHECK_TYPE(in.biases->scalar_type() == at::kFloat, "biases: expected float32, got ",
                   in.biases->scalar_type());
  dispatcher::check_same_shape(*in.biases, "biases", scales, "scales");
  check_frozen(*in.biases, "biases");
}

Tensor widened_shape(const Tensor& codes, const Tensor& scales, const Codes& in) {
  dispatcher::check_rank(codes, "codes", 2, "[num_embeddings, columns]");
  code_of(codes);
  check_scales(codes, scales, in);
  dispatcher::check_integers(in.ids, "ids");
  const at::ScalarType type = in.dtype.value_or(at::kFloat);
  dispatcher::check_floating(type, "dtype");
  return dispatcher::empty_symint(dispatcher::sizes_and(in.ids, dim_of(codes)),
                                  codes.options().dtype(type));
}

void widen_rows(const Tensor& codes, const Tensor& scales, const Codes& in, const Tensor& out) {
  const Tensor table = dispatcher::with_contiguous_last_dim(codes), factors = scales.contiguous(),
               ids = in.ids.contiguous();
  const Tensor biases = in.biases.has_value() ? in.biases->contiguous() : Tensor();
  if (!dispatcher::on_cuda(ids)) check_ids(ids, table.size(0));
  QuantizedArguments arguments;
  arguments.codes = static_cast<const uint8_t*>(table.const_data_ptr());
  arguments.code = code_of(table);
  arguments.scales = factors.const_data_ptr();
  if (biases.defined()) arguments.biases = biases.const_data_ptr<float>();
  arguments.has_exponents = has_exponents(factors);
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(out);
  arguments.rows = table.size(0);
  arguments.embedding_dim = out.size(-1);
  arguments.row_bytes = table.stride(0);  // a code, or two, is a byte
  arguments.block_rows = in.block_rows;
  if (out.numel() == 0) return;
  arguments.block_columns =
      block_columns_of(table, factors, in.block_columns).guard_int(__FILE__, __LINE__);
  arguments.ids = dispatcher::index_view(ids);
  arguments.count = ids.numel();
  arguments.factor = in.scale;
  arguments.error = dispatcher::device_error(codes.device());
  dispatcher::launch(arguments, codes, arguments.count,
                     arguments.embedding_dim * (1 + core::size_of(arguments.scalar)),
                     gather_codes_cpu, POSEMBED_CUDA_LAUNCHER(gather_codes_cuda));
}

// ------------------------------------------------------------------------------ from numbers

using Table = std::tuple<Tensor, Tensor, Tensor>;

/// Codes whose largest number of a block is the format's largest; blocks of
/// zeros have scale 1.
Table scaled(const Tensor& blocks, at::ScalarType type, double largest) {
  const Tensor extent = blocks.abs().amax(-1);
  const Tensor scales = at::where(extent.eq(0), 1.0, extent / largest);
  Tensor numbers = blocks / scales.unsqueeze(-1);
  if (type == at::kChar) numbers = numbers.round();
  const Tensor codes = numbers.clamp(-largest, largest).to(type).flatten(1);
  return {codes, scales, at::empty({0}, scales.options())};
}

/// Codes 0 to 15 from the least to the largest number of a block, two in a
/// byte.
Table packed(const Tensor& blocks) {
  const Tensor least = blocks.amin(-1), extent = blocks.amax(-1) - least;
  const Tensor scales = at::where(extent.eq(0), 1.0, extent / 15.0);
  const Tensor numbers = (blocks - least.unsqueeze(-1)) / scales.unsqueeze(-1);
  const Tensor pairs = numbers.round().clamp(0, 15).to(at::kByte).flatten(1).unflatten(1, {-1, 2});
  return {pairs.select(2, 0).bitwise_or(pairs.select(2, 1) * 16), scales, least};
}

Table quantize(const Tensor& weight, Text format, int64_t block) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  dispatcher::index_of(format, "format", {"float8", "int8", "int4"});
  const int64_t dim = weight.size(1), columns = block == 0 ? dim : block;
  TORCH_CHECK_VALUE(dim > 0, "weight: expected columns, got none");
  TORCH_CHECK_VALUE(columns > 0 && dim % columns == 0, "block: expected a divisor of ", dim,
                    ", the columns of the table, got ", block);
  TORCH_CHECK_VALUE(format != "int4" || (dim % 2 == 0 && (columns % 2 == 0 || columns == dim)),
                    "block: expected an even number for 'int4', got ", columns);
  const Tensor blocks = weight.detach().to(at::kFloat).unflatten(1, {-1, columns});
  if (format == "int4") return packed(blocks);
  return format == "int8" ? scaled(blocks, at::kChar, 127)
                          : scaled(blocks, at::kFloat8_e4m3fn, 448);
}

}  // namespace

// Codes have no gradient.
TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("embedding_quantized", torch::CppFunction::makeFallthrough());
}

}  // namespace posembed::token

namespace posembed {

// ---------------------------------------------------------------------------- quantized functional
// QuantizedTable and the C++ functions of tables of codes: thin wrappers around the operators.

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

namespace posembed::token {

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  embedding_quantized.implement<widened_shape, widen_rows>(m);
  quantize_rows.compose<quantize>(m);
}

}  // namespace posembed::token

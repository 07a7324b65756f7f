#include <variant>

#include "bag/bag_operator.h"
#include "bindings.h"
#include "ngram/ngram_operator.h"
#include "posembed/bag.h"
#include "posembed/file_table.h"
#include "posembed/learned.h"
#include "posembed/ngram.h"
#include "posembed/quantized.h"
#include "posembed/token.h"
#include "pretrained/source.h"
#include "token/token_operator.h"

namespace posembed::binding {
namespace {

std::shared_ptr<TokenBagImpl> make_bag(int64_t num_embeddings, int64_t embedding_dim,
                                       const std::string& mode, std::optional<int64_t> padding_idx,
                                       bool include_last_offset, const std::string& gradient) {
  return std::make_shared<TokenBagImpl>(
      TokenBagOptions(num_embeddings, embedding_dim)
          .mode(dispatcher::enum_from<BagMode>(mode))
          .padding_idx(padding_idx)
          .include_last_offset(include_last_offset)
          .gradient(dispatcher::enum_from<TableGradient>(gradient)));
}

}  // namespace

const Binding binding_of_bag([](py::module_& module) {
  bind_table<TokenBagImpl>(module, "TokenBag")
      .def(py::init(&make_bag), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::arg("mode") = "sum", py::arg("padding_idx") = py::none(), py::kw_only(),
           py::arg("include_last_offset") = false, py::arg("gradient") = "dense")
      .def("forward", &TokenBagImpl::forward, py::arg("ids"), py::arg("offsets") = py::none(),
           py::arg("weights") = py::none(), without_gil());
});

namespace {

// -------------------------------------------------------------------------------------- file table

std::shared_ptr<FileTableImpl> make_file_table(const py::object& file,
                                               const std::vector<std::string>& tensors,
                                               std::optional<torch::Dtype> dtype) {
  const std::string path = path_of(file);
  const py::gil_scoped_release released;
  return pretrained::with_python_errors(
      [&] { return std::make_shared<FileTableImpl>(FileRows(path, tensors), dtype); });
}

}  // namespace

const Binding binding_of_file_table([](py::module_& module) {
  bind<FileTableImpl>(module, "FileTable")
      .def(py::init(&make_file_table), py::arg("path"), py::arg("tensors"),
           py::arg("dtype") = py::none())
      .def("forward", &FileTableImpl::forward, py::arg("ids"), py::arg("scale") = 1.0,
           without_gil())
      .def("prefetch", &FileTableImpl::prefetch, py::arg("ids"), py::arg("scale") = 1.0,
           without_gil());
  py::class_<RowsAhead>(module, "RowsAhead").def("take", &RowsAhead::take, without_gil());
});

namespace {

// ----------------------------------------------------------------------------------------- learned

using Learned = LearnedPositionalEmbeddingImpl;
using Grid = std::array<int64_t, 2>;

Resampling resampling_of(const std::string& method, bool align_corners, bool antialias,
                         double scale_offset) {
  return Resampling()
      .method(method)
      .align_corners(align_corners)
      .antialias(antialias)
      .scale_offset(scale_offset);
}

std::shared_ptr<Learned> make_learned(std::optional<int64_t> max_positions,
                                      std::optional<int64_t> embedding_dim, int64_t first_row,
                                      std::optional<Grid> grid, int64_t prefix_tokens,
                                      const std::string& resampling, bool align_corners,
                                      bool antialias, double scale_offset,
                                      const std::string& layout) {
  TORCH_CHECK_VALUE(max_positions.has_value() != grid.has_value(),
                    "max_positions: expected either it or grid");
  TORCH_CHECK_VALUE(embedding_dim.has_value(), "embedding_dim: expected a whole number, got None");
  LearnedOptions options = grid.has_value() ? LearnedOptions(*grid, *embedding_dim)
                                            : LearnedOptions(*max_positions, *embedding_dim);
  options.first_row(first_row).prefix_tokens(prefix_tokens).layout(additive_layout(layout));
  options.resampling(resampling_of(resampling, align_corners, antialias, scale_offset));
  return std::make_shared<Learned>(options);
}

std::shared_ptr<Learned> learned_from_file(const py::object& file, Grid grid,
                                           const std::string& tensor, bool freeze,
                                           const std::string& resampling, bool align_corners,
                                           bool antialias, double scale_offset) {
  const Resampling how = resampling_of(resampling, align_corners, antialias, scale_offset);
  const std::string path = path_of(file);
  const auto read = [&] {
    return LearnedPositionalEmbedding::from_file(path, grid, tensor, freeze, how).ptr();
  };
  return pretrained::with_python_errors(read);
}

torch::Tensor learned_forward(LearnedPositionalEmbeddingImpl& self, const torch::Tensor& x,
                              const std::optional<torch::Tensor>& positions, const Offset& offset,
                              const std::optional<Grid>& grid,
                              const std::optional<torch::Tensor>& cu_seqlens) {
  PositionCall call = PositionCall().positions(positions).offset(offset).cu_seqlens(cu_seqlens);
  if (grid.has_value()) call.grid({grid->begin(), grid->end()});
  return self.forward(x, call);
}

torch::Tensor learned_resampled(LearnedPositionalEmbeddingImpl& self, const Grid& grid) {
  return self.resampled({grid.begin(), grid.end()});
}

using Longer = void (Learned::*)(int64_t, const std::string&);
using Resampled = void (Learned::*)(Grid, std::optional<Grid>);

}  // namespace

const Binding binding_of_learned([](py::module_& module) {
  bind<LearnedPositionalEmbeddingImpl>(module, "LearnedPositionalEmbedding")
      .def(py::init(&make_learned), py::arg("max_positions") = py::none(),
           py::arg("embedding_dim") = py::none(), py::kw_only(), py::arg("first_row") = 0,
           py::arg("grid") = py::none(), py::arg("prefix_tokens") = 0,
           py::arg("resampling") = "bicubic", py::arg("align_corners") = false,
           py::arg("antialias") = false, py::arg("scale_offset") = 0.0, py::arg("layout") = "bsd")
      .def("forward", &learned_forward, py::arg("x"), py::arg("positions") = py::none(),
           py::kw_only(), py::arg("offset") = 0, py::arg("grid") = py::none(),
           py::arg("cu_seqlens") = py::none(), without_gil())
      .def("resampled", &learned_resampled, py::arg("grid"), without_gil())
      .def("encode", &LearnedPositionalEmbeddingImpl::encode, py::arg("positions"), without_gil())
      .def("extend", static_cast<Longer>(&Learned::extend), py::arg("max_positions"),
           py::arg("method") = "linear", without_gil())
      .def("extend", static_cast<Resampled>(&Learned::extend), py::arg("grid"), py::kw_only(),
           py::arg("from_grid") = py::none(), without_gil());
  def_maker(module, "LearnedPositionalEmbedding", "from_file", &learned_from_file, py::arg("path"),
            py::kw_only(), py::arg("grid"), py::arg("tensor") = "", py::arg("freeze") = true,
            py::arg("resampling") = "bicubic", py::arg("align_corners") = false,
            py::arg("antialias") = false, py::arg("scale_offset") = 0.0);
});

namespace {

// ------------------------------------------------------------------------------------------- ngram

/// The numbers of Python's NgramSpec.
NgramSpec spec_of(const py::object& spec) {
  const auto numbers = [&spec](const char* name) {
    std::vector<int64_t> result;
    for (const py::handle row : spec.attr(name)) {
      for (const py::handle number : row) result.push_back(number.cast<int64_t>());
    }
    return result;
  };
  const auto maybe = [&spec](const char* name) {
    return spec.attr(name).cast<std::optional<int64_t>>();
  };
  return NgramSpec()
      .multipliers(spec.attr("multipliers").cast<std::vector<int64_t>>())
      .moduli(numbers("moduli"))
      .offsets(numbers("offsets"))
      .sizes(spec.attr("sizes").cast<std::vector<int64_t>>())
      .boundary(maybe("boundary"))
      .padding(maybe("padding"))
      .rule(dispatcher::enum_from<NgramRule>(spec.attr("rule").cast<std::string>()))
      .num_embeddings(maybe("num_embeddings"));
}

std::shared_ptr<NgramEmbeddingImpl> make_ngram(const py::object& spec, int64_t embedding_dim,
                                               bool summed, const std::string& gradient) {
  return std::make_shared<NgramEmbeddingImpl>(
      NgramOptions(spec_of(spec), embedding_dim)
          .summed(summed)
          .gradient(dispatcher::enum_from<TableGradient>(gradient)));
}

std::shared_ptr<PerLayerEmbeddingImpl> make_per_layer(int64_t num_embeddings, int64_t num_layers,
                                                      int64_t layer_dim, const py::object& scale) {
  return std::make_shared<PerLayerEmbeddingImpl>(num_embeddings, num_layers, layer_dim,
                                                 table_scale(scale, layer_dim));
}

using MaybeTensor = std::optional<torch::Tensor>;

NgramCall ngram_call(const MaybeTensor& history, const MaybeTensor& cu_seqlens,
                     const MaybeTensor& mask, const MaybeTensor& lengths) {
  return NgramCall().history(history).cu_seqlens(cu_seqlens).mask(mask).lengths(lengths);
}

torch::Tensor ngram_forward(NgramEmbeddingImpl& self, const torch::Tensor& ids,
                            const MaybeTensor& history, const MaybeTensor& cu_seqlens,
                            const MaybeTensor& mask, const MaybeTensor& lengths) {
  return self.forward(ids, ngram_call(history, cu_seqlens, mask, lengths));
}

torch::Tensor ngram_history(const NgramEmbeddingImpl& self, const torch::Tensor& ids,
                            const MaybeTensor& history, const MaybeTensor& mask,
                            const MaybeTensor& lengths) {
  return self.next_history(ids, ngram_call(history, std::nullopt, mask, lengths));
}

}  // namespace

const Binding binding_of_ngram([](py::module_& module) {
  bind_table<NgramEmbeddingImpl>(module, "NgramEmbedding")
      .def(py::init(&make_ngram), py::arg("spec"), py::arg("embedding_dim"), py::kw_only(),
           py::arg("summed") = false, py::arg("gradient") = "dense")
      .def("forward", &ngram_forward, py::arg("ids"), py::arg("history") = py::none(),
           py::arg("cu_seqlens") = py::none(), py::kw_only(),
           py::arg("attention_mask") = py::none(), py::arg("lengths") = py::none(), without_gil())
      .def("next_history", &ngram_history, py::arg("ids"), py::arg("history") = py::none(),
           py::kw_only(), py::arg("attention_mask") = py::none(), py::arg("lengths") = py::none(),
           without_gil());
  bind_table<PerLayerEmbeddingImpl>(module, "PerLayerEmbedding")
      .def(py::init(&make_per_layer), py::arg("num_embeddings"), py::arg("num_layers"),
           py::arg("layer_dim"), py::kw_only(), py::arg("scale") = 1.0)
      .def("forward", &PerLayerEmbeddingImpl::forward, py::arg("ids"), without_gil())
      .def("layer", &PerLayerEmbeddingImpl::layer, py::arg("ids"), py::arg("index"), without_gil());
});

namespace {

// --------------------------------------------------------------------------------------- quantized

std::shared_ptr<QuantizedTableImpl> make_quantized(const torch::Tensor& codes,
                                                   const torch::Tensor& scales,
                                                   const std::optional<torch::Tensor>& biases,
                                                   int64_t block_rows,
                                                   std::optional<int64_t> block_columns,
                                                   std::optional<torch::Dtype> dtype) {
  return std::make_shared<QuantizedTableImpl>(
      QuantizedRows{codes, scales, biases, block_rows, block_columns.value_or(0)},
      dtype.value_or(torch::get_default_dtype_as_scalartype()));
}

}  // namespace

const Binding binding_of_quantized([](py::module_& module) {
  bind<QuantizedTableImpl>(module, "QuantizedTable")
      .def(py::init(&make_quantized), py::arg("codes"), py::arg("scales"),
           py::arg("biases") = py::none(), py::kw_only(), py::arg("block_rows") = 1,
           py::arg("block_columns") = py::none(), py::arg("dtype") = py::none())
      .def("forward", &QuantizedTableImpl::forward, py::arg("ids"), py::arg("scale") = 1.0,
           without_gil())
      .def("dequantize", &QuantizedTableImpl::dequantize, without_gil());
});

namespace {

// ------------------------------------------------------------------------------------------- token

std::shared_ptr<TokenEmbeddingImpl> make_token(int64_t num_embeddings, int64_t embedding_dim,
                                               std::optional<int64_t> padding_idx,
                                               std::optional<double> max_norm, double norm_type,
                                               bool scale_grad_by_freq, bool sparse,
                                               const py::object& scale,
                                               const std::optional<std::string>& gradient) {
  TokenOptions options(num_embeddings, embedding_dim);
  options.padding_idx(padding_idx).max_norm(max_norm).norm_type(norm_type);
  options.scale_grad_by_freq(scale_grad_by_freq).sparse(sparse);
  options.scale(table_scale(scale, embedding_dim));
  if (gradient.has_value()) options.gradient(dispatcher::enum_from<TableGradient>(*gradient));
  return std::make_shared<TokenEmbeddingImpl>(options);
}

std::shared_ptr<TokenEmbeddingImpl> from_file(
    const py::object& file, const std::string& tensor,
    const std::optional<std::vector<std::string>>& vocabulary, const std::string& missing,
    std::optional<torch::Dtype> dtype, bool freeze, const std::string& on_bad_row) {
  const auto open = pretrained::OpenOptions().on_bad_row(pretrained::on_bad_row_of(on_bad_row));
  const auto read = pretrained::ReadOptions()
                        .tensor(tensor)
                        .dtype(dtype)
                        .missing(pretrained::missing_of(missing))
                        .progress(pretrained::progress_in_python(0));
  const std::string path = path_of(file);
  const py::gil_scoped_release released;
  return pretrained::with_python_errors([&] {
    return TokenEmbedding::from_file(path, vocabulary, read, freeze, {0, 0}, open).ptr();
  });
}

void resize(TokenEmbeddingImpl& self, int64_t num_embeddings,
            const std::variant<std::string, torch::Tensor>& initialization,
            int64_t pad_to_multiple_of, double covariance_scale,
            std::optional<at::Generator> generator) {
  auto how = ResizeOptions().covariance_scale(covariance_scale).generator(std::move(generator));
  how.pad_to_multiple_of(pad_to_multiple_of);
  if (const auto* rows = std::get_if<torch::Tensor>(&initialization)) {
    how.rows(*rows);
  } else {
    how.initialization(
        dispatcher::enum_from<Initialization>(std::get<std::string>(initialization)));
  }
  self.resize(num_embeddings, how);
}

}  // namespace

double table_scale(const py::object& scale, int64_t embedding_dim) {
  if (!py::isinstance<py::str>(scale)) return scale.cast<double>();
  const auto text = scale.cast<std::string>();
  if (text == "sqrt_dim") return std::sqrt(static_cast<double>(embedding_dim));
  throw py::value_error("scale: expected a number or 'sqrt_dim', got '" + text + "'");
}

const Binding binding_of_token([](py::module_& module) {
  bind_table<TokenEmbeddingImpl>(module, "TokenEmbedding")
      .def(py::init(&make_token), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::arg("padding_idx") = py::none(), py::arg("max_norm") = py::none(),
           py::arg("norm_type") = 2.0, py::arg("scale_grad_by_freq") = false,
           py::arg("sparse") = false, py::kw_only(), py::arg("scale") = 1.0,
           py::arg("gradient") = py::none())
      .def("resize", &resize, py::arg("num_embeddings"), py::arg("initialization") = "mean",
           py::kw_only(), py::arg("pad_to_multiple_of") = 1, py::arg("covariance_scale") = 1e-9,
           py::arg("generator") = py::none(), without_gil())
      .def(
          "select", [](TokenEmbeddingImpl& self, const torch::Tensor& rows) { self.select(rows); },
          py::arg("rows"), without_gil())
      .def(
          "train_rows",
          [](TokenEmbeddingImpl& self, const std::optional<torch::Tensor>& rows) {
            self.train_rows(rows);
          },
          py::arg("rows") = py::none(), without_gil())
      .def(
          "freeze_rows",
          [](TokenEmbeddingImpl& self, const torch::Tensor& rows) { self.freeze_rows(rows); },
          py::arg("rows"), without_gil())
      .def("with_embeddings", &TokenEmbeddingImpl::with_embeddings, py::arg("ids"),
           py::arg("features"), py::arg("mask"), without_gil())
      .def("forward", &TokenEmbeddingImpl::forward, py::arg("ids"), without_gil())
      .def("logits", &TokenEmbeddingImpl::logits, py::arg("hidden"), without_gil());
  def_maker(module, "TokenEmbedding", "from_file", &from_file, py::arg("path"), py::kw_only(),
            py::arg("tensor") = "", py::arg("vocabulary") = py::none(), py::arg("missing") = "mean",
            py::arg("dtype") = py::none(), py::arg("freeze") = true,
            py::arg("on_bad_row") = "raise");
});

}  // namespace posembed::binding

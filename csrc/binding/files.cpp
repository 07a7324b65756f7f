#include <filesystem>
#include <memory>

#include "bindings.h"
#include "input/input_operator.h"
#include "posembed/input.h"
#include "posembed/pretrained.h"
#include "pretrained/source.h"

namespace posembed::binding {
namespace {

using MaybeTensor = std::optional<torch::Tensor>;

Positions positions_of(const std::optional<std::string>& text) {
  if (!text.has_value()) return Positions::none;
  if (*text == "learned") return Positions::learned;
  if (*text == "sinusoidal") return Positions::sinusoidal;
  throw py::value_error("positions: expected 'learned', 'sinusoidal' or None, got '" + *text + "'");
}

PositionRule rule_of(const std::string& text) {
  if (text == "consecutive") return PositionRule::consecutive;
  if (text == "roberta") return PositionRule::roberta;
  if (text == "opt") return PositionRule::opt;
  throw py::value_error("position_rule: expected 'consecutive', 'roberta' or 'opt', got '" + text +
                        "'");
}

std::shared_ptr<InputEmbeddingImpl> make_input(
    int64_t num_embeddings, int64_t embedding_dim, const std::optional<std::string>& positions,
    std::optional<int64_t> max_positions, int64_t num_types, const py::object& scale,
    const std::optional<std::string>& norm, std::optional<double> eps, double dropout,
    std::optional<int64_t> padding_idx, const std::string& position_rule,
    std::optional<int64_t> token_dim, std::optional<int64_t> output_dim,
    const std::string& gradient) {
  return std::make_shared<InputEmbeddingImpl>(
      InputOptions(num_embeddings, embedding_dim)
          .positions(positions_of(positions))
          .max_positions(max_positions)
          .num_types(num_types)
          .scale(table_scale(scale, embedding_dim))
          .norm(dispatcher::enum_from<InputNorm>(norm.value_or("none")))
          .eps(eps.has_value() ? Given<double>(*eps) : Given<double>::default_to(1e-5))
          .dropout(dropout)
          .padding_idx(padding_idx)
          .position_rule(rule_of(position_rule))
          .token_dim(token_dim)
          .output_dim(output_dim)
          .gradient(dispatcher::enum_from<TableGradient>(gradient)));
}

torch::Tensor input_forward(InputEmbeddingImpl& self, const MaybeTensor& ids,
                            const MaybeTensor& positions, const MaybeTensor& types,
                            const MaybeTensor& inputs_embeds, const Offset& offset,
                            const MaybeTensor& attention_mask, const MaybeTensor& seed,
                            int64_t first_token, const MaybeTensor& cu_seqlens) {
  return self.forward(ids.value_or(torch::Tensor()), InputCall()
                                                         .positions(positions)
                                                         .types(types)
                                                         .offset(offset)
                                                         .attention_mask(attention_mask)
                                                         .seed(seed)
                                                         .first_token(first_token)
                                                         .cu_seqlens(cu_seqlens)
                                                         .inputs_embeds(inputs_embeds));
}

}  // namespace

const Binding binding_of_input([](py::module_& module) {
  bind<InputEmbeddingImpl>(module, "InputEmbedding")
      .def(py::init(&make_input), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::kw_only(), py::arg("positions") = "learned", py::arg("max_positions") = py::none(),
           py::arg("num_types") = 0, py::arg("scale") = 1.0, py::arg("norm") = py::none(),
           py::arg("eps") = py::none(), py::arg("dropout") = 0.0,
           py::arg("padding_idx") = py::none(), py::arg("position_rule") = "consecutive",
           py::arg("token_dim") = py::none(), py::arg("output_dim") = py::none(),
           py::arg("gradient") = "dense")
      .def("forward", &input_forward, py::arg("ids") = py::none(), py::kw_only(),
           py::arg("positions") = py::none(), py::arg("types") = py::none(),
           py::arg("inputs_embeds") = py::none(), py::arg("offset") = 0,
           py::arg("attention_mask") = py::none(), py::arg("seed") = py::none(),
           py::arg("first_token") = 0, py::arg("cu_seqlens") = py::none(), without_gil())
      .def(
          "with_embeddings",
          [](InputEmbeddingImpl& self, const torch::Tensor& ids, const torch::Tensor& features,
             const torch::Tensor& mask) { return self.with_embeddings(ids, features, mask); },
          py::arg("ids"), py::arg("features"), py::arg("mask"), without_gil());
});

namespace {

// -------------------------------------------------------------------------------------- pretrained
// Readers of files for posembed.pretrained, which turns vocabularies into words and draws progress
// bars.

using pretrained::FileFormatError;
using pretrained::Missing;
using pretrained::OpenOptions;
using pretrained::Progress;
using pretrained::ReadOptions;
using pretrained::VectorFile;
using pretrained::Vocabulary;

using Words = std::vector<std::string>;

/// Translates errors of files to Python's classes; torch translates the others.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const FileFormatError& error) {
    const py::object type = py::module_::import("posembed.pretrained").attr("FileFormatError");
    py::set_error(type, type(python_path(error.path()), error.offset(), error.reason()));
  } catch (const std::filesystem::filesystem_error& error) {
    const py::object type = py::reinterpret_borrow<py::object>(PyExc_OSError);
    const bool is_no_file = error.code() == std::errc::invalid_argument;
    const std::string hint = is_no_file ? ": expected the path of a regular file" : "";
    py::set_error(type, type(error.code().value(), error.code().message() + hint,
                             python_path(error.path1().string())));
  }
}

Missing missing_of(const std::string& text) {
  if (text == "mean") return Missing::mean;
  if (text == "zero") return Missing::zero;
  if (text == "random") return Missing::random;
  if (text == "error") return Missing::error;
  throw py::value_error("missing: expected 'mean', 'zero', 'random' or 'error', got '" + text +
                        "'");
}

/// Calls Python's `progress`, if any. Ctrl-C stops the reading in either case.
Progress progress_of(const py::object& progress) {
  // A shared pointer, because readers copy the function without the GIL, which copying a py::object
  // needs.
  const auto destroy = [](const py::object* object) {
    const py::gil_scoped_acquire locked;
    delete object;
  };
  const std::shared_ptr<const py::object> shared(new py::object(progress), destroy);
  return [shared](int64_t done, int64_t total) {
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!shared->is_none()) (*shared)(done, total);
  };
}

/// The words of a list of str. Encodes them without the UTF-8 copy that Python would cache in each
/// str.
Vocabulary vocabulary_of(const py::list& words) {
  size_t characters = 0;
  for (const py::handle word : words) characters += py::len(word);
  Vocabulary vocabulary(words.size(), 4 * characters);  // at most this many bytes of UTF-8
  for (const py::handle word : words) {
    const auto bytes = py::reinterpret_steal<py::object>(PyUnicode_AsUTF8String(word.ptr()));
    if (!bytes) throw py::error_already_set();
    vocabulary.add(std::string_view(PyBytes_AS_STRING(bytes.ptr()), py::len(bytes)));
  }
  return vocabulary;
}

py::list words_met(const Vocabulary& vocabulary, uint8_t times) {
  py::list words;
  vocabulary.visit_met(
      times, [&](std::string_view word) { words.append(py::str(word.data(), word.size())); });
  return words;
}

py::tuple coverage_of(const Vocabulary& vocabulary) {
  return py::make_tuple(vocabulary.count_met(), words_met(vocabulary, 0), words_met(vocabulary, 2));
}

/// Calls a reader without the GIL.
template <typename Read>
auto unlocked(const Read& read) {
  const py::gil_scoped_release released;
  return read();
}

py::tuple rows(const VectorFile& file, Vocabulary& vocabulary, const std::string& tensor,
               std::optional<torch::Dtype> dtype, const std::string& missing,
               const py::object& progress) {
  const ReadOptions options = read_options(tensor, dtype, missing, progress);
  const torch::Tensor vectors = unlocked([&] { return file.rows(vocabulary, options); });
  return py::make_tuple(vectors, coverage_of(vocabulary));
}

torch::Tensor table(const VectorFile& file, const std::string& tensor,
                    std::optional<torch::Dtype> dtype, const py::object& progress) {
  const ReadOptions options = read_options(tensor, dtype, "mean", progress);
  return unlocked([&] { return file.table(options); });
}

std::optional<torch::Tensor> token_rows(const VectorFile& file, const std::string& tensor,
                                        std::optional<torch::Dtype> dtype, bool by_word) {
  const ReadOptions options = read_options(tensor, dtype, "mean", py::none());
  return unlocked([&] { return pretrained::token_rows(file, options, by_word); });
}

torch::Tensor whole(const VectorFile& file, const std::string& name,
                    std::optional<torch::Dtype> dtype, const py::object& progress, bool copy) {
  const Progress told = progress_of(progress);
  return unlocked([&] { return file.tensor(name, dtype, told, copy); });
}

py::tuple coverage(const VectorFile& file, Vocabulary& vocabulary, const py::object& progress) {
  const Progress told = progress_of(progress);
  unlocked([&] { file.look_up(vocabulary, told); });
  return coverage_of(vocabulary);
}

/// A file with what only readers in Python ask for.
struct OpenFile : VectorFile {
  explicit OpenFile(std::shared_ptr<const pretrained::Source> opened)
      : VectorFile(opened), source(std::move(opened)) {}

  std::shared_ptr<const pretrained::Source> source;
};

OpenFile open(const py::object& path, const Words& words, bool check_utf8,
              const std::string& on_bad_row) {
  const OpenOptions options =
      OpenOptions().words(words).check_utf8(check_utf8).on_bad_row(on_bad_row_of(on_bad_row));
  return OpenFile(pretrained::open_source(path_of(path), options));
}

py::tuple skipped(const VectorFile& file) {
  const pretrained::Skipped skipped = unlocked([&] { return file.skipped(); });
  py::list rows;
  for (const pretrained::SkippedRow& each : skipped.rows) {
    rows.append(py::make_tuple(each.row, each.offset, each.word, each.reason));
  }
  return py::make_tuple(skipped.count, rows);
}

py::object codes(const OpenFile& file, const std::string& tensor) {
  const auto found = unlocked([&] { return file.source->codes(tensor); });
  if (!found.has_value()) return py::none();
  return py::make_tuple(found->format, found->read, found->table, found->parts, found->metadata);
}

}  // namespace

pretrained::OnBadRow on_bad_row_of(const std::string& text) {
  if (text == "raise") return pretrained::OnBadRow::raise;
  if (text == "skip") return pretrained::OnBadRow::skip;
  throw py::value_error("on_bad_row: expected 'raise' or 'skip', got '" + text + "'");
}

pretrained::ReadOptions read_options(const std::string& tensor, std::optional<torch::Dtype> dtype,
                                     const std::string& missing, const py::object& progress) {
  return pretrained::ReadOptions()
      .tensor(tensor)
      .dtype(dtype)
      .missing(missing_of(missing))
      .progress(progress_of(progress));
}

const Binding binding_of_pretrained([](py::module_& module) {
  py::register_exception_translator(&translate);  // also for torch.ops
  module.def("table_formats", &pretrained::table_formats_text);
  py::class_<Vocabulary>(module, "Vocabulary").def(py::init(&vocabulary_of), py::arg("words"));
  py::class_<VectorFile>(module, "VectorFile")
      .def("format", [](const VectorFile& file) { return name(file.format()); })
      .def("names", &VectorFile::names)
      .def("shape", &VectorFile::shape, py::arg("name"), py::call_guard<py::gil_scoped_release>())
      .def("dtype", &VectorFile::dtype, py::arg("name"))
      .def("words", &VectorFile::words, py::call_guard<py::gil_scoped_release>())
      .def("skipped", &skipped)
      .def("tensor", &whole, py::arg("name"), py::arg("dtype"), py::arg("progress"),
           py::arg("copy"))
      .def("table", &table, py::arg("tensor"), py::arg("dtype"), py::arg("progress"))
      .def("token_rows", &token_rows, py::arg("tensor"), py::arg("dtype"), py::arg("by_word"))
      .def("rows", &rows, py::arg("vocabulary"), py::arg("tensor"), py::arg("dtype"),
           py::arg("missing"), py::arg("progress"))
      .def("coverage", &coverage, py::arg("vocabulary"), py::arg("progress"));
  py::class_<OpenFile, VectorFile>(module, "OpenFile").def("codes", &codes, py::arg("tensor"));
  module.def("open_vectors", &open, py::arg("path"), py::arg("words"), py::arg("check_utf8"),
             py::arg("on_bad_row"));
});

}  // namespace posembed::binding

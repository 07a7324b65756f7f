// Readers of files for posembed.pretrained, which turns vocabularies into words and draws progress
// bars.
#include "posembed/pretrained.h"

#include <filesystem>
#include <memory>

#include "bindings.h"
#include "path.h"
#include "pretrained/source.h"
#include "pretrained/token_rows.h"

namespace posembed::binding {
namespace {

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

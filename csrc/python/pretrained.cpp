// The basis of posembed.pretrained, which turns vocabularies into words and draws progress bars.
#include "posembed/pretrained.h"

#include <filesystem>

#include "bindings.h"

namespace posembed::python {
namespace {

using pretrained::Coverage;
using pretrained::FileFormatError;
using pretrained::Missing;
using pretrained::OpenOptions;
using pretrained::Progress;
using pretrained::ReadOptions;
using pretrained::Rows;
using pretrained::VectorFile;

using Words = std::vector<std::string>;

/// Translates errors of files to Python's classes; torch translates the others.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const FileFormatError& error) {
    const py::object type = py::module_::import("posembed.pretrained").attr("FileFormatError");
    py::set_error(type, type(error.path(), error.offset(), error.reason()));
  } catch (const std::filesystem::filesystem_error& error) {
    const py::object type = py::reinterpret_borrow<py::object>(PyExc_OSError);
    py::set_error(type, type(error.code().value(), error.code().message(), error.path1().string()));
  }
}

Missing missing_of(const std::string& text) {
  if (text == "mean") return Missing::mean;
  if (text == "zero") return Missing::zero;
  if (text == "error") return Missing::error;
  throw py::value_error("missing: expected 'mean', 'zero' or 'error', got '" + text + "'");
}

/// A call of Python's `progress`, or none; either way control-C ends the reading.
Progress progress_of(const py::object& progress) {
  return [progress](int64_t done, int64_t total) {
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!progress.is_none()) progress(done, total);
  };
}

/// Words as bytes, which Python decodes: they need not be UTF-8.
py::list bytes_of(const Words& words) {
  py::list result;
  for (const std::string& word : words) result.append(py::bytes(word));
  return result;
}

py::tuple python_of(const Coverage& coverage) {
  return py::make_tuple(coverage.found, coverage.missing, coverage.duplicate);
}

/// Calls a reader without Python's lock.
template <typename Read>
auto unlocked(const Read& read) {
  const py::gil_scoped_release released;
  return read();
}

py::tuple rows(const VectorFile& file, const Words& vocabulary, const std::string& tensor,
               std::optional<torch::Dtype> dtype, const std::string& missing,
               const py::object& progress) {
  const ReadOptions options = read_options(tensor, dtype, missing, progress);
  const Rows rows = unlocked([&] { return file.rows(vocabulary, options); });
  return py::make_tuple(rows.vectors, python_of(rows.coverage));
}

torch::Tensor table(const VectorFile& file, const std::string& tensor,
                    std::optional<torch::Dtype> dtype, const py::object& progress) {
  const ReadOptions options = read_options(tensor, dtype, "mean", progress);
  return unlocked([&] { return file.table(options); });
}

torch::Tensor whole(const VectorFile& file, const std::string& name,
                    std::optional<torch::Dtype> dtype, const py::object& progress) {
  const Progress told = progress_of(progress);
  return unlocked([&] { return file.tensor(name, dtype, told); });
}

py::tuple coverage(const VectorFile& file, const Words& vocabulary, const py::object& progress) {
  const Progress told = progress_of(progress);
  return python_of(unlocked([&] { return file.coverage(vocabulary, told); }));
}

VectorFile open(const std::string& path, const Words& words, bool check_utf8) {
  return pretrained::open(path, OpenOptions().words(words).check_utf8(check_utf8));
}

}  // namespace

pretrained::ReadOptions read_options(const std::string& tensor, std::optional<torch::Dtype> dtype,
                                     const std::string& missing, const py::object& progress) {
  return pretrained::ReadOptions()
      .tensor(tensor)
      .dtype(dtype)
      .missing(missing_of(missing))
      .progress(progress_of(progress));
}

void bind_pretrained(py::module_& module) {
  py::register_local_exception_translator(&translate);
  module.def("open_vectors", &open, py::arg("path"), py::arg("words"), py::arg("check_utf8"));
  py::class_<VectorFile>(module, "VectorFile")
      .def("format", [](const VectorFile& file) { return name(file.format()); })
      .def("names", &VectorFile::names)
      .def("shape", &VectorFile::shape, py::arg("name"))
      .def("dtype", &VectorFile::dtype, py::arg("name"))
      .def("words", [](const VectorFile& file) { return bytes_of(file.words()); })
      .def("tensor", &whole, py::arg("name"), py::arg("dtype"), py::arg("progress"))
      .def("table", &table, py::arg("tensor"), py::arg("dtype"), py::arg("progress"))
      .def("rows", &rows, py::arg("vocabulary"), py::arg("tensor"), py::arg("dtype"),
           py::arg("missing"), py::arg("progress"))
      .def("coverage", &coverage, py::arg("vocabulary"), py::arg("progress"));
}

}  // namespace posembed::python

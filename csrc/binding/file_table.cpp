#include "posembed/file_table.h"

#include "bindings.h"
#include "path.h"

namespace posembed::binding {
namespace {

FileRows open_rows(const py::object& file, const std::vector<std::string>& tensors) {
  const std::string path = path_of(file);
  const py::gil_scoped_release released;
  return FileRows(path, tensors);
}

py::tuple codes_of(const FileRows& file) {
  QuantizedRows rows;
  {
    const py::gil_scoped_release released;
    rows = file.codes();
  }
  return py::make_tuple(rows.codes, rows.scales, rows.block_rows, rows.block_columns);
}

std::shared_ptr<FileTableImpl> make_file_table(const FileRows& rows,
                                               std::optional<torch::Dtype> dtype) {
  return std::make_shared<FileTableImpl>(rows, dtype);
}

}  // namespace

const Binding binding_of_file_table([](py::module_& module) {
  py::class_<FileRows>(module, "FileRows")
      .def(py::init(&open_rows), py::arg("path"), py::arg("tensors"))
      .def("num_embeddings", &FileRows::num_embeddings)
      .def("embedding_dim", &FileRows::embedding_dim)
      .def("dtype", &FileRows::dtype)
      .def("bytes_in_files", &FileRows::bytes_in_files)
      .def("bytes_in_memory", &FileRows::bytes_in_memory)
      .def("codes", &codes_of)
      .def("split", &FileRows::split, py::arg("parts"))
      .def("prefetch", &FileRows::prefetch, py::arg("ids"), without_gil())
      .def("misses", &FileRows::misses)
      .def("handle", &FileRows::handle);
  bind<FileTableImpl>(module, "FileTable")
      .def(py::init(&make_file_table), py::arg("rows"), py::arg("dtype") = py::none())
      .def("forward", &FileTableImpl::forward, py::arg("ids"), py::arg("scale") = 1.0,
           without_gil())
      .def("prefetch", &FileTableImpl::prefetch, py::arg("ids"), py::arg("scale") = 1.0,
           without_gil());
  py::class_<RowsAhead>(module, "RowsAhead").def("take", &RowsAhead::take, without_gil());
});

}  // namespace posembed::binding

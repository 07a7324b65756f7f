#include "posembed/learned.h"

#include "bindings.h"
#include "path.h"

namespace posembed::binding {
namespace {

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
  return LearnedPositionalEmbedding::from_file(
             path_of(file), grid, tensor, freeze,
             resampling_of(resampling, align_corners, antialias, scale_offset))
      .ptr();
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

}  // namespace posembed::binding

#include "posembed/rotary.h"

#include <string>
#include <variant>

#include "bindings.h"
#include "rotary/operator.h"

namespace posembed::binding {

namespace {

using Rotated = std::variant<torch::Tensor, std::tuple<torch::Tensor, torch::Tensor>>;
using MaybeTensor = std::optional<torch::Tensor>;

/// Creates a module from the arguments of Python's RotaryEmbedding, which Python's RotarySpec
/// parses.
std::shared_ptr<RotaryEmbeddingImpl> make_rotary(py::object spec, const std::string& layout_name,
                                                 bool learned_frequencies,
                                                 const std::vector<int64_t>& frequency_sizes,
                                                 std::optional<int64_t> heads,
                                                 std::optional<int64_t> key_heads,
                                                 const py::kwargs& options) {
  if (!py::hasattr(spec, "to_json")) {
    spec = py::module_::import("posembed.specification").attr("RotarySpec")(spec, **options);
  } else if (options.contains("numerics") && options.size() == 1) {
    spec = py::module_::import("dataclasses").attr("replace")(spec, **options);
  } else if (!options.empty()) {
    throw py::value_error("spec_options: expected none beside a RotarySpec");
  }
  const RotarySpec numbers = RotarySpec::from_json(spec.attr("to_json")().cast<std::string>());
  return std::make_shared<RotaryEmbeddingImpl>(
      RotaryOptions(numbers)
          .layout(dispatcher::enum_from<Layout>(layout_name))
          .learned_frequencies(learned_frequencies)
          .frequency_sizes(frequency_sizes)
          .heads(heads)
          .key_heads(key_heads));
}

RotaryCall call_of(const MaybeTensor& positions, const Offset& offset,
                   const MaybeTensor& cu_seqlens, bool inverse) {
  return RotaryCall().positions(positions).offset(offset).cu_seqlens(cu_seqlens).inverse(inverse);
}

Rotated rotary_forward(RotaryEmbeddingImpl& self, const torch::Tensor& query,
                       const MaybeTensor& key, const MaybeTensor& positions, const Offset& offset,
                       const MaybeTensor& cu_seqlens, bool inverse) {
  const py::gil_scoped_release release;
  const RotaryCall call = call_of(positions, offset, cu_seqlens, inverse);
  if (!key.has_value()) return self.forward(query, call);
  return self.forward(query, *key, call);
}

Rotated rotate_in_place(RotaryEmbeddingImpl& self, const torch::Tensor& query,
                        const MaybeTensor& key, const MaybeTensor& positions, const Offset& offset,
                        const MaybeTensor& cu_seqlens, bool inverse) {
  const py::gil_scoped_release release;
  const RotaryCall call = call_of(positions, offset, cu_seqlens, inverse);
  if (!key.has_value()) return self.rotate_(query, call);
  return self.rotate_(query, *key, call);
}

torch::Tensor rerotate_in_place(RotaryEmbeddingImpl& self, const torch::Tensor& key,
                                const torch::Tensor& old_positions,
                                const torch::Tensor& new_positions, const py::object& new_spec) {
  std::optional<RotarySpec> spec;
  if (!new_spec.is_none()) {
    spec = RotarySpec::from_json(new_spec.attr("to_json")().cast<std::string>());
  }
  const py::gil_scoped_release release;
  return self.rerotate_(key, old_positions, new_positions, spec);
}

std::shared_ptr<RotaryEmbeddingImpl> resolve(const RotaryEmbeddingImpl& self, int64_t seq_len) {
  return self.resolve(seq_len).ptr();
}

}  // namespace

const Binding binding_of_rotary([](py::module_& module) {
  bind<RotaryEmbeddingImpl>(module, "RotaryEmbedding")
      .def(py::init(&make_rotary), py::arg("spec_or_head_dim"), py::kw_only(),
           py::arg("layout") = "bshd", py::arg("learned_frequencies") = false,
           py::arg("frequency_sizes") = py::tuple(), py::arg("heads") = py::none(),
           py::arg("key_heads") = py::none())
      .def("forward", &rotary_forward, py::arg("query"), py::arg("key") = py::none(),
           py::arg("positions") = py::none(), py::kw_only(), py::arg("offset") = 0,
           py::arg("cu_seqlens") = py::none(), py::arg("inverse") = false)
      .def("rotate_", &rotate_in_place, py::arg("query"), py::arg("key") = py::none(),
           py::arg("positions") = py::none(), py::kw_only(), py::arg("offset") = 0,
           py::arg("cu_seqlens") = py::none(), py::arg("inverse") = false)
      .def("rerotate_", &rerotate_in_place, py::arg("key"), py::arg("old_positions"),
           py::arg("new_positions"), py::kw_only(), py::arg("new_spec") = py::none())
      .def("resolve", &resolve, py::arg("seq_len"));
});

}  // namespace posembed::binding

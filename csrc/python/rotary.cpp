#include "posembed/rotary.h"

#include <string>
#include <string_view>
#include <variant>

#include "bindings.h"
#include "fast_call.h"

namespace posembed::python {

Layout rotary_layout(std::string_view text) {
  for (const Layout known : {Layout::bshd, Layout::bhsd, Layout::sbhd, Layout::thd}) {
    if (text == posembed::name(known)) return known;
  }
  TORCH_CHECK_VALUE(false, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got '", text, "'");
}

namespace {

using Rotated = std::variant<torch::Tensor, std::tuple<torch::Tensor, torch::Tensor>>;
using MaybeTensor = std::optional<torch::Tensor>;

/// Makes a module from the arguments of Python's RotaryEmbedding, which Python's RotarySpec parses.
std::shared_ptr<RotaryEmbeddingImpl> make_rotary(py::object spec, const std::string& layout_name,
                                                 bool learned_frequencies,
                                                 const py::kwargs& options) {
  if (!py::hasattr(spec, "to_json")) {
    spec = py::module_::import("posembed.specification").attr("RotarySpec")(spec, **options);
  } else if (options.contains("numerics") && options.size() == 1) {
    spec = py::module_::import("dataclasses").attr("replace")(spec, **options);
  } else if (!options.empty()) {
    throw py::value_error("spec_options: expected none beside a RotarySpec");
  }
  const RotarySpec numbers = RotarySpec::from_json(spec.attr("to_json")().cast<std::string>());
  return std::make_shared<RotaryEmbeddingImpl>(RotaryOptions(numbers)
                                                   .layout(rotary_layout(layout_name))
                                                   .learned_frequencies(learned_frequencies));
}

Rotated rotary_forward(RotaryEmbeddingImpl& self, const torch::Tensor& query,
                       const MaybeTensor& key, const MaybeTensor& positions, const Offset& offset,
                       const MaybeTensor& cu_seqlens, bool inverse) {
  const py::gil_scoped_release release;
  if (!key.has_value())
    return self.forward(query, std::nullopt, positions, offset, cu_seqlens, inverse);
  return self.forward(query, *key, positions, offset, cu_seqlens, inverse);
}

Rotated rotate_in_place(RotaryEmbeddingImpl& self, const torch::Tensor& query,
                        const MaybeTensor& key, const MaybeTensor& positions, const Offset& offset,
                        const MaybeTensor& cu_seqlens, bool inverse) {
  const py::gil_scoped_release release;
  if (!key.has_value())
    return self.rotate_(query, std::nullopt, positions, offset, cu_seqlens, inverse);
  return self.rotate_(query, *key, positions, offset, cu_seqlens, inverse);
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

Rotated rotary(const torch::Tensor& query, const MaybeTensor& key, const MaybeTensor& positions,
               std::string_view spec, std::string_view layout_name, int64_t offset, bool inverse,
               const MaybeTensor& frequencies, const MaybeTensor& cu_seqlens) {
  const functional::RotaryCall call{rotary_layout(layout_name), offset, inverse, cu_seqlens,
                                    frequencies};
  const ReleasedForLongWork release(query);
  if (!key.has_value()) return functional::rotary(query, std::nullopt, positions, spec, call);
  return functional::rotary(query, *key, positions, spec, call);
}

/// Returns nothing, because Python already has the tensors.
void rotary_in_place(const torch::Tensor& query, const MaybeTensor& key,
                     const MaybeTensor& positions, std::string_view spec,
                     std::string_view layout_name, int64_t offset, bool inverse,
                     const MaybeTensor& frequencies, const MaybeTensor& cu_seqlens) {
  const functional::RotaryCall call{rotary_layout(layout_name), offset, inverse, cu_seqlens,
                                    frequencies};
  const ReleasedForLongWork release(query);
  if (key.has_value()) {
    functional::rotary_(query, *key, positions, spec, call);
  } else {
    functional::rotary_(query, std::nullopt, positions, spec, call);
  }
}

void rotary_out(const torch::Tensor& query_out, const MaybeTensor& key_out,
                const torch::Tensor& query, const MaybeTensor& key, const MaybeTensor& positions,
                std::string_view spec, std::string_view layout_name, int64_t offset, bool inverse,
                const MaybeTensor& frequencies, const MaybeTensor& cu_seqlens) {
  const functional::RotaryCall call{rotary_layout(layout_name), offset, inverse, cu_seqlens,
                                    frequencies};
  const ReleasedForLongWork release(query);
  if (key.has_value()) {
    functional::rotary_out(query_out, key_out.value(), query, *key, positions, spec, call);
  } else {
    functional::rotary_out(query_out, query, std::nullopt, positions, spec, call);
  }
}

constexpr const char* rotary_arguments[] = {"query",   "key",         "positions",
                                            "spec",    "layout",      "offset",
                                            "inverse", "frequencies", "cu_seqlens"};
constexpr const char* out_arguments[] = {"query_out", "key_out",     "query",     "key",
                                         "positions", "spec",        "layout",    "offset",
                                         "inverse",   "frequencies", "cu_seqlens"};

/// For eager calls: a shorter way to the dispatcher than torch.ops, whose overhead dominates calls
/// for one token.
PyMethodDef rotary_functions[] = {
    fast_method<rotary, rotary_arguments>(
        "rotary",
        "rotary(query, key, positions, spec, layout, offset, inverse, frequencies, "
        "cu_seqlens, /) -> Tensor | tuple[Tensor, Tensor]"),
    fast_method<rotary_in_place, rotary_arguments>(
        "rotary_",
        "rotary_(query, key, positions, spec, layout, offset, inverse, "
        "frequencies, cu_seqlens, /) -> None"),
    fast_method<rotary_out, out_arguments>(
        "rotary_out",
        "rotary_out(query_out, key_out, query, key, positions, spec, layout, "
        "offset, inverse, frequencies, cu_seqlens, /) -> None"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_rotary(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), rotary_functions) != 0) throw py::error_already_set();
  bind<RotaryEmbeddingImpl>(module, "RotaryEmbedding")
      .def(py::init(&make_rotary), py::arg("spec_or_head_dim"), py::kw_only(),
           py::arg("layout") = "bshd", py::arg("learned_frequencies") = false)
      .def("forward", &rotary_forward, py::arg("query"), py::arg("key") = py::none(),
           py::arg("positions") = py::none(), py::kw_only(), py::arg("offset") = 0,
           py::arg("cu_seqlens") = py::none(), py::arg("inverse") = false)
      .def("rotate_", &rotate_in_place, py::arg("query"), py::arg("key") = py::none(),
           py::arg("positions") = py::none(), py::kw_only(), py::arg("offset") = 0,
           py::arg("cu_seqlens") = py::none(), py::arg("inverse") = false)
      .def("rerotate_", &rerotate_in_place, py::arg("key"), py::arg("old_positions"),
           py::arg("new_positions"), py::kw_only(), py::arg("new_spec") = py::none())
      .def("resolve", &resolve, py::arg("seq_len"));
}

}  // namespace posembed::python

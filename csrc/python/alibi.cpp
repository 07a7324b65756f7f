#include "posembed/alibi.h"

#include "bindings.h"
#include "fast_call.h"

namespace posembed::python {
namespace {

using NameOrTensor = std::variant<std::string, torch::Tensor>;

ALiBiOptions::SlopesOption slopes(const NameOrTensor& given) {
  if (const auto* tensor = std::get_if<torch::Tensor>(&given)) return *tensor;
  const auto& text = std::get<std::string>(given);
  for (const Slopes known : {Slopes::press, Slopes::geometric}) {
    if (text == posembed::name(known)) return known;
  }
  throw py::value_error("slopes: expected 'press', 'geometric' or a tensor, got '" + text + "'");
}

std::shared_ptr<ALiBiImpl> make_alibi(int64_t num_heads, const NameOrTensor& given, double max_bias,
                                      bool causal, std::optional<int64_t> total_heads,
                                      int64_t head_start, double factor,
                                      std::optional<int64_t> train_length, bool learned) {
  return std::make_shared<ALiBiImpl>(ALiBiOptions(num_heads)
                                         .slopes(slopes(given))
                                         .max_bias(max_bias)
                                         .causal(causal)
                                         .total_heads(total_heads)
                                         .head_start(head_start)
                                         .factor(factor)
                                         .train_length(train_length)
                                         .learned(learned));
}

std::shared_ptr<ALiBiImpl> from_preset(const std::string& name, int64_t num_heads,
                                       std::optional<int64_t> head_dim) {
  return std::make_shared<ALiBiImpl>(ALiBiOptions::preset(name, num_heads, head_dim));
}

using QueryOffset = std::optional<int64_t>;
using Places = std::optional<torch::Tensor>;

functional::AlibiCall call_of(QueryOffset query_offset, Places query_positions,
                              Places key_positions, Places cu_seqlens, Places attention_mask,
                              double scale = 1.0) {
  functional::AlibiCall call;
  call.query_offset = query_offset;
  call.scale = scale;
  call.query_positions = std::move(query_positions);
  call.key_positions = std::move(key_positions);
  call.cu_seqlens = std::move(cu_seqlens);
  call.attention_mask = std::move(attention_mask);
  return call;
}

torch::Tensor forward(const ALiBiImpl& self, int64_t query_length,
                      std::optional<int64_t> key_length, std::optional<torch::Dtype> dtype,
                      QueryOffset query_offset, Places query_positions, Places key_positions,
                      Places cu_seqlens, Places attention_mask) {
  return self.forward(
      query_length, key_length,
      call_of(query_offset, query_positions, key_positions, cu_seqlens, attention_mask), dtype);
}

/// A method on scores, with the arguments that Python gives it.
template <auto method>
auto on_scores(const ALiBiImpl& self, const torch::Tensor& scores, double scale,
               QueryOffset query_offset, Places query_positions, Places key_positions,
               Places cu_seqlens, Places attention_mask) {
  return (self.*method)(scores, call_of(query_offset, query_positions, key_positions, cu_seqlens,
                                        attention_mask, scale));
}

torch::Tensor attention(const ALiBiImpl& self, const torch::Tensor& query, const torch::Tensor& key,
                        const torch::Tensor& value, std::optional<double> scale, double dropout,
                        QueryOffset query_offset, Places query_positions, Places key_positions,
                        Places cu_seqlens, Places attention_mask) {
  return self.attention(
      query, key, value,
      call_of(query_offset, query_positions, key_positions, cu_seqlens, attention_mask), scale,
      dropout);
}

/// A function of scores, with the arguments that posembed.functional gives it.
template <auto function>
auto with_scores(const torch::Tensor& scores, const torch::Tensor& slopes,
                 const Places& query_positions, const Places& key_positions,
                 const Places& cu_seqlens, const Places& attention_mask, QueryOffset query_offset,
                 bool causal, bool hide, double scale) {
  functional::AlibiCall call =
      call_of(query_offset, query_positions, key_positions, cu_seqlens, attention_mask, scale);
  call.causal = causal;
  call.hide = hide;
  const ReleasedForLongWork release(scores);
  return function(scores, slopes, call);
}

constexpr const char* alibi_arguments[] = {
    "scores",         "slopes",       "query_positions", "key_positions", "cu_seqlens",
    "attention_mask", "query_offset", "causal",          "hide",          "scale"};

PyMethodDef alibi_functions[] = {
    fast_method<with_scores<functional::alibi_add>, alibi_arguments>(
        "alibi_add",
        "alibi_add(scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask, "
        "query_offset, causal, hide, scale, /) -> Tensor"),
    fast_method<with_scores<functional::alibi_add_>, alibi_arguments>(
        "alibi_add_",
        "alibi_add_(scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask, "
        "query_offset, causal, hide, scale, /) -> Tensor"),
    fast_method<with_scores<functional::alibi_softmax>, alibi_arguments>(
        "alibi_softmax",
        "alibi_softmax(scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask, "
        "query_offset, causal, hide, scale, /) -> Tensor"),
    fast_method<with_scores<functional::alibi_softmax_>, alibi_arguments>(
        "alibi_softmax_",
        "alibi_softmax_(scores, slopes, query_positions, key_positions, cu_seqlens, "
        "attention_mask, query_offset, causal, hide, scale, /) -> Tensor"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

const Binding binding_of_alibi([](py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), alibi_functions) != 0) throw py::error_already_set();
  const auto offset = py::arg("query_offset") = py::none();
  const auto queries = py::arg("query_positions") = py::none();
  const auto keys = py::arg("key_positions") = py::none();
  const auto documents = py::arg("cu_seqlens") = py::none();
  const auto mask = py::arg("attention_mask") = py::none();
  const auto def_on_scores = [&](auto& bound, const char* name, auto method) {
    bound.def(name, method, py::arg("scores"), py::kw_only(), py::arg("scale") = 1.0, offset,
              queries, keys, documents, mask, without_gil());
  };
  auto bound = bind<ALiBiImpl>(module, "ALiBi");
  bound
      .def(py::init(&make_alibi), py::arg("num_heads"), py::kw_only(), py::arg("slopes") = "press",
           py::arg("max_bias") = 8.0, py::arg("causal") = true, py::arg("total_heads") = py::none(),
           py::arg("head_start") = 0, py::arg("factor") = 1.0, py::arg("train_length") = py::none(),
           py::arg("learned") = false)
      .def("alibi_slopes", &ALiBiImpl::alibi_slopes, py::arg("batch_size") = py::none(),
           py::arg("key_length") = py::none(), without_gil())
      .def("forward", &forward, py::arg("query_length"), py::arg("key_length") = py::none(),
           py::kw_only(), py::arg("dtype") = py::none(), offset, queries, keys, documents, mask,
           without_gil())
      .def("lse_correction", &ALiBiImpl::lse_correction, py::arg("query_length"), py::kw_only(),
           py::arg("query_start"), py::arg("key_start"), py::arg("form") = "distance",
           without_gil())
      .def("attention", &attention, py::arg("query"), py::arg("key"), py::arg("value"),
           py::kw_only(), py::arg("scale") = py::none(), py::arg("dropout") = 0.0, offset, queries,
           keys, documents, mask, without_gil());
  def_maker(module, "ALiBi", "from_preset", &from_preset, py::arg("name"), py::arg("num_heads"),
            py::kw_only(), py::arg("head_dim") = py::none());
  def_on_scores(bound, "add_", &on_scores<&ALiBiImpl::add_>);
  def_on_scores(bound, "softmax", &on_scores<&ALiBiImpl::softmax>);
  def_on_scores(bound, "softmax_", &on_scores<&ALiBiImpl::softmax_>);
});

}  // namespace posembed::python

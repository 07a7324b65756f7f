#include <string>
#include <variant>

#include "bindings.h"
#include "posembed/fourier.h"
#include "posembed/relative_logits.h"
#include "posembed/rotary.h"
#include "posembed/sinusoidal.h"
#include "relative_bias/relative_bias_operator.h"
#include "rotary/rotary_operator.h"

namespace posembed::binding {
namespace {

using NameOrTensor = std::variant<std::string, torch::Tensor>;

ALiBiOptions::SlopesOption slopes(const NameOrTensor& value) {
  if (const auto* tensor = std::get_if<torch::Tensor>(&value)) return *tensor;
  const auto& text = std::get<std::string>(value);
  for (const Slopes known : {Slopes::paper, Slopes::geometric}) {
    if (text == posembed::name(known)) return known;
  }
  throw py::value_error("slopes: expected 'paper', 'geometric' or a tensor, got '" + text + "'");
}

std::shared_ptr<ALiBiImpl> make_alibi(int64_t num_heads, const NameOrTensor& value, double max_bias,
                                      bool causal, std::optional<int64_t> total_heads,
                                      int64_t head_start, double factor,
                                      std::optional<int64_t> train_length, bool learned) {
  return std::make_shared<ALiBiImpl>(ALiBiOptions(num_heads)
                                         .slopes(slopes(value))
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

/// Wraps a method on scores.
template <auto method>
torch::Tensor on_scores(ALiBiImpl& self, ALiBiCall call, const torch::Tensor& scores,
                        std::optional<double> scale, const MaybeTensor& sample_slopes) {
  return (self.*method)(scores, call.scale(scale).sample_slopes(sample_slopes));
}

torch::Tensor forward(ALiBiImpl& self, ALiBiCall call, int64_t query_length,
                      std::optional<int64_t> key_length, std::optional<torch::Dtype> dtype,
                      const MaybeTensor& sample_slopes) {
  return self.forward(query_length, key_length, call.sample_slopes(sample_slopes), dtype);
}

torch::Tensor attention(ALiBiImpl& self, ALiBiCall call, const torch::Tensor& query,
                        const torch::Tensor& key, const torch::Tensor& value, double dropout,
                        std::optional<double> scale, const MaybeTensor& sample_slopes) {
  return self.attention(query, key, value, call.scale(scale).sample_slopes(sample_slopes), dropout);
}

}  // namespace

const Binding binding_of_alibi([](py::module_& module) {
  const auto scale = py::arg("scale") = py::none();
  const auto own_slopes = py::arg("sample_slopes") = py::none();
  auto bound = bind<ALiBiImpl>(module, "ALiBi");
  bound
      .def(py::init(&make_alibi), py::arg("num_heads"), py::kw_only(), py::arg("slopes") = "paper",
           py::arg("max_bias") = 8.0, py::arg("causal") = true, py::arg("total_heads") = py::none(),
           py::arg("head_start") = 0, py::arg("factor") = 1.0, py::arg("train_length") = py::none(),
           py::arg("learned") = false)
      .def("alibi_slopes", &ALiBiImpl::alibi_slopes, py::arg("batch_size") = py::none(),
           py::arg("key_length") = py::none(), without_gil())
      .def("lse_correction", &ALiBiImpl::lse_correction, py::arg("query_length"), py::kw_only(),
           py::arg("query_start"), py::arg("key_start"), py::arg("form") = "distance",
           without_gil());
  def_call(bound, "forward", &forward, py::arg("query_length"), py::arg("key_length") = py::none(),
           py::kw_only(), py::arg("dtype") = py::none(), own_slopes);
  def_call(bound, "attention", &attention, py::arg("query"), py::arg("key"), py::arg("value"),
           py::kw_only(), py::arg("dropout") = 0.0, scale, own_slopes);
  const auto def_on_scores = [&](const char* name, auto method) {
    def_call(bound, name, method, py::arg("scores"), py::kw_only(), scale, own_slopes);
  };
  def_on_scores("add_", &on_scores<&ALiBiImpl::add_>);
  def_on_scores("softmax", &on_scores<&ALiBiImpl::softmax>);
  def_on_scores("softmax_", &on_scores<&ALiBiImpl::softmax_>);
  def_maker(module, "ALiBi", "from_preset", &from_preset, py::arg("name"), py::arg("num_heads"),
            py::kw_only(), py::arg("head_dim") = py::none());
});

namespace {

// ----------------------------------------------------------------------------------------- fourier

using MaybeText = std::optional<std::string>;

std::shared_ptr<FourierFeaturesImpl> make_fourier(
    const std::optional<torch::Tensor>& frequencies, const MaybeText& preset,
    std::optional<int64_t> octaves, std::optional<FourierOptions::Bands> bands,
    std::optional<std::tuple<int64_t, int64_t, double, std::optional<int64_t>>> random,
    const std::optional<torch::Tensor>& phases, std::optional<bool> learned,
    std::optional<bool> linear, const MaybeText& include_input, const MaybeText& unit,
    const MaybeText& waves, const MaybeText& order, std::optional<bool> centred) {
  FourierOptions options = preset.has_value() ? FourierOptions::preset(*preset) : FourierOptions();
  if (frequencies || octaves || bands || random) {
    options.frequencies(frequencies).octaves(octaves).bands(bands).random(std::nullopt);
  }
  if (random) {
    std::apply([&](auto... all) { options.random(FourierOptions::Random{all...}); }, *random);
  }
  if (phases) options.phases(phases);
  if (learned) options.learned(*learned);
  if (linear) options.linear(*linear);
  if (include_input) options.include_input(*include_input);
  if (unit) options.unit(*unit);
  if (waves) options.waves(*waves);
  if (order) options.order(*order);
  if (centred) options.centred(*centred);
  return std::make_shared<FourierFeaturesImpl>(options);
}

}  // namespace

const Binding binding_of_fourier([](py::module_& module) {
  const py::none none;
  bind<FourierFeaturesImpl>(module, "FourierFeatures")
      .def(py::init(&make_fourier), py::arg("frequencies") = none, py::kw_only(),
           py::arg("preset") = none, py::arg("octaves") = none, py::arg("bands") = none,
           py::arg("random") = none, py::arg("phases") = none, py::arg("learned") = none,
           py::arg("linear") = none, py::arg("include_input") = none, py::arg("unit") = none,
           py::arg("waves") = none, py::arg("order") = none, py::arg("centred") = none)
      .def("forward", &FourierFeaturesImpl::forward, py::arg("coordinates"), py::arg("x") = none,
           py::kw_only(), py::arg("dtype") = none, without_gil());
});

namespace {

// ----------------------------------------------------------------------------------- relative bias

using Window = std::vector<int64_t>;
using MaybeWindow = std::optional<Window>;

std::shared_ptr<RelativePositionBiasImpl> make_relative_bias(
    int64_t num_heads, int64_t num_buckets, int64_t max_distance, bool bidirectional,
    const std::string& buckets, const MaybeWindow& window, bool class_token, int64_t mlp_dim,
    const std::string& mlp_rule, const MaybeWindow& pretrained_window,
    const std::string& resampling, bool align_corners, bool antialias) {
  return std::make_shared<RelativePositionBiasImpl>(
      RelativeBiasOptions(num_heads)
          .num_buckets(num_buckets)
          .max_distance(max_distance)
          .bidirectional(bidirectional)
          .buckets(dispatcher::enum_from<RelativeBuckets>(buckets))
          .window(window.value_or(Window()))
          .class_token(class_token)
          .mlp_dim(mlp_dim)
          .mlp_rule(dispatcher::enum_from<RelativeMlp>(mlp_rule))
          .pretrained_window(pretrained_window.value_or(Window()))
          .resampling(
              Resampling().method(resampling).align_corners(align_corners).antialias(antialias)));
}

torch::Tensor bias_of_positions(RelativePositionBiasImpl& self, ALiBiCall call,
                                int64_t query_length, std::optional<int64_t> key_length) {
  return self.of_positions(query_length, key_length, call);
}

torch::Tensor bias_of_window(RelativePositionBiasImpl& self, const MaybeWindow& window) {
  return self.of_window(window.value_or(Window()));
}

torch::Tensor table_of_window(RelativePositionBiasImpl& self, const MaybeWindow& window) {
  return self.table(window.value_or(Window()));
}

const Binding binding_of_relative_bias([](py::module_& module) {
  auto bound = bind<RelativePositionBiasImpl>(module, "RelativePositionBias");
  bound
      .def(py::init(&make_relative_bias), py::arg("num_heads"), py::kw_only(),
           py::arg("num_buckets") = 32, py::arg("max_distance") = 128,
           py::arg("bidirectional") = true, py::arg("buckets") = "t5",
           py::arg("window") = py::none(), py::arg("class_token") = false, py::arg("mlp_dim") = 0,
           py::arg("mlp_rule") = "swin", py::arg("pretrained_window") = py::none(),
           py::arg("resampling") = "bilinear", py::arg("align_corners") = false,
           py::arg("antialias") = false)
      .def("of_window", &bias_of_window, py::arg("window") = py::none(), without_gil())
      .def("table", &table_of_window, py::arg("window") = py::none(), without_gil())
      .def("extend", &RelativePositionBiasImpl::extend, py::arg("window"), without_gil());
  def_call(bound, "forward", &bias_of_positions, py::arg("query_length"),
           py::arg("key_length") = py::none(), py::kw_only());
});

// --------------------------------------------------------------------------------- relative logits

std::shared_ptr<RelativeLogitsImpl> make_relative_logits(
    const std::variant<int64_t, std::vector<int64_t>>& num_buckets, int64_t head_dim,
    std::optional<int64_t> num_heads, const std::string& buckets, int64_t max_distance,
    bool bidirectional, bool causal, const std::string& by, double scale) {
  const auto* number = std::get_if<int64_t>(&num_buckets);
  const auto counts = number == nullptr ? std::get<std::vector<int64_t>>(num_buckets)
                                        : std::vector<int64_t>{*number};
  return std::make_shared<RelativeLogitsImpl>(
      RelativeLogitsOptions(counts, head_dim)
          .num_heads(num_heads.value_or(0))
          .buckets(dispatcher::enum_from<RelativeBuckets>(buckets))
          .max_distance(max_distance)
          .bidirectional(bidirectional)
          .causal(causal)
          .by_key(dispatcher::index_of(by, "by", {"query", "key"}) == 1)
          .scale(scale));
}

torch::Tensor logits(RelativeLogitsImpl& self, ALiBiCall call, const torch::Tensor& query,
                     std::optional<int64_t> other_length, const MaybeTensor& scores) {
  return self.forward(query, other_length, call, scores);
}

torch::Tensor add(RelativeLogitsImpl& self, ALiBiCall call, const torch::Tensor& scores,
                  const torch::Tensor& query) {
  return self.add_(scores, query, call);
}

const Binding binding_of_relative_logits([](py::module_& module) {
  auto bound = bind<RelativeLogitsImpl>(module, "RelativeLogits");
  bound.def(py::init(&make_relative_logits), py::arg("num_buckets"), py::arg("head_dim"),
            py::kw_only(), py::arg("num_heads") = py::none(), py::arg("buckets") = "clipped",
            py::arg("max_distance") = 128, py::arg("bidirectional") = true,
            py::arg("causal") = false, py::arg("by") = "query", py::arg("scale") = 1.0);
  def_call(bound, "forward", &logits, py::arg("query"), py::arg("other_length") = py::none(),
           py::kw_only(), py::arg("scores") = py::none());
  def_call(bound, "add_", &add, py::arg("scores"), py::arg("query"), py::kw_only());
});

// ------------------------------------------------------------------------------------------ rotary

using Rotated = std::variant<torch::Tensor, std::tuple<torch::Tensor, torch::Tensor>>;

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

/// Wraps rotate(self, call, query) and rotate(self, call, query, key).
template <typename Rotate>
auto rotation(const Rotate& rotate) {
  return [rotate](RotaryEmbeddingImpl& self, const torch::Tensor& query, const MaybeTensor& key,
                  const MaybeTensor& positions, const Offset& offset, const MaybeTensor& cu_seqlens,
                  bool inverse) -> Rotated {
    const py::gil_scoped_release release;
    const RotaryCall call =
        RotaryCall().positions(positions).offset(offset).cu_seqlens(cu_seqlens).inverse(inverse);
    if (!key.has_value()) return rotate(self, call, query);
    return rotate(self, call, query, *key);
  };
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
  auto bound = bind<RotaryEmbeddingImpl>(module, "RotaryEmbedding");
  const auto def_rotation = [&](const char* name, const auto& rotate) {
    bound.def(name, rotation(rotate), py::arg("query"), py::arg("key") = py::none(),
              py::arg("positions") = py::none(), py::kw_only(), py::arg("offset") = 0,
              py::arg("cu_seqlens") = py::none(), py::arg("inverse") = false);
  };
  def_rotation("forward", [](auto& self, const RotaryCall& call, const auto&... rows) {
    return self.forward(rows..., call);
  });
  def_rotation("rotate_", [](auto& self, const RotaryCall& call, const auto&... rows) {
    return self.rotate_(rows..., call);
  });
  bound
      .def(py::init(&make_rotary), py::arg("spec_or_head_dim"), py::kw_only(),
           py::arg("layout") = "bshd", py::arg("learned_frequencies") = false,
           py::arg("frequency_sizes") = py::tuple(), py::arg("heads") = py::none(),
           py::arg("key_heads") = py::none())
      .def("rerotate_", &rerotate_in_place, py::arg("key"), py::arg("old_positions"),
           py::arg("new_positions"), py::kw_only(), py::arg("new_spec") = py::none())
      .def("resolve", &resolve, py::arg("seq_len"));
});

namespace {

// -------------------------------------------------------------------------------------- sinusoidal

using Module = SinusoidalPositionalEmbeddingImpl;
using Wholes = std::optional<std::vector<int64_t>>;

std::shared_ptr<Module> make_sinusoidal(
    int64_t embedding_dim, double base, const std::string& preset, std::optional<bool> cos_first,
    std::optional<double> shift, double scale, int64_t position_scale,
    std::optional<int64_t> padding_idx, bool learned_scale, const Wholes& axes,
    const Wholes& widths, std::optional<double> start, std::optional<double> length,
    const std::optional<std::vector<double>>& interpolation_scale, std::optional<int64_t> max_size,
    const std::string& layout) {
  return std::make_shared<Module>(SinusoidalOptions(embedding_dim)
                                      .base(base)
                                      .preset(preset)
                                      .cos_first(cos_first)
                                      .shift(shift)
                                      .scale(scale)
                                      .position_scale(position_scale)
                                      .padding_idx(padding_idx)
                                      .learned_scale(learned_scale)
                                      .axes(axes)
                                      .widths(widths)
                                      .start(start)
                                      .length(length)
                                      .interpolation_scale(interpolation_scale)
                                      .max_size(max_size)
                                      .layout(additive_layout(layout)));
}

torch::Tensor sinusoidal_forward(Module& self, const torch::Tensor& x,
                                 const std::optional<torch::Tensor>& positions,
                                 const Offset& offset, const Wholes& grid,
                                 const std::optional<torch::Tensor>& mask,
                                 const std::optional<torch::Tensor>& cu_seqlens) {
  PositionCall call =
      PositionCall().positions(positions).offset(offset).mask(mask).cu_seqlens(cu_seqlens);
  if (grid.has_value()) call.grid(*grid);
  return self.forward(x, call);
}

torch::Tensor sinusoidal_grid(Module& self, const std::vector<int64_t>& grid,
                              const std::optional<torch::Tensor>& mask,
                              std::optional<torch::Dtype> dtype,
                              std::optional<torch::Device> device) {
  return self.encode_grid(grid, mask, dtype.value_or(torch::kFloat), device.value_or(torch::kCPU));
}

}  // namespace

const Binding binding_of_sinusoidal([](py::module_& module) {
  bind<Module>(module, "SinusoidalPositionalEmbedding")
      .def(py::init(&make_sinusoidal), py::arg("embedding_dim"), py::kw_only(),
           py::arg("base") = 10000.0, py::arg("preset") = "vaswani",
           py::arg("cos_first") = py::none(), py::arg("shift") = py::none(), py::arg("scale") = 1.0,
           py::arg("position_scale") = 1, py::arg("padding_idx") = py::none(),
           py::arg("learned_scale") = false, py::arg("axes") = py::none(),
           py::arg("widths") = py::none(), py::arg("start") = py::none(),
           py::arg("length") = py::none(), py::arg("interpolation_scale") = py::none(),
           py::arg("max_size") = py::none(), py::arg("layout") = "bsd")
      .def("forward", &sinusoidal_forward, py::arg("x"), py::arg("positions") = py::none(),
           py::kw_only(), py::arg("offset") = 0, py::arg("grid") = py::none(),
           py::arg("mask") = py::none(), py::arg("cu_seqlens") = py::none(), without_gil())
      .def("encode_grid", &sinusoidal_grid, py::arg("grid"), py::arg("mask") = py::none(),
           py::kw_only(), py::arg("dtype") = py::none(), py::arg("device") = py::none(),
           without_gil())
      .def("encode", &Module::encode, py::arg("positions"), py::kw_only(),
           py::arg("dtype") = py::none(), without_gil())
      .def("shift_matrix", &Module::shift_matrix, py::arg("distance"), without_gil());
});

}  // namespace posembed::binding

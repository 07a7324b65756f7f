// M-RoPE: rules as JSON, of which mrope_rules.json has those of published models, and positions by
// a rule.

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/brief.h"
#include "dispatcher/fields.h"
#include "dispatcher/fork.h"
#include "dispatcher/text_cache.h"
#include "positions/positions_operator.h"

namespace posembed {

template <typename Visitor>
static void fields(Visitor& visit, MropeRule& rule) {
  visit("image_token", rule.image_token);
  visit("video_token", rule.video_token);
  visit("audio_token", rule.audio_token);
  visit("video_start", rule.video_start);
  visit("video_end", rule.video_end);
  visit("shared", rule.shared);
  visit("spatial_merge", rule.spatial_merge);
  visit("temporal_merge", rule.temporal_merge);
  visit("separate_frames", rule.separate_frames);
  visit("time", rule.time);
  visit("positions_per_second", rule.positions_per_second);
  visit("time_advances", rule.time_advances);
  visit("audio_chunk", rule.audio_chunk);
  visit("pages", rule.pages);
  visit("margin", rule.margin);
  visit("axes", rule.axes);
  visit("padding", rule.padding);
  visit("canvas", rule.canvas);
}

namespace {

using nlohmann::json;

/// By model type of transformers 5.23, whose get_rope_index each rule equals, but for ERNIE 4.5 VL,
/// PaddleOCR-VL and names that end in "_trained": these number text after a video as the models
/// were trained, from the latest position on any axis, as vLLM does (ernie45_vl.py,
/// paddleocr_vl.py). What is absent is MropeRule's default. Ids are those of its configuration
/// classes, except that Qwen2.5-VL's 2 positions per second and Qwen3-Omni's 13 and its audio id
/// are the checkpoints', and that MiniCPM-V has none: they come from a configuration.
constexpr const char* rules_text =
#include "positions/mrope_rules.inc"
    ;

const json& table() {
  static dispatcher::FirstUse<json> rules;
  return rules.get([] { return json::parse(rules_text); });
}

MropeRule parse(json object) {
  MropeRule rule;
  dispatcher::read_fields("MropeRule", std::move(object), rule);
  return rule;
}

void check(const MropeRule& rule) {
  dispatcher::check_at_least(rule.spatial_merge, 1, "spatial_merge");
  dispatcher::check_at_least(rule.temporal_merge, 1, "temporal_merge");
  dispatcher::check_at_least(rule.audio_chunk, 0, "audio_chunk");
  dispatcher::check_at_least(rule.margin, 0, "margin");
  TORCH_CHECK_VALUE(rule.axes == 3 || (rule.pages && rule.axes == 4), "axes: expected 3",
                    rule.pages ? " or 4" : "", ", got ", rule.axes);
  TORCH_CHECK_VALUE(rule.canvas.empty() || rule.canvas.size() == 5, "canvas: expected 5 ids, got ",
                    rule.canvas.size());
  TORCH_CHECK_VALUE(rule.video_start.has_value() == rule.video_end.has_value(),
                    "video_end: expected an id if and only if there is one for video_start");
  TORCH_CHECK_VALUE(std::isfinite(rule.positions_per_second) && rule.positions_per_second > 0,
                    "positions_per_second: expected a positive number, got ",
                    rule.positions_per_second);
}

}  // namespace

const char* name(MropeTime time) { return dispatcher::name_of(time); }

std::vector<std::string> MropeRule::names() {
  std::vector<std::string> names;
  for (const auto& entry : table().items()) names.push_back(entry.key());
  return names;
}

MropeRule MropeRule::named(const std::string& name) {
  if (!table().contains(name)) {
    std::string known;
    for (const std::string& each : names()) known += (known.empty() ? "'" : ", '") + each + "'";
    TORCH_CHECK_VALUE(false, "rule: expected one of ", known, ", got '", core::brief(name), "'");
  }
  return parse(table().at(name));
}

std::string MropeRule::to_json() const { return dispatcher::written(*this).dump(); }

MropeRule MropeRule::from_json(const std::string& text) {
  if (text.find('{') == std::string::npos) return named(text);
  const MropeRule rule = dispatcher::read_text("MropeRule", text, parse);
  check(rule);
  return rule;
}

bool MropeRule::operator==(const MropeRule& other) const { return to_json() == other.to_json(); }

namespace positions {
namespace {

struct ParsedRule : MropeRule {
  explicit ParsedRule(std::string_view text) : MropeRule(from_json(std::string(text))) {}
};

auto& rules = *new dispatcher::TextCache<ParsedRule>;

}  // namespace

std::shared_ptr<const MropeRule> rule_of(std::string_view text) { return rules.find(text); }

}  // namespace positions
}  // namespace posembed

namespace posembed::positions {
namespace {

// ------------------------------------------------------------------------------------------- mrope
// Positions of text with images, videos and audio. A placeholder's rank among those of its kind
// tells its item and its place there, so nothing loops over tokens or items, and sizes of results
// do not depend on values. Where values cannot be read, misfits become positions that no model
// takes.

// ------------------------------------------------------------------------------------- checks

void check_shape_of_ids(const Tensor& ids, const MaybeTensor& tensor, const char* argument) {
  if (!tensor.has_value()) return;
  TORCH_CHECK_TYPE(at::isIntegralType(tensor->scalar_type(), /*includeBool=*/true), argument,
                   ": expected bool or integers, got ", tensor->scalar_type());
  dispatcher::check_same_shape(*tensor, argument, ids, "ids");
}

void check(const Tensor& ids, const MropeRule& rule, const MropeCall& call) {
  // ids: [batch, seq]
  dispatcher::check_integers(ids, "ids");
  dispatcher::check_rank(ids, "ids", 2, "[batch, seq]");
  TORCH_CHECK_VALUE(rule.canvas.empty() || rule.canvas[0] >= 0,
                    "rule: expected one with the ids of its canvas, from a model's configuration ",
                    "(MropeRule.from_huggingface; in C++, ModelPositions::mrope)");
  check_shape_of_ids(ids, call.attention_mask(), "attention_mask");
  check_shape_of_ids(ids, call.token_types(), "token_types");
  if (call.image_grids().has_value()) check_grids(*call.image_grids(), "image_grids");
  if (call.video_grids().has_value()) check_grids(*call.video_grids(), "video_grids");
  if (const MaybeTensor& seconds = call.seconds_per_grid(); seconds.has_value()) {
    TORCH_CHECK_VALUE(rule.time != MropeTime::index,
                      "seconds_per_grid: expected none, because the rule counts frames");
    TORCH_CHECK_TYPE(at::isFloatingType(seconds->scalar_type()) ||
                         at::isIntegralType(seconds->scalar_type(), /*includeBool=*/false),
                     "seconds_per_grid: expected numbers, got ", seconds->scalar_type());
    TORCH_CHECK_VALUE(call.video_grids().has_value() && seconds->dim() == 1 &&
                          seconds->sym_size(0) == call.video_grids()->sym_size(0),
                      "seconds_per_grid: expected a number for each video, got ",
                      seconds->sym_sizes());
  }
  if (const MaybeTensor& lengths = call.audio_lengths(); lengths.has_value()) {
    dispatcher::check_integers(*lengths, "audio_lengths");
    dispatcher::check_rank(*lengths, "audio_lengths", 1, "[audios]");
  }
}

/// Checks values that no count of placeholders reveals.
void check_values(const MropeCall& call) {
  if (const MaybeTensor& types = call.token_types(); types.has_value()) {
    const Tensor known = types->ge(text).logical_and(types->le(audio));
    TORCH_CHECK_VALUE(known.all().item<bool>(), "token_types: expected 0 to 3, got ",
                      types->masked_select(known.logical_not())[0].item<int64_t>());
  }
  if (const MaybeTensor& seconds = call.seconds_per_grid(); seconds.has_value()) {
    const Tensor known = seconds->isfinite().logical_and(seconds->ge(0));
    TORCH_CHECK_VALUE(known.all().item<bool>(),
                      "seconds_per_grid: expected finite numbers of at least 0, got ",
                      seconds->masked_select(known.logical_not())[0].item<double>());
  }
}

// ----------------------------------------------------------------------------------- sequence

/// The type of each token. GLM's frames are image placeholders between a video's markers.
Tensor types_of(const Tensor& ids, const MropeRule& rule, const MaybeTensor& given) {
  if (given.has_value()) return given->to(at::kLong);
  Tensor types = at::zeros_like(ids, ids.options().dtype(at::kLong));
  const auto set = [&](const std::optional<int64_t>& id, int64_t type) {
    if (id.has_value()) types = types.masked_fill(ids.eq(*id), type);
  };
  set(rule.image_token, image);
  set(rule.video_token, video);
  set(rule.audio_token, audio);
  if (!rule.video_start.has_value()) return types;
  const Tensor inside = ids.eq(*rule.video_start).cumsum(1) > ids.eq(*rule.video_end).cumsum(1);
  return types.masked_fill(types.eq(image).logical_and(inside), video);
}

Sequence sequence_of(const Tensor& ids, const MropeRule& rule, const MropeCall& call) {
  Sequence sequence{ids, types_of(ids, rule, call.token_types()), {}, {}};
  if (!call.attention_mask().has_value()) return sequence;
  const Tensor visible = call.attention_mask()->ne(0);
  sequence.order = visible.logical_not().to(at::kInt).argsort(/*stable=*/true, 1, false);
  sequence.ids = ids.gather(1, sequence.order);
  sequence.visible = visible.gather(1, sequence.order);
  sequence.types =
      sequence.types.gather(1, sequence.order).masked_fill(sequence.visible.logical_not(), padding);
  return sequence;
}

// -------------------------------------------------------------------------------------- items

/// Tokens of images or videos along time, height and width.
Tensor sizes_of_grids(const Tensor& given, const MropeRule& rule, int64_t temporal_merge) {
  const Tensor grids = with_time(given);
  const auto along = [&](int64_t axis, int64_t merge) {
    return grids.select(1, axis).to(at::kLong).div(merge, "floor");
  };
  return at::stack({along(0, temporal_merge), along(1, rule.spatial_merge),
                    along(2, rule.spatial_merge) + (rule.pages ? 1 : 0)},
                   1);
}

/// Tokens of audios, from their feature frames: along time alone.
Tensor sizes_of_audios(const Tensor& lengths, int64_t chunk) {
  const auto half = [](const Tensor& frames) { return (frames - 1).div(2, "floor") + 1; };
  const Tensor frames = lengths.to(at::kLong);
  const Tensor tokens =
      chunk == 0 ? half(half(frames) - 1)
                 : half(half(half(frames.remainder(chunk)))) + frames.div(chunk, "floor") * 13;
  return at::stack({tokens, at::ones_like(tokens), at::ones_like(tokens)}, 1);
}

/// Finds the item of each placeholder, and its place there.
Items find(const char* name, const char* argument, const Tensor& chosen, const Tensor& grids,
           bool separate_frames, int64_t margin) {
  Items items{name, argument, grids, {}, chosen, {}, {}, {}, {}, {}, {}, {}, {}};
  // A further item of one token takes the placeholders beyond the items'.
  const Tensor sizes = at::cat({grids, at::ones({1, 3}, grids.options())});
  const Tensor counts = sizes.prod(1) + 2 * margin, ends = counts.cumsum(0);
  items.total = counts.sum() - counts.select(0, -1);
  const Tensor rank = (chosen.flatten().cumsum(0) - 1).clamp_min(0).view_as(chosen);
  items.item = at::searchsorted(ends.slice(0, 0, -1), rank, /*out_int32=*/false, /*right=*/true);
  const Tensor place = rank - taken(ends - counts, items.item), index = place - margin;
  items.height = taken(sizes.select(1, 1), items.item);
  items.width = taken(sizes.select(1, 2), items.item);
  const Tensor frame = items.height * items.width;
  items.time = index.div(frame, "floor");
  const Tensor in_frame = index - items.time * frame;
  items.row = in_frame.div(items.width, "floor");
  items.column = in_frame - items.row * items.width;
  const Tensor count = separate_frames ? frame : taken(counts, items.item);
  const Tensor within = separate_frames ? in_frame : place;
  items.last = within.eq(count - 1);
  items.torn = chosen.logical_and(within.gt(0));
  if (separate_frames) items.time = at::zeros_like(items.time);
  return items;
}

Items images_of(const Sequence& sequence, const MropeRule& rule, const MropeCall& call) {
  const Tensor grids = call.image_grids().value_or(sequence.types.new_zeros({0, 3}));
  Items images = find("images", "image_grids", sequence.types.eq(image),
                      sizes_of_grids(grids, rule, 1), false, rule.margin);
  images.torn = images.torn.logical_and(neighbour(sequence.types, 1, padding).ne(image));
  return images;
}

/// Whether neighbours are placeholders of videos or audios, which may alternate.
Tensor neighbour_sounds(const Sequence& sequence, int64_t distance) {
  const Tensor type = neighbour(sequence.types, distance, padding);
  return type.eq(video).logical_or(type.eq(audio));
}

Items videos_of(const Sequence& sequence, const MropeRule& rule, const MropeCall& call) {
  const Tensor grids = call.video_grids().value_or(sequence.types.new_zeros({0, 3}));
  Items videos = find("videos", "video_grids", sequence.types.eq(video),
                      sizes_of_grids(grids, rule, rule.temporal_merge), rule.separate_frames, 0);
  videos.torn = videos.torn.logical_and(neighbour_sounds(sequence, 1).logical_not());
  return videos;
}

Items audios_of(const Sequence& sequence, const MropeRule& rule, const Tensor& lengths) {
  Items audios = find("audios", "audio_lengths", sequence.types.eq(audio),
                      sizes_of_audios(lengths, rule.audio_chunk), false, 0);
  audios.torn = audios.torn.logical_and(neighbour_sounds(sequence, 1).logical_not());
  return audios;
}

// -------------------------------------------------------------------------------------- misfits

/// Bool []: each item has its placeholders, in one piece.
Tensor fits(const Items& items) {
  return items.chosen.sum()
      .eq(items.total)
      .logical_and(items.sizes.gt(0).all())
      .logical_and(countable(items.sizes))
      .logical_and(items.torn.any().logical_not());
}

/// Throws unless each item has its placeholders, in one piece.
void check_fits(const Items& items) {
  TORCH_CHECK_VALUE(items.sizes.gt(0).all().item<bool>(), items.argument,
                    ": expected a token or more of each along time, height and width, got ",
                    items.sizes.flatten().min().item<int64_t>());
  TORCH_CHECK_VALUE(countable(items.sizes).item<bool>(), items.argument,
                    ": expected fewer than 2^53 tokens");
  const int64_t found = items.chosen.sum().item<int64_t>(), total = items.total.item<int64_t>();
  TORCH_CHECK_VALUE(found == total, items.argument, ": expected ", found,
                    " tokens, the placeholders of ", items.name, " in ids, got ", total);
  if (!items.torn.any().item<bool>()) return;
  const Tensor first = items.torn.nonzero()[0];  // sample, token
  const Tensor item = items.item.index({first[0], first[1]});
  TORCH_CHECK_VALUE(false, items.argument, ": expected the placeholders of number ",
                    item.item<int64_t>(), " of the ", items.name,
                    " side by side, got another token before token ", first[1].item<int64_t>(),
                    " of sample ", first[0].item<int64_t>(), ", padding not counted");
}

// ------------------------------------------------------------------------------------ positions

/// Temporal positions of a video's placeholders, in the order of rounding that models have.
Tensor times_of(const Items& videos, const MropeRule& rule, const MaybeTensor& seconds) {
  if (rule.time == MropeTime::index) return videos.time;
  const Tensor given =
      seconds.has_value() ? *seconds : at::ones_like(videos.sizes.select(1, 0), at::kFloat);
  const bool interval = rule.time == MropeTime::interval;
  const Tensor factors = (interval ? given * rule.positions_per_second : given).to(at::kFloat);
  const Tensor factor = taken(at::constant_pad_nd(factors, {0, 1}, 1), videos.item);
  Tensor times = videos.time.to(at::kFloat) * factor;
  if (!interval) times = times * rule.positions_per_second;
  return rule.time == MropeTime::exact ? times.to(at::kDouble) : times.to(at::kLong);
}

/// The index of each audio placeholder in its audio: since the last token that is neither audio nor
/// video.
Tensor audio_index(const Sequence& sequence) {
  const Tensor chosen = sequence.types.eq(audio).to(at::kLong);
  const Tensor rank = chosen.cumsum(1) - chosen;
  const Tensor begins = neighbour_sounds(sequence, 1).logical_not();
  return rank - std::get<0>((rank * begins).cummax(1));
}

/// Text counts on from the largest position before it; an item's tokens begin where it begins.
Tensor running_positions(const Sequence& sequence, const MropeRule& rule, const Items& images,
                         const Items& videos, const MaybeTensor& seconds) {
  const at::ScalarType type = rule.time == MropeTime::exact ? at::kDouble : at::kLong;
  const Tensor sounds = sequence.types.eq(audio), index = audio_index(sequence) * sounds;
  const auto either = [&](const Tensor& of_image, const Tensor& of_video) {
    return at::where(images.chosen, of_image, at::where(videos.chosen, of_video, index)).to(type);
  };
  const Tensor time = either(images.time, times_of(videos, rule, seconds)),
               row = either(images.row, videos.row), column = either(images.column, videos.column);
  Tensor extent = at::maximum(row, column) + 1;
  if (rule.time_advances) extent = at::maximum(extent, time + 1);
  const Tensor next = neighbour(sequence.types, -1, padding);
  const Tensor ends =
      at::where(sounds, neighbour_sounds(sequence, -1).logical_not(),
                at::where(videos.chosen, videos.last.logical_and(next.ne(audio)), images.last));
  Tensor step = at::where(sequence.types.gt(text), extent * ends, at::ones_like(extent));
  for (const auto& [first, second] : rule.shared) {
    const Tensor shares =
        sequence.ids.eq(first).logical_and(neighbour(sequence.ids, -1, -1).eq(second));
    step = step.masked_fill(shares, 0);
  }
  const Tensor start = step.cumsum(1) - step;
  return at::stack({start + time, start + row, start + column});
}

/// Text counts every token; an image's tokens have their column, row and the image's number.
Tensor page_positions(const Sequence& sequence, const MropeRule& rule, const Items& images) {
  const Tensor count = at::ones_like(sequence.types).cumsum(1) - 1;
  const Tensor inside = images.chosen.logical_and(images.time.eq(0));  // not in the margin
  const auto or_count = [&](const Tensor& place) { return at::where(inside, place, count); };
  const Tensor positions =
      at::stack({count, or_count(images.column), or_count(images.row), or_count(images.item)});
  return positions.slice(0, 4 - rule.axes);
}

/// The next position minus the number of tokens: [batch, 1].
Tensor delta_of(const Sequence& sequence, const Tensor& positions) {
  const bool masked = sequence.visible.defined();
  const Tensor shown =
      masked ? positions.masked_fill(sequence.visible.logical_not(), -1) : positions;
  // A column more, for sequences without tokens.
  const Tensor largest = at::constant_pad_nd(shown, {1, 0}, -1).amax({0, 2});
  const Tensor count = (masked ? sequence.visible : sequence.types.ge(text)).sum(1);
  return (largest + 1 - count).unsqueeze(1);
}

/// Positions at the places that tokens had, and those of padding.
Tensor restored(const Sequence& sequence, const Tensor& positions, int64_t of_padding) {
  if (!sequence.visible.defined()) return positions;
  const Tensor filled = positions.masked_fill(sequence.visible.logical_not(), of_padding);
  return at::zeros_like(filled).scatter(2, sequence.order.expand_as(filled), filled);
}

std::tuple<Tensor, Tensor> compute_mrope(const Tensor& ids, const MropeInputs& inputs) {
  const auto rule = rule_of(inputs.rule);
  const MropeCall& call = inputs.call;
  check(ids, *rule, call);
  if (readable(ids)) check_values(call);
  const Sequence sequence = sequence_of(ids, *rule, call);
  std::vector<Items> all = {images_of(sequence, *rule, call), videos_of(sequence, *rule, call)};
  if (call.audio_lengths().has_value()) {
    all.push_back(audios_of(sequence, *rule, *call.audio_lengths()));
  }
  Tensor positions = rule->pages            ? page_positions(sequence, *rule, all[0])
                     : rule->canvas.empty() ? running_positions(sequence, *rule, all[0], all[1],
                                                                call.seconds_per_grid())
                                            : canvas_positions(sequence, *rule, all[0], all[1]);
  Tensor delta = delta_of(sequence, positions);
  positions = restored(sequence, positions, rule->padding);
  if (readable(ids)) {
    for (const Items& items : all) check_fits(items);
  } else {
    Tensor fit = fits(all[0]);
    for (const Items& items : all) fit = fit.logical_and(fits(items));
    positions = or_none(positions, fit);
    delta = or_none(delta, fit);
  }
  if (rule->time != MropeTime::exact) return {positions, delta};
  return {positions.to(at::kFloat), delta.to(at::kFloat)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) { mrope_positions.compose_batched<compute_mrope>(m); }

}  // namespace posembed::positions

// LearnedPositionalEmbedding and the functional interface: thin wrappers around the operators.
#include <c10/util/StringUtil.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <ostream>
#include <string_view>

#include "learned/learned_operator.h"
#include "posembed/learned.h"
#include "posembed/memory.h"
#include "posembed/pretrained.h"

namespace posembed {

namespace learned {
namespace {

void check_options(const LearnedOptions& options) {
  const std::vector<int64_t>& grid = options.grid();
  dispatcher::check_at_least(options.prefix_tokens(), 0, "prefix_tokens");
  TORCH_CHECK_VALUE(!grid.empty() || options.prefix_tokens() == 0,
                    "prefix_tokens: expected 0 without a grid, got ", options.prefix_tokens());
  TORCH_CHECK_VALUE(grid.empty() || (grid.size() == 2 && grid[0] >= 1 && grid[1] >= 1),
                    "grid: expected the numbers of rows and columns, each 1 or more, got ", grid);
  check_resampling(options.resampling());
}

int64_t positions_of(const LearnedOptions& options) {
  const int64_t cells = dispatcher::product(options.grid()[0], options.grid()[1], "grid");
  return dispatcher::sum(cells, options.prefix_tokens(), "prefix_tokens");
}

void print_grid(const LearnedOptions& options, std::ostream& stream) {
  stream << ", grid=(" << options.grid()[0] << ", " << options.grid()[1] << ")";
  if (options.prefix_tokens() != 0) stream << ", prefix_tokens=" << options.prefix_tokens();
  print_resampling(options.resampling(), "bicubic", stream);
}

/// The rows of a checkpoint's tensor, whose shape programs write in different ways.
torch::Tensor table_of(const torch::Tensor& embeddings, std::array<int64_t, 2> grid) {
  dispatcher::check_floating(embeddings, "embeddings");
  torch::Tensor table = embeddings;
  if (table.dim() > 2 && table.size(0) == 1) table = table.squeeze(0);
  if (table.dim() == 3 && table.size(0) == grid[0] && table.size(1) == grid[1]) {
    table = table.flatten(0, 1);
  }
  TORCH_CHECK_VALUE(
      grid[0] >= 1 && grid[1] >= 1 && table.dim() == 2 && grid[0] <= table.size(0) &&
          grid[1] <= table.size(0) && grid[0] * grid[1] <= table.size(0),
      "embeddings: expected [tokens, embedding_dim] with at least the cells of grid (", grid[0],
      ", ", grid[1], "), or [rows, columns, embedding_dim], got ", embeddings.sizes());
  return table;
}

/// The only tensor that is named as programs name tables of positions.
std::string table_name(const pretrained::VectorFile& file) {
  std::vector<std::string> found;
  for (const std::string& name : file.names()) {
    for (const char* const end :
         {"position_embeddings", "position_embedding", "position_embedding.weight", "pos_embed",
          "positional_embedding"}) {
      const std::string_view known = end;
      const bool ends = name.size() >= known.size() &&
                        name.compare(name.size() - known.size(), known.size(), known) == 0;
      if (ends) found.push_back(name);
    }
  }
  TORCH_CHECK_VALUE(found.size() == 1, "tensor: expected the name of the table in ", file.path(),
                    found.empty() ? ", which has none with a usual name"
                                  : ", which has several with usual names: ",
                    c10::Join(", ", found));
  return found.front();
}

}  // namespace

void print_resampling(const Resampling& how, const char* usual_method, std::ostream& stream) {
  if (how.method() != usual_method) stream << ", resampling='" << how.method() << "'";
  if (how.align_corners()) stream << ", align_corners=True";
  if (how.antialias()) stream << ", antialias=True";
  if (how.scale_offset() != 0) stream << ", scale_offset=" << how.scale_offset();
}

}  // namespace learned

namespace functional {

torch::Tensor learned_add(const torch::Tensor& x, const torch::Tensor& weight,
                          const PositionCall& call, int64_t first_row) {
  const Offset& offset = call.offset();
  return learned::learned_add(
      x, weight,
      {offset.positions(call.positions(), x, x.dim() - 3, x.dim() - 2, call.cu_seqlens()),
       call.cu_seqlens().has_value() ? c10::SymInt(0) : offset.number(), first_row});
}

torch::Tensor learned_encode(const torch::Tensor& weight, const torch::Tensor& positions,
                             int64_t first_row) {
  return learned::learned_encode(weight, positions, first_row);
}

torch::Tensor learned_extend(const torch::Tensor& weight, int64_t max_positions, int64_t first_row,
                             const std::string& method) {
  return learned::learned_extend(weight, max_positions, first_row, method);
}

torch::Tensor learned_resample(const torch::Tensor& weight, const std::vector<int64_t>& grid,
                               const std::vector<int64_t>& new_grid, const Resampling& how) {
  return learned::learned_resample(weight, c10::fromIntArrayRefSlow(grid),
                                   c10::fromIntArrayRefSlow(new_grid), {how});
}

torch::Tensor learned_packed(const torch::Tensor& weight, const std::vector<int64_t>& grid,
                             const torch::Tensor& grids, const PackedPictures& pictures,
                             const Resampling& how) {
  return learned::learned_packed(weight, c10::fromIntArrayRefSlow(grid), grids, pictures.merge(),
                                 pictures.num_tokens(), {how});
}

torch::Tensor roberta_positions(const torch::Tensor& ids, int64_t padding_idx,
                                int64_t past_length) {
  dispatcher::check_integers(ids, "ids");
  return learned::learned_positions(ids.ne(padding_idx), past_length, 0);
}

torch::Tensor opt_positions(const torch::Tensor& attention_mask, int64_t past_length) {
  return learned::learned_positions(attention_mask, 0, past_length);
}

torch::Tensor fairseq_positions(const torch::Tensor& ids, int64_t padding_idx) {
  return roberta_positions(ids, padding_idx, 0);
}

}  // namespace functional

LearnedPositionalEmbeddingImpl::LearnedPositionalEmbeddingImpl(const LearnedOptions& options)
    : options(options) {
  LearnedPositionalEmbeddingImpl::reset();
}

void LearnedPositionalEmbeddingImpl::reset() {
  learned::check_options(options);
  if (!options.grid().empty()) options.max_positions(learned::positions_of(options));
  dispatcher::check_at_least(options.max_positions(), 0, "max_positions");
  dispatcher::check_at_least(options.embedding_dim(), 0, "embedding_dim");
  dispatcher::check_at_least(options.first_row(), 0, "first_row");
  const int64_t rows =
      dispatcher::sum(options.first_row(), options.max_positions(), "max_positions");
  weight = register_parameter("weight", torch::empty({rows, options.embedding_dim()}));
  reset_parameters();
}

void LearnedPositionalEmbeddingImpl::reset_parameters() {
  prefer_huge_pages(weight);
  torch::nn::init::normal_(weight, 0.0, 0.02);
}

void LearnedPositionalEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "LearnedPositionalEmbedding(" << options.max_positions() << ", "
         << options.embedding_dim();
  if (options.first_row() != 0) stream << ", first_row=" << options.first_row();
  if (!options.grid().empty()) learned::print_grid(options, stream);
  if (options.layout() != AdditiveLayout::bsd) {
    stream << ", layout='" << posembed::name(options.layout()) << "'";
  }
  stream << ")";
}

torch::Tensor LearnedPositionalEmbeddingImpl::forward(const torch::Tensor& x,
                                                      const PositionCall& call) {
  const bool turned = options.layout() == AdditiveLayout::sbd && x.dim() == 3;
  return functional::learned_add(x, resampled(call.grid()), turned ? call.sequence_first(x) : call,
                                 options.first_row());
}

torch::Tensor LearnedPositionalEmbeddingImpl::resampled(const std::vector<int64_t>& grid) {
  if (grid.empty() || grid == options.grid()) return weight;
  TORCH_CHECK_VALUE(!options.grid().empty(),
                    "grid: expected none, because the table has none, got ", grid);
  return functional::learned_resample(weight, options.grid(), grid, options.resampling());
}

torch::Tensor LearnedPositionalEmbeddingImpl::packed(const torch::Tensor& grids,
                                                     const PackedPictures& pictures) {
  TORCH_CHECK_VALUE(!options.grid().empty(), "grids: expected none, because the table has no grid");
  return functional::learned_packed(weight, options.grid(), grids, pictures, options.resampling());
}

torch::Tensor LearnedPositionalEmbeddingImpl::encode(const torch::Tensor& positions) {
  return functional::learned_encode(weight, positions, options.first_row());
}

void LearnedPositionalEmbeddingImpl::extend(int64_t max_positions, const std::string& method) {
  TORCH_CHECK_VALUE(options.grid().empty(),
                    "max_positions: expected a grid, because the table has one, got ",
                    max_positions);
  const torch::NoGradGuard no_grad;
  weight.set_data(functional::learned_extend(weight, max_positions, options.first_row(), method));
  weight.mutable_grad() = torch::Tensor();
  options.max_positions(max_positions);
}

void LearnedPositionalEmbeddingImpl::extend(std::array<int64_t, 2> grid,
                                            std::optional<std::array<int64_t, 2>> from_grid) {
  std::vector<int64_t> from = options.grid();
  if (from_grid.has_value()) from.assign(from_grid->begin(), from_grid->end());
  TORCH_CHECK_VALUE(!from.empty(), "from_grid: expected the table's grid, because it has none");
  const std::vector<int64_t> to(grid.begin(), grid.end());
  const torch::NoGradGuard no_grad;
  const torch::Tensor table = functional::learned_resample(weight, from, to, options.resampling());
  const int64_t prefix = table.size(0) - to[0] * to[1] - options.first_row();
  TORCH_CHECK_VALUE(prefix >= 0, "from_grid: expected at most ", options.max_positions(),
                    " cells, the positions of the table, got ", from);
  weight.set_data(table);
  weight.mutable_grad() = torch::Tensor();
  options.grid(to).prefix_tokens(prefix).max_positions(prefix + to[0] * to[1]);
}

LearnedPositionalEmbedding LearnedPositionalEmbedding::from_pretrained(
    const torch::Tensor& embeddings, std::array<int64_t, 2> grid, bool freeze,
    const Resampling& resampling) {
  const torch::Tensor table = learned::table_of(embeddings, grid);
  LearnedPositionalEmbedding module(LearnedOptions(grid, 0).resampling(resampling));
  module->options.embedding_dim(table.size(1))
      .prefix_tokens(table.size(0) - grid[0] * grid[1])
      .max_positions(table.size(0));
  module->weight.set_data(table.detach());
  module->weight.requires_grad_(!freeze);
  return module;
}

LearnedPositionalEmbedding LearnedPositionalEmbedding::from_file(const std::string& path,
                                                                 std::array<int64_t, 2> grid,
                                                                 const std::string& tensor,
                                                                 bool freeze,
                                                                 const Resampling& resampling) {
  const pretrained::VectorFile file = pretrained::open(path);
  const std::string name = tensor.empty() ? learned::table_name(file) : tensor;
  const torch::Tensor table = file.tensor(name, std::nullopt, nullptr, /*copy=*/true);
  return from_pretrained(table, grid, freeze, resampling);
}

}  // namespace posembed

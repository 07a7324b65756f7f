/// Learned positions: a table with a trained row for each position, added to the token there.
/// Gehring et al., "Convolutional Sequence to Sequence Learning", arXiv:1705.03122; BERT, GPT-2,
/// OPT, RoBERTa.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/offset.h"

namespace posembed {

/// How the rows of a grid become those of another one: torch.nn.functional.interpolate in two
/// dimensions.
struct POSEMBED_API Resampling {
  /// "bicubic" or "bilinear".
  TORCH_ARG(std::string, method) = "bicubic";
  /// The corners of both grids are the same points.
  TORCH_ARG(bool, align_corners) = false;
  /// Average over all cells that a smaller grid merges.
  TORCH_ARG(bool, antialias) = false;
  /// The scale is (new size + scale_offset) / size; 0.1 in DINO and in DINOv2's own program.
  TORCH_ARG(double, scale_offset) = 0.0;
};

/// How pictures are packed one after another.
struct POSEMBED_API PackedPictures {
  /// The tokens of a frame are ordered by squares of merge x merge, which a vision tower merges.
  TORCH_ARG(int64_t, merge) = 1;
  /// The number of tokens; default: that of the grids, for which a GPU is waited for.
  TORCH_ARG(std::optional<int64_t>, num_tokens) = std::nullopt;
};

namespace functional {

/// x plus rows of a table; gradients flow to both.
/// @param x  floating [batch, seq, embedding_dim]
/// @param weight  [first_row + max_positions, embedding_dim], in the dtype of x
/// @param call  positions int32 or int64
/// @param first_row  the row of position 0
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError a position
///     without a row
POSEMBED_API torch::Tensor learned_add(const torch::Tensor& x, const torch::Tensor& weight,
                                       const PositionCall& call = {}, int64_t first_row = 0);

/// Looks up the rows of positions: int32/int64 [...] -> [..., embedding_dim]; otherwise like
/// learned_add().
POSEMBED_API torch::Tensor learned_encode(const torch::Tensor& weight,
                                          const torch::Tensor& positions, int64_t first_row = 0);

/// Returns a longer table [first_row + max_positions, embedding_dim]; see
/// LearnedPositionalEmbeddingImpl::extend.
POSEMBED_API torch::Tensor learned_extend(const torch::Tensor& weight, int64_t max_positions,
                                          int64_t first_row = 0,
                                          const std::string& method = "linear");

/// Returns a table whose last rows, a grid row by row, are resampled to another grid; the rows
/// before them do not change. Gradients flow to `weight`.
/// @param weight  floating [prefix_tokens + rows * columns, embedding_dim]
/// @param grid, new_grid  {rows, columns}
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes
POSEMBED_API torch::Tensor learned_resample(const torch::Tensor& weight,
                                            const std::vector<int64_t>& grid,
                                            const std::vector<int64_t>& new_grid,
                                            const Resampling& how = {});

/// The rows of pictures of any sizes that are packed one after another: [tokens, embedding_dim].
/// Each picture's are those of learned_resample(), in the tokens' order, for each of its frames.
/// Gradients flow to `weight`. 16-bit tables are interpolated in float32 and rounded once.
/// @param weight  floating [prefix_tokens + rows * columns, embedding_dim]
/// @param grid  {rows, columns} of the table
/// @param grids  int32/int64 [pictures, 3]: frames, rows and columns; or [pictures, 2]
/// @param how  without antialias
/// @throws c10::ValueError shapes, grids and options; c10::TypeError dtypes; c10::IndexError, on
///     CUDA, grids that do not fit
POSEMBED_API torch::Tensor learned_packed(const torch::Tensor& weight,
                                          const std::vector<int64_t>& grid,
                                          const torch::Tensor& grids,
                                          const PackedPictures& pictures = {},
                                          const Resampling& how = {});

/// Positions as RoBERTa counts them, for a table with first_row = padding_idx + 1: 0, 1, … for
/// tokens, and -1 for padding, which is the row before position 0.
/// @param ids  int32/int64 [..., seq]
/// @param past_length  tokens in a cache
/// @return int64, in the shape of ids
/// @throws c10::ValueError a past_length below 0; c10::TypeError dtypes
POSEMBED_API torch::Tensor roberta_positions(const torch::Tensor& ids, int64_t padding_idx,
                                             int64_t past_length = 0);

/// Positions as OPT counts them, for a table with first_row = 2: a mask marks padding.
/// @param attention_mask  bool, int32 or int64 [..., past_length + seq], 0 for padding; covers the
///     cached tokens and the new ones
/// @return int64 [..., seq]: positions of the new tokens
POSEMBED_API torch::Tensor opt_positions(const torch::Tensor& attention_mask,
                                         int64_t past_length = 0);

/// Positions as fairseq counts them: those of roberta_positions() without a cache.
POSEMBED_API torch::Tensor fairseq_positions(const torch::Tensor& ids, int64_t padding_idx);

}  // namespace functional

/// Options of LearnedPositionalEmbedding.
struct POSEMBED_API LearnedOptions {
  LearnedOptions(int64_t max_positions, int64_t embedding_dim)
      : max_positions_(max_positions), embedding_dim_(embedding_dim) {}
  /// A table of the cells of a picture: LearnedOptions({14, 14}, 768).prefix_tokens(1)
  LearnedOptions(std::array<int64_t, 2> grid, int64_t embedding_dim)
      : max_positions_(0), embedding_dim_(embedding_dim), grid_(grid.begin(), grid.end()) {}

  /// The table has rows for positions 0 to max_positions - 1. A grid determines them.
  TORCH_ARG(int64_t, max_positions);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// The row of position 0: 2 for OPT, padding_idx + 1 for RoBERTa. The rows before it belong to
  /// negative positions.
  TORCH_ARG(int64_t, first_row) = 0;
  /// {rows, columns} of the cells, whose positions follow those of the prefix tokens, row by row.
  TORCH_ARG(std::vector<int64_t>, grid);
  /// With a grid: tokens before its cells, such as a class token.
  TORCH_ARG(int64_t, prefix_tokens) = 0;
  /// The order of the dimensions of x.
  TORCH_ARG(AdditiveLayout, layout) = AdditiveLayout::bsd;
  /// With a grid: how forward() and extend() resample it.
  TORCH_ARG(Resampling, resampling);
};

/// A table of position vectors; `weight` is [first_row + max_positions, embedding_dim], initialised
/// from N(0, 0.02) as in BERT and GPT-2.
///
///     posembed::LearnedPositionalEmbedding position(posembed::LearnedOptions(512, 768));
///     auto h = position->forward(x);  // x [batch, seq, 768]
///
/// A table of a picture's patches is resampled to the grid of another picture:
///
///     posembed::LearnedPositionalEmbedding vit(
///         posembed::LearnedOptions({14, 14}, 768).prefix_tokens(1));
///     auto h = vit->forward(x, posembed::PositionCall().grid({20, 30}));  // x [batch, 601, 768]
class POSEMBED_API LearnedPositionalEmbeddingImpl
    : public torch::nn::Cloneable<LearnedPositionalEmbeddingImpl> {
 public:
  LearnedPositionalEmbeddingImpl(int64_t max_positions, int64_t embedding_dim)
      : LearnedPositionalEmbeddingImpl(LearnedOptions(max_positions, embedding_dim)) {}
  explicit LearnedPositionalEmbeddingImpl(const LearnedOptions& options);

  void reset() override;
  /// N(0, 0.02).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// x, in the layout of the options, plus the rows of its positions.
  /// @param call  positions int32 or int64
  /// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError a position
  ///     without a row
  torch::Tensor forward(const torch::Tensor& x, const PositionCall& call = {});
  /// The table for another grid, [first_row + prefix_tokens + rows * columns, embedding_dim];
  /// itself if `grid` is empty or its own.
  torch::Tensor resampled(const std::vector<int64_t>& grid);
  /// The rows of packed pictures: see functional::learned_packed().
  ///
  ///     x = x + position->packed(image_grid_thw, posembed::PackedPictures().merge(2));
  torch::Tensor packed(const torch::Tensor& grids, const PackedPictures& pictures = {});
  /// Looks up the rows without adding them: int32/int64 [...] -> [..., embedding_dim].
  torch::Tensor encode(const torch::Tensor& positions);

  /// Makes the table longer, in place. Rows before position 0 do not change. Create the optimizer
  /// afterwards, because its state is not resized.
  /// @param method  "linear" or "cubic": interpolation that keeps the first and the last row.
  ///     "repeat": repeats the rows, starting with the first.
  /// @throws c10::ValueError fewer positions than the table has; an unknown method
  void extend(int64_t max_positions, const std::string& method = "linear");
  /// Resamples the table to another grid, which may be smaller, in place.
  /// @param from_grid  the grid of a table that was made without one: its last rows
  void extend(std::array<int64_t, 2> grid,
              std::optional<std::array<int64_t, 2>> from_grid = std::nullopt);

  LearnedOptions options;
  torch::Tensor weight;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(PositionCall())})
};

/// Holds a LearnedPositionalEmbeddingImpl, like TORCH_MODULE, and makes one from a checkpoint.
class LearnedPositionalEmbedding : public torch::nn::ModuleHolder<LearnedPositionalEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<LearnedPositionalEmbeddingImpl>::ModuleHolder;

  /// A table of a grid that shares a checkpoint's tensor.
  /// @param embeddings  floating [tokens, embedding_dim] or [rows, columns, embedding_dim], also
  ///     after a dimension of 1
  /// @param grid  {rows, columns} of its last tokens; tokens before them are prefix tokens
  /// @throws c10::ValueError the tensor has another shape
  static POSEMBED_API LearnedPositionalEmbedding from_pretrained(const torch::Tensor& embeddings,
                                                                 std::array<int64_t, 2> grid,
                                                                 bool freeze = true,
                                                                 const Resampling& resampling = {});

  /// The same from a file that pretrained::open() reads.
  /// @param tensor  the tensor's name; default: the only one that is named as a position table
  /// @throws pretrained::FileFormatError a broken file; c10::ValueError none or several such names
  static POSEMBED_API LearnedPositionalEmbedding from_file(const std::string& path,
                                                           std::array<int64_t, 2> grid,
                                                           const std::string& tensor = "",
                                                           bool freeze = true,
                                                           const Resampling& resampling = {});
};

}  // namespace posembed

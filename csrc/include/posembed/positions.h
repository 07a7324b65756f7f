/// Positions of tokens, before any embedding: of images, videos and audio among text (M-RoPE, Wang
/// et al., "Qwen2-VL", arXiv:2409.12191), of grids, and of documents packed into one sequence.
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "posembed/export.h"

namespace posembed {

/// How the index of a video's frame becomes its temporal position.
enum class MropeTime {
  index,     ///< the index itself
  interval,  ///< floor(index * (seconds * positions_per_second))
  elapsed,   ///< floor((index * seconds) * positions_per_second); other last bits than interval
  exact,     ///< elapsed without floor: positions are float32
};

/// "index", "interval", "elapsed" or "exact".
POSEMBED_API const char* name(MropeTime time);

/// The numbers by which models differ in numbering images, videos and audio among text.
///
///     auto rule = posembed::MropeRule::named("qwen2_vl");
struct POSEMBED_API MropeRule {
  /// The rule of a model type of transformers, with the token ids of its published checkpoints.
  /// @throws c10::ValueError an unknown name; the message lists the known ones
  static MropeRule named(const std::string& name);
  /// The names that named() knows.
  static std::vector<std::string> names();
  /// The rule that to_json() wrote, or one by name.
  static MropeRule from_json(const std::string& text);
  /// Equal rules have equal text, in Python too.
  std::string to_json() const;
  bool operator==(const MropeRule& other) const;

  std::optional<int64_t> image_token;  ///< the id of an image's placeholder
  std::optional<int64_t> video_token;  ///< the id of a video's placeholder
  std::optional<int64_t> audio_token;  ///< the id of an audio's placeholder
  /// Image placeholders between these ids are a video's (GLM).
  std::optional<int64_t> video_start;
  std::optional<int64_t> video_end;
  /// Neighbouring ids that share one position: the markers around a video with audio.
  std::vector<std::pair<int64_t, int64_t>> shared;
  int64_t spatial_merge = 2;     ///< patches of a grid, along height and width, in one token
  int64_t temporal_merge = 1;    ///< frames of a video's grid in one token
  bool separate_frames = false;  ///< number each frame of a video like an image
  MropeTime time = MropeTime::index;
  double positions_per_second = 1.0;  ///< for all times but index
  /// What follows an item begins after its latest temporal position, too. Otherwise it begins after
  /// the item's height and width.
  bool time_advances = false;
  /// Frames of an audio whose convolutions give 13 tokens; 0: the audio is convolved as a whole.
  int64_t audio_chunk = 0;
  /// HunYuan: text counts every token, and image tokens have, after that count, the column, the row
  /// and the number of their image in the batch. Rows have a token more than columns.
  bool pages = false;
  int64_t margin = 0;   ///< placeholders before an image, and after it, that count as text
  int64_t axes = 3;     ///< of the result; 4 with `pages` and the count of tokens
  int64_t padding = 0;  ///< the position of padding
  /// MiniCPM-V: the ids of image_start, image_end, slice_start, slice_end and newline. A picture
  /// and its slices share a canvas, on which these markers have places, too. Empty: no canvas.
  std::vector<int64_t> canvas;
};

/// What a processor gives beside token ids. All on the device of the ids.
struct POSEMBED_API MropeCall {
  /// int32/int64 [images, 3]: patches along time, height and width, before merging; or [images, 2]:
  /// along height and width.
  TORCH_ARG(std::optional<torch::Tensor>, image_grids) = std::nullopt;
  /// int32/int64 [videos, 3].
  TORCH_ARG(std::optional<torch::Tensor>, video_grids) = std::nullopt;
  /// Floating [videos]: seconds between two frames of a grid; default: 1.
  TORCH_ARG(std::optional<torch::Tensor>, seconds_per_grid) = std::nullopt;
  /// int32/int64 [audios]: feature frames of each audio, to check its number of tokens.
  TORCH_ARG(std::optional<torch::Tensor>, audio_lengths) = std::nullopt;
  /// bool or integers [batch, seq], 0 for padding; default: no padding.
  TORCH_ARG(std::optional<torch::Tensor>, attention_mask) = std::nullopt;
  /// Integers [batch, seq]: 0 text, 1 image, 2 video, 3 audio; default: from the ids.
  TORCH_ARG(std::optional<torch::Tensor>, token_types) = std::nullopt;
};

/// Positions and, for generation, what to add to a token's index.
struct MropePositions {
  torch::Tensor positions;  ///< [axes, batch, seq], int64, or float32 with MropeTime::exact
  torch::Tensor delta;      ///< [batch, 1]: the next position minus the number of tokens
};

/// Options of positions::grid.
struct POSEMBED_API GridOptions {
  GridOptions(int64_t frames, int64_t height, int64_t width)
      : frames_(frames), height_(height), width_(width) {}
  TORCH_ARG(int64_t, frames);
  TORCH_ARG(int64_t, height);
  TORCH_ARG(int64_t, width);
  /// Put 0 in the middle of each axis.
  TORCH_ARG(bool, centred) = false;
  /// Multiplies positions: none, one number, or one each for time, height and width.
  TORCH_ARG(std::vector<double>, scale);
  /// Added last: none, one number, or one each for time, height and width.
  TORCH_ARG(std::vector<double>, offset);
  /// The axes of the result: a choice of t, h and w in any order.
  TORCH_ARG(std::string, order) = "thw";
  /// Order tokens by squares of merge x merge, which a vision tower merges later.
  TORCH_ARG(int64_t, merge) = 1;
  TORCH_ARG(torch::Device, device) = torch::kCPU;
};

/// Options of positions::packed_grids.
struct POSEMBED_API PackedGridOptions {
  /// The axes of the result: a choice of t, h and w in any order.
  TORCH_ARG(std::string, order) = "hw";
  /// Order the tokens of a frame by squares of merge x merge, which a vision tower merges later.
  TORCH_ARG(int64_t, merge) = 1;
  /// Default: that of the grids, for which a GPU is waited for.
  TORCH_ARG(std::optional<int64_t>, num_tokens) = std::nullopt;
};

/// A process's part of packed documents; see positions::zigzag.
struct ZigzagPart {
  torch::Tensor indices;     ///< int64 [tokens]: each token's index in the whole sequence
  torch::Tensor positions;   ///< int64 [tokens]: each token's index in its document
  torch::Tensor cu_seqlens;  ///< [documents + 1]: the boundaries of the documents in the part
};

namespace positions {

/// Positions of text with images, videos and audio.
///
///     const auto rule = posembed::MropeRule::named("qwen2_vl");
///     const auto call = posembed::MropeCall().image_grids(grids).attention_mask(mask);
///     const auto [positions, delta] = posembed::positions::mrope(ids, rule, call);
///
/// Runs on the device of `ids` without waiting for it. On the CPU, counts that do not fit throw. On
/// CUDA, and in compiled programs, all positions are then -2 (NaN with MropeTime::exact), which
/// RotaryEmbedding rejects.
/// @param ids  int32/int64 [batch, seq]
/// @throws c10::ValueError shapes, grids or lengths that do not fit the ids; c10::TypeError dtypes
POSEMBED_API MropePositions mrope(const torch::Tensor& ids, const MropeRule& rule,
                                  const MropeCall& call = {});

/// Positions of a grid's tokens, by rows, frame after frame: [axes, frames * height * width].
/// float32 with `centred`, a scale, or an offset that is negative or no whole number; else int64.
/// @throws c10::ValueError sizes, options
POSEMBED_API torch::Tensor grid(const GridOptions& options);

/// Positions of the tokens of pictures packed one after another: int64 [axes, tokens].
///
///     const auto places = posembed::positions::packed_grids(
///         image_grid_thw, posembed::PackedGridOptions().merge(2));  // of a tower of Qwen
///
/// @param grids  int32/int64 [pictures, 3]: frames, rows and columns; or [pictures, 2]
/// @throws c10::ValueError grids, options; on CUDA, grids that do not fit give the least int32
POSEMBED_API torch::Tensor packed_grids(const torch::Tensor& grids,
                                        const PackedGridOptions& options = {});

/// Positions of documents packed one after another: int64 [tokens], from 0 in each.
/// @param cu_seqlens  int32/int64 [documents + 1], from 0 to the number of tokens
/// @param num_tokens  default: the last of cu_seqlens, for which a GPU is waited for
/// @param offset  int32/int64 [documents]: the first position of each; default: 0
POSEMBED_API torch::Tensor packed(const torch::Tensor& cu_seqlens,
                                  std::optional<int64_t> num_tokens = std::nullopt,
                                  const std::optional<torch::Tensor>& offset = std::nullopt);

/// The same from each token's document: int32/int64 [..., seq]. Positions restart where the number
/// changes; negative numbers are padding, at position -1.
POSEMBED_API torch::Tensor packed_documents(const torch::Tensor& documents);

/// Positions of the tokens that a mask shows: int64 [..., seq]: 0, 1, …, and -1 for padding.
/// @param attention_mask  bool, int32 or int64 [..., seq], 0 for padding
POSEMBED_API torch::Tensor from_mask(const torch::Tensor& attention_mask);

/// One process's tokens of packed documents under context parallelism: of each document, cut into 2
/// * world_size chunks, the chunks `rank` and 2 * world_size - 1 - rank. That balances causal
/// attention; the numbers are those of Megatron-Core and Transformer Engine.
/// @param cu_seqlens  int32/int64 [documents + 1]; lengths are multiples of 2 * world_size
/// @param num_tokens  of the whole sequence; default: the last of cu_seqlens, for which a GPU is
///     waited for
POSEMBED_API ZigzagPart zigzag(const torch::Tensor& cu_seqlens, int64_t rank, int64_t world_size,
                               std::optional<int64_t> num_tokens = std::nullopt);

}  // namespace positions
}  // namespace posembed

// C++ calls of the operators that number tokens, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "dispatcher/operator.h"
#include "posembed/positions.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<MropeTime> {
  static constexpr const char* argument = "time";
  static constexpr MropeTime values[] = {MropeTime::index, MropeTime::interval, MropeTime::elapsed,
                                         MropeTime::exact};
};

}  // namespace posembed::dispatcher

namespace posembed::positions {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeSize = std::optional<c10::SymInt>;
using Text = std::string_view;

/// Arguments of mrope_positions after the ids, in the order of its schema.
struct MropeInputs {
  std::string rule;  // MropeRule::to_json(), or a name
  MropeCall call;

  POSEMBED_FIELDS(self.rule, self.call.image_grids(), self.call.video_grids(),
                  self.call.seconds_per_grid(), self.call.audio_lengths(),
                  self.call.attention_mask(), self.call.token_types())
};

/// Positions [axes, batch, seq] and delta [batch, 1].
inline const dispatcher::Operator<std::tuple<Tensor, Tensor>(const Tensor&), MropeInputs>
    mrope_positions{"mrope_positions"};

inline const dispatcher::Operator<Tensor(c10::SymInt, c10::SymInt, c10::SymInt, bool,
                                         at::ArrayRef<double>, at::ArrayRef<double>, Text,
                                         c10::SymInt, std::optional<at::Device>)>
    grid_positions{"grid_positions"};

/// Of the tokens of several grids: order, merge, number of tokens.
inline const dispatcher::Operator<Tensor(const Tensor&, Text, int64_t, MaybeSize)>
    packed_grid_positions{"packed_grid_positions"};

/// cu_seqlens, number of tokens, and the first position of each document (none: 0).
inline const dispatcher::Operator<Tensor(const Tensor&, MaybeSize, const MaybeTensor&)>
    packed_positions{"packed_positions"};

inline const dispatcher::Operator<Tensor(const Tensor&)> document_positions{"document_positions"};

/// indices, positions, cu_seqlens.
inline const dispatcher::Operator<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, int64_t,
                                                                     int64_t, MaybeSize)>
    zigzag_positions{"zigzag_positions"};

/// order: axes among "thw", each at most once
void check_order(Text order);

}  // namespace posembed::positions

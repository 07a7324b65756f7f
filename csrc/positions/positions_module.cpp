// The functions of C++: thin wrappers around the operators.
#include "learned/learned_operator.h"
#include "positions/positions_operator.h"

namespace posembed::positions {

MropePositions mrope(const torch::Tensor& ids, const MropeRule& rule, const MropeCall& call) {
  auto [positions, delta] = mrope_positions(ids, {rule.to_json(), call});
  return {std::move(positions), std::move(delta)};
}

torch::Tensor grid(const GridOptions& options) {
  return grid_positions(options.frames(), options.height(), options.width(), options.centred(),
                        options.scale(), options.offset(), options.order(), options.merge(),
                        options.device());
}

torch::Tensor packed_grids(const torch::Tensor& grids, const PackedGridOptions& options) {
  return packed_grid_positions(grids, options.order(), options.merge(), options.num_tokens());
}

torch::Tensor packed(const torch::Tensor& cu_seqlens, std::optional<int64_t> num_tokens,
                     const std::optional<torch::Tensor>& offset) {
  return packed_positions(cu_seqlens, num_tokens, offset);
}

torch::Tensor packed_documents(const torch::Tensor& documents) {
  return document_positions(documents);
}

torch::Tensor from_mask(const torch::Tensor& attention_mask) {
  return learned::learned_positions(attention_mask, 0, 0);
}

ZigzagPart zigzag(const torch::Tensor& cu_seqlens, int64_t rank, int64_t world_size,
                  std::optional<int64_t> num_tokens) {
  auto [indices, positions, boundaries] =
      zigzag_positions(cu_seqlens, rank, world_size, num_tokens);
  return {std::move(indices), std::move(positions), std::move(boundaries)};
}

}  // namespace posembed::positions

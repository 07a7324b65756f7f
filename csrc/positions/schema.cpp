#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "mrope_positions("
         "Tensor ids, "
         "str rule, "
         "Tensor? image_grids=None, "
         "Tensor? video_grids=None, "
         "Tensor? seconds_per_grid=None, "
         "Tensor? audio_lengths=None, "
         "Tensor? attention_mask=None, "
         "Tensor? token_types=None) -> (Tensor, Tensor)");
  define(m, "mrope_specification(str rule) -> str");
  define(m, "mrope_rules() -> str[]");
  define(m,
         "grid_positions("
         "SymInt frames, "
         "SymInt height, "
         "SymInt width, "
         "bool centred=False, "
         "float[] scale=[], "
         "float[] offset=[], "
         "str order=\"thw\", "
         "SymInt merge=1, "
         "Device? device=None) -> Tensor");
  define(m,
         "packed_grid_positions("
         "Tensor grids, "
         "str order=\"hw\", "
         "int merge=1, "
         "SymInt? num_tokens=None) -> Tensor");
  define(m,
         "packed_positions("
         "Tensor cu_seqlens, "
         "SymInt? num_tokens=None, "
         "Tensor? offset=None) -> Tensor");
  define(m, "document_positions(Tensor documents) -> Tensor");
  define(m,
         "zigzag_positions("
         "Tensor cu_seqlens, "
         "int rank, "
         "int world_size, "
         "SymInt? num_tokens=None) -> (Tensor, Tensor, Tensor)");
}

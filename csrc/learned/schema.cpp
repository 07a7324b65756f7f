#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string rows = "Tensor? positions=None, SymInt offset=0, int first_row=0";
  define(m, "learned_add(Tensor x, Tensor weight, " + rows + ") -> Tensor");
  define(m, "learned_backward(Tensor gradient, SymInt num_rows, " + rows + ") -> Tensor");
  define(m, "learned_encode(Tensor weight, Tensor positions, int first_row=0) -> Tensor");
  define(m,
         "learned_extend("
         "Tensor weight, "
         "int max_positions, "
         "int first_row=0, "
         "str method=\"linear\") -> Tensor");
  define(m,
         "learned_resample("
         "Tensor weight, "
         "SymInt[] grid, "
         "SymInt[] new_grid, "
         "str method=\"bicubic\", "
         "bool align_corners=False, "
         "bool antialias=False, "
         "float scale_offset=0.0) -> Tensor");
  define(m,
         "learned_packed("
         "Tensor weight, "
         "SymInt[] grid, "
         "Tensor grids, "
         "int merge=1, "
         "SymInt? num_tokens=None, "
         "str method=\"bicubic\", "
         "bool align_corners=False, "
         "bool antialias=False, "
         "float scale_offset=0.0) -> Tensor");
  define(m, "learned_positions(Tensor mask, SymInt past=0, SymInt skip=0) -> Tensor");
}

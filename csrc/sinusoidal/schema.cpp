#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "sinusoidal_add("
         "Tensor x, "
         "str spec, "
         "Tensor? positions=None, "
         "SymInt offset=0, "
         "Tensor? scale=None) -> Tensor");
  define(m,
         "sinusoidal_encode("
         "Tensor positions, "
         "str spec, "
         "Tensor? scale=None, "
         "int order=0, "
         "ScalarType? dtype=None) -> Tensor");
  define(m,
         "sinusoidal_grid_positions("
         "Tensor like, "
         "str spec, "
         "SymInt[] grid, "
         "Tensor? mask=None) -> Tensor");
  define(m, "sinusoidal_blocks(str spec) -> (int[], str[])");
  define(m, "sinusoidal_frequencies(str spec, Device? device=None) -> Tensor");
  define(m, "sinusoidal_shift_matrix(float distance, str spec) -> Tensor");
  define(m, "sinusoidal_permutation(str spec, str other) -> Tensor");
  define(m, "sinusoidal_specification(str spec) -> str");
}

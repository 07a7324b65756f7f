#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "fourier_features("
         "Tensor coordinates, "
         "Tensor frequencies, "
         "Tensor? phases=None, "
         "Tensor? x=None, "
         "str unit=\"radian\", "
         "str waves=\"sin_cos\", "
         "str order=\"wf\", "
         "int derivative=0, "
         "ScalarType? dtype=None) -> Tensor");
  define(m, "fourier_bands(float first, float last, int count, Device? device=None) -> Tensor");
}

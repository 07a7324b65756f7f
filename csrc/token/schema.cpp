#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string ids =
      "Tensor ids, "
      "int padding_idx=-1, "
      "float scale=1.0, "
      "bool scale_grad_by_freq=False, "
      "int vocabulary_start=-1";
  define(m, "embedding(Tensor weight, " + ids + ", str gradient=\"dense\") -> Tensor");
  const std::string backward = "Tensor gradient, SymInt num_embeddings, " + ids;
  define(m, "embedding_backward(" + backward + ") -> Tensor");
  define(m, "embedding_backward_rows(" + backward + ") -> (Tensor, Tensor)");
  define(m,
         "embedding_with_features("
         "Tensor weight, "
         "Tensor features, "
         "Tensor ids, "
         "Tensor places, "
         "int padding_idx=-1, "
         "float scale=1.0, "
         "str gradient=\"dense\") -> Tensor");
  define(m,
         "embedding_quantized("
         "Tensor codes, "
         "Tensor scales, "
         "Tensor ids, "
         "Tensor? biases=None, "
         "int block_rows=1, "
         "int block_columns=0, "
         "float scale=1.0, "
         "ScalarType? dtype=None) -> Tensor");
  define(m, "file_rows(Tensor ids, int file, float scale=1.0, ScalarType? dtype=None) -> Tensor");
  define(m, "quantize_rows(Tensor weight, str format, int block=0) -> (Tensor, Tensor, Tensor)");
  define(m,
         "embedding_resize("
         "Tensor weight, "
         "int num_embeddings, "
         "Tensor? rows=None, "
         "str initialization=\"mean\", "
         "float covariance_scale=1e-9, "
         "Generator? generator=None) -> Tensor");
}

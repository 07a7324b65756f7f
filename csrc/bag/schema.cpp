#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string bag =
      "Tensor ids, "
      "Tensor? offsets=None, "
      "int padding_idx=-1, "
      "bool include_last_offset=False";
  define(m, "token_bag(Tensor weight, " + bag +
                ", str mode=\"sum\", Tensor? weights=None, str gradient=\"dense\") -> Tensor");
  define(m,
         "token_bag_max(Tensor weight, " + bag + ", str gradient=\"dense\") -> (Tensor, Tensor)");
  const std::string backward = "Tensor gradient, SymInt num_embeddings, " + bag +
                               ", str mode=\"sum\", Tensor? weights=None, Tensor? maxima=None";
  define(m, "token_bag_backward(" + backward + ") -> Tensor");
  define(m, "token_bag_backward_rows(" + backward + ") -> (Tensor, Tensor)");
  define(m, "token_bag_weights_backward(Tensor gradient, Tensor weight, " + bag + ") -> Tensor");
}

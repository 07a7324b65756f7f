#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string input =
      "Tensor token, "
      "Tensor ids, "
      "Tensor? position=None, "
      "Tensor? positions=None, "
      "Tensor? token_type=None, "
      "Tensor? types=None, "
      "Tensor? norm_weight=None, "
      "Tensor? norm_bias=None, "
      "Tensor? seed=None, "
      "SymInt offset=0, "
      "int first_row=0, "
      "str sinusoid=\"\", "
      "str norm=\"none\", "
      "float eps=1e-5, "
      "float scale=1.0, "
      "float dropout=0.0, "
      "int padding_idx=-1, "
      "int position_padding_idx=-1, "
      "str gradient=\"dense\", "
      "SymInt first_token=0, "
      "bool own_rows=False";
  define(m, "input_embedding(" + input + ") -> Tensor");
  define(m, "input_embedding_forward(" + input + ") -> (Tensor, Tensor, Tensor)");
  const std::string backward = "Tensor output_gradient, Tensor mean, Tensor rstd, " + input;
  define(m,
         "input_embedding_backward(" + backward + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  define(m, "input_embedding_backward_rows(" + backward +
                ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define(m, "input_dropout(Tensor x, Tensor seed, float probability, SymInt first=0) -> Tensor");
}

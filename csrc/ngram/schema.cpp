#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "ngram_ids("
         "Tensor ids, "
         "int[] multipliers, "
         "int[] moduli, "
         "int[] offsets=[], "
         "int[] sizes=[], "
         "int? boundary=None, "
         "int? padding=None, "
         "str rule=\"xor\", "
         "Tensor? history=None, "
         "Tensor? cu_seqlens=None, "
         "Tensor? mask=None) -> Tensor");
  define(m, "ngram_mask(Tensor ids, Tensor lengths) -> Tensor");
  define(m, "ngram_multipliers(int count, int vocab_size, int layer=0, int seed=1234) -> int[]");
  define(m, "ngram_primes(int count, int start, int skip=0) -> int[]");
}

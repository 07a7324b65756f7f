// Tokens of a batch of sequences, and the order in which kernels walk them. Included by files for
// the CPU only.
#pragma once

#include <cstdint>

#include "rotary/kernel.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// A token: where its rows begin and whether it is rotated at all.
struct Token {
  int64_t batch;
  int64_t seq;
  bool rotated;
};

/// The numbers of tokens, 0 to batch * seq - 1 in the order of memory: in a batch that lies within
/// each place, as in [seq, batch, heads, head_dim], sequence after sequence takes two to four
/// times as long. Sums over tokens do not follow it: their bits are the same for any strides.
class TokenOrder {
 public:
  explicit TokenOrder(const Arguments& arguments)
      : by_place(lies_by_place(arguments.rows[0]) && arguments.batch > 1),
        inner_(by_place ? arguments.batch : arguments.seq) {}

  Token token(int64_t number) const {
    const int64_t outer = number / inner_, inner = number % inner_;
    return by_place ? Token{inner, outer, false} : Token{outer, inner, false};
  }

  /// Moves to the next token; in numbers that stay in registers, because reading a Token that was
  /// just written, in another width, waits for all earlier rows.
  void advance(int64_t* batch, int64_t* seq) const {
    if (by_place) {
      step(batch, seq);
    } else {
      step(seq, batch);
    }
  }

  const bool by_place;

 private:
  static bool lies_by_place(const Rows& rows) {
    return rows.in_stride[0] < rows.in_stride[1] && rows.out_stride[0] <= rows.out_stride[1];
  }

  void step(int64_t* inner, int64_t* outer) const {
    if (++*inner < inner_) return;
    *inner = 0;
    ++*outer;
  }

  int64_t inner_;
};

/// Whether the tokens of a head are neighbours in memory: each head is a run of its own, and tokens
/// are walked in tiles, a few heads at a time.
inline bool heads_are_runs(const Rows& rows) {
  return rows.heads > 1 && rows.in_stride[1] < rows.in_stride[2];
}

/// Where the row of a head of a token begins; strides are those of batch, token and head.
inline int64_t place_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA

// Tokens of a batch of sequences, and the order in which CPU kernels walk them.
#pragma once

#include <cstdint>

#include "rotary/kernel.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// A token's indices, whether it is rotated at all, and whether by tables with different values for
/// the two components of a pair.
struct Token {
  int64_t batch;
  int64_t seq;
  bool rotated;
  bool apart = false;
};

/// Numbers tokens 0 to batch * seq - 1 in memory order, because other orders are slow: in [seq,
/// batch, heads, head_dim] the tokens of one `seq` are neighbours. Sums over tokens do not follow
/// this order, so their bits are the same for any strides.
class TokenOrder {
 public:
  explicit TokenOrder(const Arguments& arguments)
      : seq_first(is_seq_first(arguments.views[0]) && arguments.batch > 1),
        inner_(seq_first ? arguments.batch : arguments.seq) {}

  Token token(int64_t number) const {
    const int64_t outer = number / inner_, inner = number % inner_;
    return seq_first ? Token{inner, outer, false} : Token{outer, inner, false};
  }

  /// Moves to the next token. Takes numbers, which stay in registers, because reading a Token just
  /// after it was written, with another access width, waits for all earlier stores.
  void advance(int64_t* batch, int64_t* seq) const {
    if (seq_first) {
      step(batch, seq);
    } else {
      step(seq, batch);
    }
  }

  const bool seq_first;

 private:
  static bool is_seq_first(const HeadView& view) {
    return view.in_stride[0] < view.in_stride[1] && view.out_stride[0] <= view.out_stride[1];
  }

  void step(int64_t* inner, int64_t* outer) const {
    if (++*inner < inner_) return;
    *inner = 0;
    ++*outer;
  }

  int64_t inner_;
};

/// Whether the tokens of a head are neighbours in memory ([batch, heads, seq, head_dim]). Each head
/// is then a separate memory stream, and tokens are processed in tiles of a few heads.
inline bool is_head_major(const HeadView& view) {
  return view.heads > 1 && view.in_stride[1] < view.in_stride[2];
}

/// The offset of the row of a token's head; strides are those of batch, token and head.
inline int64_t offset_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA

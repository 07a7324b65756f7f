// Rotary embedding on the CPU, compiled once per instruction set. Walks tokens in small tiles: sine
// and cosine of a tile are computed once, stay in the caches and rotate all heads of query and key,
// and all sequences of a batch where sharing saves time.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/instruction_set.h"
#include "rotary/rotary.h"
#include "rotary/rotary_angles_cpu.h"
#include "rotary/rotary_walks_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// The maximum number of tokens in a tile.
template <typename T>
constexpr int64_t tile_tokens = 128 / static_cast<int64_t>(sizeof(Compute<T>));

/// The order of a tile's rows. The outermost loop counts `first` from 0 to `stride` - 1. The next
/// loop takes `heads` heads at a time; the innermost loop rotates these heads of the tokens
/// `first`, `first` + `stride`, `first` + 2 * `stride`, …
struct RowOrder {
  int64_t tile;    // tokens
  int64_t stride;  // tokens
  int64_t heads;
};

constexpr RowOrder token_by_token{1, 1, std::numeric_limits<int64_t>::max()};

/// The order for head-major tensors: few, long memory streams, for the hardware prefetcher.
template <typename T>
constexpr RowOrder heads_first{tile_tokens<T>, 1, 4};

/// Four long memory streams at a time, if the heads of a token are contiguous. Only for Intel
/// processors, data larger than the caches and tokens of a page or more: elsewhere loading sine and
/// cosine more often costs more than it saves.
template <typename T>
RowOrder four_streams(int64_t row_bytes) {
  constexpr int64_t bytes_in_turn = 1024;
  const int64_t heads = std::max<int64_t>(1, bytes_in_turn / row_bytes);
  return {tile_tokens<T>, tile_tokens<T> / 4, heads};
}

/// The order in which one tensor is walked, and its rotation.
template <typename T>
struct Walk {
  const HeadView* view;
  Rotating<T> rotating;
  RowOrder order;
  bool fetches_behind;  // see fetch_behind_token()
  bool fetches_ahead;   // see fetch_ahead()
};

template <typename T>
RowOrder choose_order(const Arguments& arguments, const HeadView& view, bool streaming) {
  if (is_head_major(view)) return heads_first<T>;
  constexpr int64_t cached = int64_t{128} << 20, size = sizeof(T);
  const bool leaves_caches = streaming || elements_of(arguments, view) * size >= cached;
  const int64_t row_bytes = row_dim(arguments, view) * size;
  const bool long_tokens = view.heads * row_bytes >= core::page;
  return core::is_intel && leaves_caches && long_tokens ? four_streams<T>(row_bytes)
                                                        : token_by_token;
}

template <typename T, bool interleaved, bool streaming>
RotateGroup<T> choose_rotation(const Arguments& arguments) {
  if (arguments.decay != nullptr) return rotate_decaying_group<interleaved, streaming, T>;
  if (arguments.cosines != nullptr) {
    return arguments.product_rounding == ProductRounding::to_data_type
               ? rotate_group_in_steps<interleaved, streaming, ProductRounding::to_data_type, T>
               : rotate_group_in_steps<interleaved, streaming, ProductRounding::none, T>;
  }
  return choose_rotation<T, interleaved, streaming>(arguments.pairs);
}

template <typename T, bool interleaved>
Walk<T> plan_walk(const Arguments& arguments, const HeadView& view) {
  const Stores stores = choose_stores<T>(arguments, view);
  const auto rotate = stores == Stores::streaming
                          ? choose_rotation<T, interleaved, true>(arguments)
                          : choose_rotation<T, interleaved, false>(arguments);
  const Margins margins = margins_of<T>(arguments, view, stores);
  const int64_t gap = gap_between_heads(view, read_of_head(arguments, view));
  const RowOrder order = choose_order<T>(arguments, view, stores != Stores::ordinary);
  const bool fetches = fetches_gaps<T>(arguments), by_token = order.tile == 1;
  const bool fetches_behind = by_token && gap == margins.gap && fetches;
  return {&view, {rotate, stores, margins}, order, fetches_behind, !by_token && fetches};
}

/// Prefetches the first lines of a token before its angles are computed, because the hardware
/// prefetcher does not follow from one tensor to the next. Only for streamed float32; elsewhere it
/// loses time.
template <typename T>
POSEMBED_INLINE void prefetch_token(const Arguments& arguments, const Token& token) {
  constexpr int64_t elements = 256 / sizeof(T);
  for (int64_t r = 0; r < arguments.count; ++r) {
    const T* first = row_of<T>(arguments.views[r], token, 0);
    fetch(first, first + elements);
  }
}

/// Prefetches 2 KiB ahead of the next rows of a head-major tensor, because the hardware prefetcher
/// cannot follow that many streams.
template <typename T>
POSEMBED_INLINE void fetch_ahead(const RowGroup<T>& rows, int64_t dim) {
  constexpr int64_t ahead = 2048 / sizeof(T);
  fetch_rows(rows.in + ahead, rows.in_step, rows.count, dim);
}

/// Heads [head, head + count) of a token.
template <typename T>
POSEMBED_INLINE RowGroup<T> heads_of_token(const HeadView& view, const Token& token, int64_t head,
                                           int64_t count) {
  return {static_cast<const T*>(view.in) + offset_of(token, head, view.in_stride),
          static_cast<T*>(view.out) + offset_of(token, head, view.out_stride), count,
          view.in_stride[2], view.out_stride[2]};
}

/// Fills `tokens`, and `angles` for tensor `r`, for `count` tokens starting at `begin`.
template <typename T, bool interleaved>
void begin_tile(const Arguments& arguments, const Turns<T>& turns, int64_t r, int64_t count,
                const TokenOrder& order, const Token& begin, Token* tokens, Angles<T>* angles) {
  int64_t batch = begin.batch, seq = begin.seq;
  for (int64_t t = 0; t < count; ++t, order.advance(&batch, &seq)) {
    Token& token = tokens[t];
    token.batch = batch;
    token.seq = seq;
    token.rotated = begin_token<T>(arguments, turns, token, angles + t, r);
    if (turns.has_nan) set_nan_angles<T, interleaved>(arguments, angles + t);
    if (arguments.tangent) set_tangents<T, interleaved>(arguments, token, angles + t);
    token.apart = token.rotated && turns_apart(arguments, token);
  }
}

/// Rotates rows of a token, in heads that share tables, by a value for each component of a pair.
template <typename T, bool interleaved>
void rotate_apart(const Arguments& arguments, const HeadView& view, const Token& token,
                  int64_t head, RowGroup<T> rows) {
  const int64_t start = window_start(arguments, view), pairs = arguments.pairs;
  copy_group(rows, 0, start);
  copy_group(rows, start + 2 * pairs, row_dim(arguments, view));
  ApartAngles<Compute<T>> angles;
  angles.read(arguments, token, head, padded(pairs), [pairs](int64_t slot) {
    return std::min(pair_of_slot<T, interleaved>(slot), pairs - 1);
  });
  rows.in += start;
  rows.out += start;
  const bool rounds = arguments.product_rounding == ProductRounding::to_data_type;
  const auto rotate = rounds ? rotate_apart<interleaved, ProductRounding::to_data_type, T>
                             : rotate_apart<interleaved, ProductRounding::none, T>;
  rotate(rows, angles, pairs);
}

/// Rotates the rows of a tile of `count` tokens, except tokens that are not rotated.
template <typename T, bool interleaved>
void rotate_tile(const Arguments& arguments, const Walk<T>& walk, const Token* tokens,
                 const Angles<T>* angles, int64_t count) {
  const HeadView& view = *walk.view;
  const RowOrder& order = walk.order;
  const int64_t dim = row_dim(arguments, view);
  for (int64_t first = 0; first < std::min(order.stride, count); ++first) {
    for (int64_t head = 0; head < view.heads; head += order.heads) {
      const int64_t group = std::min(order.heads, view.heads - head);
      for (int64_t t = first; t < count; t += order.stride) {
        const RowGroup<T> heads = heads_of_token<T>(view, tokens[t], head, group);
        if (tokens[t].apart) {
          if (head > 0) continue;  // all heads are rotated with the first
          rotate_apart<T, interleaved>(arguments, view, tokens[t], head,
                                       heads_of_token<T>(view, tokens[t], head, view.heads));
          continue;
        }
        if (walk.fetches_ahead) fetch_ahead(heads, dim);
        rotate_rows(arguments, view, tokens[t], walk.rotating, angles[t], heads);
      }
    }
  }
}

/// The turns of a call and the order in which it walks its tensors.
template <typename T>
struct Plan {
  Turns<T> turns;
  Walk<T> walks[2] = {};
  bool streams = false;
  /// The length of tiles of which all sequences share the angles; 0: walk tokens in order.
  int64_t shared_tile = 0;
};

/// Whether the sequences of a batch can share angles: same positions, and no xPos, which gives
/// query and key different factors.
inline bool has_common_positions(const Arguments& arguments) {
  if (arguments.batch == 1 || arguments.decay != nullptr) return false;
  if (arguments.cosines != nullptr) return arguments.table_stride[0] == 0;
  return arguments.positions.data == nullptr || arguments.position_stride[0] == 0;
}

/// Plan::shared_tile. Sharing angles saves most with few heads. For data larger than the caches
/// each sequence's tile is a separate memory stream, so only short tiles without gaps share.
template <typename T>
int64_t shared_tile(const Arguments& arguments, const Walk<T>* walks) {
  if (!has_common_positions(arguments)) return 0;
  int64_t elements = 0;
  bool gaps = false;
  for (int64_t r = 0; r < arguments.count; ++r) {
    const HeadView& view = arguments.views[r];
    elements += view.heads * row_dim(arguments, view);
    gaps = gaps || (walks[r].fetches_behind && view.in_stride[1] != view.heads * view.in_stride[2]);
  }
  constexpr int64_t run = 2048, longest_token = run / 8;
  const int64_t token = elements * static_cast<int64_t>(sizeof(T));
  if (arguments.batch * arguments.seq * token < uncached_bytes) return tile_tokens<T> / 2;
  return token <= longest_token && !gaps ? std::min(run / token, tile_tokens<T>) : 0;
}

template <typename T, bool interleaved>
void make_plan(const Arguments& arguments, Plan<T>* plan) {
  order_turns<T, interleaved>(arguments, &plan->turns);
  order_decay<T, interleaved>(arguments, &plan->turns);
  for (int64_t r = 0; r < arguments.count; ++r) {
    plan->walks[r] = plan_walk<T, interleaved>(arguments, arguments.views[r]);
    plan->streams = plan->streams || plan->walks[r].rotating.stores != Stores::ordinary;
  }
  plan->shared_tile = shared_tile(arguments, plan->walks);
}

/// Rotates tokens [begin, end) in their order in memory.
template <typename T, bool interleaved>
void rotate_in_order(const Arguments& arguments, const Plan<T>& plan, const TokenOrder& order,
                     int64_t begin, int64_t end) {
  Angles<T> angles[tile_tokens<T>];
  Token tokens[tile_tokens<T>];
  const Walk<T>* const walks = plan.walks;
  const int64_t tile = walks[0].order.tile;
  const bool shares = order.seq_first && tile == 1 && has_common_positions(arguments);
  int64_t batch = order.token(begin).batch, seq = order.token(begin).seq;
  for (int64_t first = begin; first < end; first += tile) {
    const int64_t count = std::min(tile, end - first);
    const Token token{batch, seq, false};
    const bool has_angles = shares && first > begin && seq == tokens[0].seq;
    if (has_angles) tokens[0].batch = batch;
    for (int64_t t = 0; t < tile; ++t) order.advance(&batch, &seq);
    if (std::is_same_v<T, float> && walks[0].rotating.stores == Stores::streaming)
      prefetch_token<T>(arguments, token);
    for (int64_t r = 0; r < arguments.count; ++r) {
      const bool of_both = r == 0 || arguments.decay != nullptr;  // except with xPos
      if (of_both && !has_angles) {
        begin_tile<T, interleaved>(arguments, plan.turns, r, count, order, token, tokens, angles);
      }
      rotate_tile<T, interleaved>(arguments, walks[r], tokens, angles, count);
      if (walks[r].fetches_behind) fetch_behind_token<T>(arguments, r, token, {batch, seq, false});
    }
  }
}

/// Rotates tokens [begin, end) of at least two sequences: the same tile of each sequence by the
/// same angles.
template <typename T, bool interleaved>
void rotate_shared_tiles(const Arguments& arguments, const Plan<T>& plan, const TokenOrder& order,
                         int64_t begin, int64_t end) {
  Angles<T> angles[tile_tokens<T>];
  Token tokens[tile_tokens<T>];
  const int64_t seq = arguments.seq;
  for (int64_t tile = 0; tile < seq; tile += plan.shared_tile) {
    const int64_t count = std::min(plan.shared_tile, seq - tile);
    begin_tile<T, interleaved>(arguments, plan.turns, 0, count, order, {0, tile, false}, tokens,
                               angles);
    for (int64_t sequence = begin / seq; sequence * seq < end; ++sequence) {
      const int64_t first = sequence * seq + tile;
      const int64_t from = std::clamp<int64_t>(begin - first, 0, count);
      const int64_t to = std::clamp<int64_t>(end - first, 0, count);
      for (int64_t t = from; t < to; ++t) tokens[t].batch = sequence;
      for (int64_t r = 0; r < arguments.count; ++r) {
        rotate_tile<T, interleaved>(arguments, plan.walks[r], tokens + from, angles + from,
                                    to - from);
      }
    }
  }
}

template <typename T, bool interleaved>
void rotate_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  Plan<T> plan;
  make_plan<T, interleaved>(arguments, &plan);
  const TokenOrder order(arguments);
  if (plan.shared_tile > 0 && !order.seq_first && end - begin >= 2 * arguments.seq) {
    rotate_shared_tiles<T, interleaved>(arguments, plan, order, begin, end);
  } else {
    rotate_in_order<T, interleaved>(arguments, plan, order, begin, end);
  }
  if (plan.streams) core::stream_fence();
}

/// The parts of a token that have angles of their own: windows, of every head or of all.
struct Pieces {
  int64_t windows, heads, axes;  // heads: 1 if they share angles; axes: those that are summed

  explicit Pieces(const Arguments& arguments)
      : windows(arguments.window_count),
        heads(is_by_head(arguments) ? arguments.views[0].heads : 1),
        axes(mixed_axes(arguments)) {}

  int64_t count() const { return heads * windows; }
  /// The piece of a window of a head.
  int64_t index(int64_t head, int64_t window) const {
    return (heads == 1 ? 0 : head) * windows + window;
  }
  /// The rotation of a piece; its views are those of the whole call.
  Arguments part(const Arguments& arguments, int64_t piece, int64_t axis = 0) const {
    const int64_t window = piece % windows;
    const Arguments part =
        arguments.windows == nullptr ? arguments : pairs_of_window(arguments, window);
    return is_by_head(arguments) ? angles_of_head(part, piece / windows, axis) : part;
  }
};

/// The turns of every piece on each axis, and what its angles need.
template <typename T>
struct PieceTurns {
  Arguments part;
  std::unique_ptr<Turns<T>[]> turns;  // [axes]
};

template <typename T, bool interleaved>
std::vector<PieceTurns<T>> turns_of_pieces(const Arguments& arguments, const Pieces& pieces) {
  std::vector<PieceTurns<T>> result(static_cast<size_t>(pieces.count()));
  for (int64_t i = 0; i < pieces.count(); ++i) {
    PieceTurns<T>& piece = result[static_cast<size_t>(i)];
    piece.part = pieces.part(arguments, i);
    piece.turns.reset(new Turns<T>[static_cast<size_t>(pieces.axes)]);
    for (int64_t axis = 0; axis < pieces.axes; ++axis) {
      order_turns<T, interleaved>(pieces.part(arguments, i, axis), &piece.turns[axis]);
      piece.turns[0].has_nan |= piece.turns[axis].has_nan;
    }
    order_decay<T, interleaved>(piece.part, &piece.turns[0]);
  }
  return result;
}

/// Computes the angles of a piece of a token in tensor `r`; returns whether it is rotated.
template <typename T, bool interleaved>
bool begin_piece(const PieceTurns<T>& piece, const Token& token, int64_t r, Angles<T>* angles) {
  const Arguments& part = piece.part;
  const bool rotated = part.frequencies.axis_stride != 0
                           ? begin_mixed<T>(part, piece.turns.get(), token, angles)
                           : begin_token<T>(part, piece.turns[0], token, angles, r);
  if (piece.turns[0].has_nan) set_nan_angles<T, interleaved>(part, angles);
  if (part.tangent) set_tangents<T, interleaved>(part, token, angles);
  return rotated;
}

/// How the windows of the rows of a tensor are rotated and written.
template <typename T, bool interleaved>
class PieceRows {
 public:
  PieceRows(const Arguments& arguments, const HeadView& view, const Pieces& pieces)
      : arguments_(arguments), view_(view), pieces_(pieces) {
    Arguments parts[max_axes];
    for (int64_t w = 0; w < pieces.windows; ++w) {
      Arguments& part = parts[w] = pieces.part(arguments, w);
      part.head_dim = row_dim(arguments, view);
      part.start = window_start(arguments, view) + 2 * first_pair(arguments, w);
      HeadView whole_rows = view;
      whole_rows.window_only = false;
      streams_ = streams_ && can_stream<T>(part, whole_rows);
    }
    for (int64_t w = 0; w < pieces.windows; ++w) {
      windows_[w] = {streams_ ? choose_rotation<T, interleaved, true>(parts[w])
                              : choose_rotation<T, interleaved, false>(parts[w]),
                     parts[w].start, parts[w].pairs};
    }
  }

  bool streams() const { return streams_; }

  /// Rotates every head of a token, in `count` sequences from its own, by `angles` [pieces, step],
  /// of which the first of each piece is used.
  void rotate(const Token& token, int64_t count, const Angles<T>* angles, int64_t step) const {
    const int64_t dim = row_dim(arguments_, view_), start = window_start(arguments_, view_);
    for (int64_t head = 0; head < view_.heads; ++head) {
      RowGroup<T> rows = heads_of_token<T>(view_, token, head, count);
      rows.in_step = view_.in_stride[0];
      rows.out_step = view_.out_stride[0];
      if (token.apart) {
        rotate_apart<T, interleaved>(arguments_, view_, token, head, rows);
        continue;
      }
      if (!arguments_.tangent) {
        const int64_t end = token.rotated ? start : dim;
        copy_group(rows, 0, end);
        copy_group(rows, end + 2 * arguments_.pairs, dim);
      }
      if (!token.rotated) continue;
      for (int64_t w = 0; w < pieces_.windows; ++w) {
        const Window& window = windows_[w];
        window.rotate(rows.in + window.start, rows.out + window.start, count, rows.in_step,
                      rows.out_step, angles[pieces_.index(head, w) * step], window.pairs,
                      no_margins);
      }
    }
  }

 private:
  struct Window {
    RotateGroup<T> rotate;
    int64_t start, pairs;
  };

  const Arguments& arguments_;
  const HeadView& view_;
  const Pieces& pieces_;
  bool streams_ = true;
  Window windows_[max_axes];
};

/// Sequences whose tokens are rotated together: as many memory streams as prefetchers follow.
constexpr int64_t sequences_together = 8;

/// Rotates tokens [begin, end), counted sequence by sequence, of calls whose heads or windows have
/// angles of their own. Sequences with the same positions share the angles of a token.
template <typename T, bool interleaved>
void rotate_pieces(const Arguments& arguments, int64_t begin, int64_t end) {
  const Pieces pieces(arguments);
  const std::vector<PieceTurns<T>> turns = turns_of_pieces<T, interleaved>(arguments, pieces);
  const HeadView& last_view = arguments.views[arguments.count - 1];
  const PieceRows<T, interleaved> rows[] = {{arguments, arguments.views[0], pieces},
                                            {arguments, last_view, pieces}};
  const int64_t kinds = arguments.decay == nullptr ? 1 : arguments.count;  // xPos: query and key
  const int64_t count = pieces.count() * kinds;
  const std::unique_ptr<Angles<T>[]> angles(new Angles<T>[static_cast<size_t>(count)]);
  const int64_t seq = arguments.seq, last = (end - 1) / seq + 1;
  const int64_t together = has_common_positions(arguments) ? sequences_together : 1;
  for (int64_t group = begin / seq; group < last; group += together) {
    for (int64_t s = 0; s < seq; ++s) {
      // The sequences of the group whose token is in the range.
      const int64_t from = group * seq + s < begin ? group + 1 : group;
      const int64_t to = std::min(group + together, (end - s + seq - 1) / seq);
      if (from >= to) continue;
      Token token{from, s, false};
      for (int64_t i = 0; i < count; ++i) {
        token.rotated = begin_piece<T, interleaved>(turns[static_cast<size_t>(i / kinds)], token,
                                                    i % kinds, &angles[i]);
      }
      token.apart = token.rotated && turns_apart(arguments, token);
      for (int64_t r = 0; r < arguments.count; ++r) {
        rows[r].rotate(token, to - from, &angles[kinds == 1 ? 0 : r], kinds);
      }
    }
  }
  if (rows[0].streams() || rows[1].streams()) core::stream_fence();
}

}  // namespace

void rotate(const Arguments& arguments, int64_t begin, int64_t end) {
  if (begin >= end) return;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool in_pieces = is_by_head(arguments) || arguments.windows != nullptr;
    const auto tokens = arguments.interleaved
                            ? (in_pieces ? rotate_pieces<T, true> : rotate_tokens<T, true>)
                            : (in_pieces ? rotate_pieces<T, false> : rotate_tokens<T, false>);
    tokens(arguments, begin, end);
  });
}

}  // namespace posembed::rotary::POSEMBED_ISA

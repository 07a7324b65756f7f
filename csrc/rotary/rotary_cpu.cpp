// Rotary embedding on the CPU, compiled once per instruction set. Walks tokens in small tiles: sine
// and cosine of a tile are computed once, stay in the caches and rotate all heads of query and key,
// and all sequences of a batch where sharing saves time.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "core/fma.h"
#include "core/instruction_set.h"
#include "rotary/rotary.h"
#include "rotary/rotary_angles_cpu.h"
#include "rotary/rotary_walks_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

// -------------------------------------------------------------------------------------- rotations

/// `fixed_pairs`: the number of pairs as a constant, or 0.
template <bool interleaved, bool streaming, typename Source, int64_t fixed_pairs, typename T>
void rotate_group(const T* in, T* out, int64_t count, int64_t in_step, int64_t out_step,
                  const Angles<T>& angles, int64_t pairs, const Margins& margins) {
  rotate_each<interleaved, streaming>(RowGroup<T>{in, out, count, in_step, out_step},
                                      Source(angles), fixed_pairs > 0 ? fixed_pairs : pairs,
                                      margins);
}

/// The rotation by tables.
template <bool interleaved, bool streaming, ProductRounding rounding, typename T>
POSEMBED_IN_STEPS void rotate_group_in_steps(const T* in, T* out, int64_t count, int64_t in_step,
                                             int64_t out_step, const Angles<T>& angles,
                                             int64_t pairs, const Margins& margins) {
  rotate_each<interleaved, streaming>(RowGroup<T>{in, out, count, in_step, out_step},
                                      AnglesInSteps<rounding, T>(angles), pairs, margins);
}

/// The rotation by tables with a value for each component of a pair.
template <bool interleaved, ProductRounding rounding, typename T>
POSEMBED_IN_STEPS void rotate_apart(const RowGroup<T>& rows, const ApartAngles<Compute<T>>& angles,
                                    int64_t pairs) {
  rotate_each<interleaved, false>(rows, ApartInSteps<rounding, T>{angles}, pairs, no_margins);
}

/// The maximum number of tokens in a tile.
template <typename T>
constexpr int64_t tile_tokens = 128 / static_cast<int64_t>(sizeof(Compute<T>));

template <typename T, bool interleaved, bool streaming, int64_t... known>
RotateGroup<T> rotation_of(int64_t pairs, std::integer_sequence<int64_t, known...>) {
  RotateGroup<T> chosen = rotate_group<interleaved, streaming, AnglesInMemory<Compute<T>>, 0, T>;
  ((pairs == known
        ? void(chosen = rotate_group<interleaved, streaming, AnglesInRegisters<known>, known, T>)
        : void()),
   ...);
  return chosen;
}

template <typename T, bool interleaved, bool streaming>
RotateGroup<T> rotation_of(const Arguments& arguments) {
  if (arguments.decay != nullptr) {  // xPos; doubles need no outer factor
    using Source =
        std::conditional_t<std::is_same_v<T, double>, AnglesInMemory<double>, DecayingAngles>;
    return rotate_group<interleaved, streaming, Source, 0, T>;
  }
  if (arguments.cosines != nullptr) {
    return arguments.product_rounding == ProductRounding::to_data_type
               ? rotate_group_in_steps<interleaved, streaming, ProductRounding::to_data_type, T>
               : rotate_group_in_steps<interleaved, streaming, ProductRounding::none, T>;
  }
  return choose_rotation<T>(interleaved, streaming, arguments.pairs);
}

// -------------------------------------------------------------------------------------------- ways
// The way that a call takes, chosen here and named for profilers: how tokens are walked and, for
// each tensor, how rows are written and in which order. docs/guide/kernels.md has measurements.

enum class Walk { in_order, shared_tiles, pieces };
constexpr const char* walk_names[] = {"in order", "shared tiles", "pieces"};
constexpr const char* store_names[] = {"", ", streamed", ", streamed from a buffer"};

/// heads_first: few, long memory streams in head-major tensors, for the hardware prefetcher.
/// four_streams: the same where the heads of a token are contiguous.
enum class Order { by_token, heads_first, four_streams };
constexpr const char* order_names[] = {"", ", heads first", ", four streams"};

/// Four streams only for Intel processors, data larger than the caches and tokens of a page or
/// more: elsewhere loading sine and cosine more often costs more than it saves.
template <typename T>
Order choose_order(const Arguments& arguments, const HeadView& view, Stores stores) {
  if (is_head_major(view)) return Order::heads_first;
  constexpr int64_t cached = int64_t{128} << 20, size = sizeof(T);
  const bool leaves_caches =
      stores != Stores::ordinary || elements_of(arguments, view) * size >= cached;
  const bool long_tokens = view.heads * row_dim(arguments, view) * size >= core::page;
  return core::is_intel && leaves_caches && long_tokens ? Order::four_streams : Order::by_token;
}

/// See fetch_behind_token().
template <typename T>
bool fetches_behind(const Arguments& arguments, const HeadView& view) {
  if (!fetches_gaps<T>(arguments)) return false;
  const Order order = choose_order<T>(arguments, view, choose_stores<T>(arguments, view));
  if (order != Order::by_token) return false;
  const int64_t gap = gap_between_heads(view, read_of_head(arguments, view));
  return gap == fetched_between_heads<T>(arguments, view);
}

/// Whether the sequences of a batch can share angles: same positions, and no xPos, which gives
/// query and key different factors.
inline bool has_common_positions(const Arguments& arguments) {
  if (arguments.batch == 1 || arguments.decay != nullptr) return false;
  if (arguments.cosines != nullptr) return arguments.table_stride[0] == 0;
  return arguments.positions.data == nullptr || arguments.position_stride[0] == 0;
}

/// The length of tiles of which all sequences share the angles, or 0. Sharing saves most with few
/// heads. For data larger than the caches each sequence's tile is a separate memory stream, so only
/// short tiles without gaps share.
template <typename T>
int64_t shared_tile(const Arguments& arguments) {
  if (!has_common_positions(arguments)) return 0;
  int64_t elements = 0;
  bool gaps = false;
  for (int64_t r = 0; r < arguments.count; ++r) {
    const HeadView& view = arguments.views[r];
    elements += view.heads * row_dim(arguments, view);
    gaps = gaps || (view.in_stride[1] != view.heads * view.in_stride[2] &&
                    fetches_behind<T>(arguments, view));
  }
  constexpr int64_t run = 2048, longest_token = run / 8;
  const int64_t token = elements * static_cast<int64_t>(sizeof(T));
  if (arguments.batch * arguments.seq * token < uncached_bytes) return tile_tokens<T> / 2;
  return token <= longest_token && !gaps ? std::min(run / token, tile_tokens<T>) : 0;
}

/// In pieces where heads or windows have angles of their own; in shared tiles if two sequences or
/// more can share them.
template <typename T>
Walk choose_walk(const Arguments& arguments, int64_t begin, int64_t end) {
  if (is_by_head(arguments) || arguments.windows != nullptr) return Walk::pieces;
  if (end - begin < 2 * arguments.seq || TokenOrder(arguments).seq_first) return Walk::in_order;
  return shared_tile<T>(arguments) > 0 ? Walk::shared_tiles : Walk::in_order;
}

/// The order of a tile's rows. The outermost loop counts `first` from 0 to `stride` - 1. The next
/// loop takes `heads` heads at a time; the innermost loop rotates these heads of the tokens
/// `first`, `first` + `stride`, `first` + 2 * `stride`, …
struct RowOrder {
  int64_t tile;    // tokens
  int64_t stride;  // tokens
  int64_t heads;
};

template <typename T>
RowOrder rows_in(Order order, int64_t row_bytes) {
  constexpr int64_t bytes_in_turn = 1024;
  if (order == Order::by_token) return {1, 1, std::numeric_limits<int64_t>::max()};
  if (order == Order::heads_first) return {tile_tokens<T>, 1, 4};
  return {tile_tokens<T>, tile_tokens<T> / 4, std::max<int64_t>(1, bytes_in_turn / row_bytes)};
}

/// How the rows of one tensor are read, rotated and written.
template <typename T>
struct Rows {
  const HeadView* view;
  Rotating<T> rotating;
  RowOrder order;
  bool fetches_behind;  // see fetch_behind_token()
  bool fetches_ahead;   // see fetch_ahead()
};

template <typename T, bool interleaved>
Rows<T> plan_rows(const Arguments& arguments, const HeadView& view) {
  const Stores stores = choose_stores<T>(arguments, view);
  const auto rotate = stores == Stores::streaming ? rotation_of<T, interleaved, true>(arguments)
                                                  : rotation_of<T, interleaved, false>(arguments);
  const Order order = choose_order<T>(arguments, view, stores);
  const int64_t row_bytes = row_dim(arguments, view) * static_cast<int64_t>(sizeof(T));
  return {&view,
          {rotate, stores, margins_of<T>(arguments, view, stores)},
          rows_in<T>(order, row_bytes),
          fetches_behind<T>(arguments, view),
          order != Order::by_token && fetches_gaps<T>(arguments)};
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
void rotate_tile(const Arguments& arguments, const Rows<T>& rows, const Token* tokens,
                 const Angles<T>* angles, int64_t count) {
  const HeadView& view = *rows.view;
  const RowOrder& order = rows.order;
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
        if (rows.fetches_ahead) fetch_ahead(heads, dim);
        rotate_rows(arguments, view, tokens[t], rows.rotating, angles[t], heads);
      }
    }
  }
}

/// The turns of a call and the rows of its tensors.
template <typename T, bool interleaved>
struct Plan {
  Turns<T> turns;
  Rows<T> rows[2] = {};
  bool streams = false;

  explicit Plan(const Arguments& arguments) {
    order_turns<T, interleaved>(arguments, &turns);
    order_decay<T, interleaved>(arguments, &turns);
    for (int64_t r = 0; r < arguments.count; ++r) {
      rows[r] = plan_rows<T, interleaved>(arguments, arguments.views[r]);
      streams = streams || rows[r].rotating.stores != Stores::ordinary;
    }
  }
};

/// Rotates tokens [begin, end) in their order in memory.
template <typename T, bool interleaved>
void rotate_in_order(const Arguments& arguments, int64_t begin, int64_t end) {
  const Plan<T, interleaved> plan(arguments);
  const TokenOrder order(arguments);
  Angles<T> angles[tile_tokens<T>];
  Token tokens[tile_tokens<T>];
  const int64_t tile = plan.rows[0].order.tile;
  const bool shares = order.seq_first && tile == 1 && has_common_positions(arguments);
  int64_t batch = order.token(begin).batch, seq = order.token(begin).seq;
  for (int64_t first = begin; first < end; first += tile) {
    const int64_t count = std::min(tile, end - first);
    const Token token{batch, seq, false};
    const bool has_angles = shares && first > begin && seq == tokens[0].seq;
    if (has_angles) tokens[0].batch = batch;
    for (int64_t t = 0; t < tile; ++t) order.advance(&batch, &seq);
    for (int64_t r = 0; r < arguments.count; ++r) {
      const bool of_both = r == 0 || arguments.decay != nullptr;  // except with xPos
      if (of_both && !has_angles) {
        begin_tile<T, interleaved>(arguments, plan.turns, r, count, order, token, tokens, angles);
      }
      rotate_tile<T, interleaved>(arguments, plan.rows[r], tokens, angles, count);
      if (plan.rows[r].fetches_behind) {
        fetch_behind_token<T>(arguments, r, token, {batch, seq, false});
      }
    }
  }
  if (plan.streams) core::stream_fence();
}

/// Rotates tokens [begin, end) of at least two sequences: the same tile of each sequence by the
/// same angles.
template <typename T, bool interleaved>
void rotate_shared_tiles(const Arguments& arguments, int64_t begin, int64_t end) {
  const Plan<T, interleaved> plan(arguments);
  const TokenOrder order(arguments);
  Angles<T> angles[tile_tokens<T>];
  Token tokens[tile_tokens<T>];
  const int64_t seq = arguments.seq, length = shared_tile<T>(arguments);
  for (int64_t tile = 0; tile < seq; tile += length) {
    const int64_t count = std::min(length, seq - tile);
    begin_tile<T, interleaved>(arguments, plan.turns, 0, count, order, {0, tile, false}, tokens,
                               angles);
    for (int64_t sequence = begin / seq; sequence * seq < end; ++sequence) {
      const int64_t first = sequence * seq + tile;
      const int64_t from = std::clamp<int64_t>(begin - first, 0, count);
      const int64_t to = std::clamp<int64_t>(end - first, 0, count);
      for (int64_t t = from; t < to; ++t) tokens[t].batch = sequence;
      for (int64_t r = 0; r < arguments.count; ++r) {
        rotate_tile<T, interleaved>(arguments, plan.rows[r], tokens + from, angles + from,
                                    to - from);
      }
    }
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

/// A window of the rows of a tensor as a rotation of its own.
inline Arguments window_of_rows(const Arguments& arguments, const HeadView& view, int64_t w) {
  Arguments part = Pieces(arguments).part(arguments, w);
  part.head_dim = row_dim(arguments, view);
  part.start = window_start(arguments, view) + 2 * first_pair(arguments, w);
  return part;
}

/// Whether all windows are streamed.
template <typename T>
bool streams_windows(const Arguments& arguments, HeadView view) {
  bool streams = true;
  for (int64_t w = 0; w < arguments.window_count; ++w) {
    const Arguments part = window_of_rows(arguments, view, w);
    HeadView whole_rows = view;
    whole_rows.window_only = false;
    streams = streams && can_stream<T>(part, whole_rows);
  }
  return streams;
}

/// How the windows of the rows of a tensor are rotated and written.
template <typename T, bool interleaved>
class PieceRows {
 public:
  PieceRows(const Arguments& arguments, const HeadView& view, const Pieces& pieces)
      : arguments_(arguments),
        view_(view),
        pieces_(pieces),
        streams_(streams_windows<T>(arguments, view)) {
    for (int64_t w = 0; w < pieces.windows; ++w) {
      const Arguments part = window_of_rows(arguments, view, w);
      windows_[w] = {streams_ ? rotation_of<T, interleaved, true>(part)
                              : rotation_of<T, interleaved, false>(part),
                     part.start, part.pairs};
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
  const bool streams_;
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

// ------------------------------------------------------------------------------ frequency gradient
// Sums the heads of a token in its compute type, and tokens in double.

/// moments[i] += g1 x0 - g0 x1 for pair i of one head.
template <typename T, bool interleaved>
void add_moments(const T* x, const T* g, int64_t pairs, Compute<T>* POSEMBED_RESTRICT moments) {
  constexpr int64_t step = interleaved ? 2 : 1;
  const int64_t second = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const Compute<T> x0 = core::load(x[step * i]), x1 = core::load(x[step * i + second]);
    const Compute<T> g0 = core::load(g[step * i]), g1 = core::load(g[step * i + second]);
    moments[i] = core::fma(g1, x0, core::fma(-g0, x1, moments[i]));
  }
}

/// Moments of the tokens of a tile.
template <typename T>
using Moments = Compute<T>[std::max<int64_t>(max_pairs, 2048)];

/// Tiles keep the number of memory streams low in head-major tensors.
template <typename T>
Tile tile_of_moments(const Arguments& arguments) {
  constexpr int64_t moments = sizeof(Moments<T>) / sizeof(Compute<T>);
  const int64_t pairs = std::max<int64_t>(arguments.pairs, 1);
  return choose_tile<T>(arguments, {std::min<int64_t>(moments / pairs, 16), 4});
}

/// The window of head `head` of a token in tensor `r`.
template <typename T>
const T* window_of(const Arguments& arguments, int64_t r, const Token& token, int64_t head) {
  const HeadView& view = arguments.views[r];
  return row_of<T>(view, token, head) + window_start(arguments, view);
}

/// Adds the moments of heads [begin, end) of a token.
template <typename T, bool interleaved>
void add_heads(const Arguments& arguments, const Tile& tile, const Token& token, int64_t begin,
               int64_t end, Compute<T>* moments) {
  for (int64_t r = 0; r < 2; ++r) fetch_next_tile<T>(arguments, r, tile, token, begin, end);
  for (int64_t head = begin; head < end; ++head) {
    add_moments<T, interleaved>(window_of<T>(arguments, 0, token, head),
                                window_of<T>(arguments, 1, token, head), arguments.pairs, moments);
  }
}

/// The moments of tokens [begin, end), over their heads.
template <typename T, bool interleaved>
void tile_moments(const Arguments& arguments, const Tile& tile, int64_t begin, int64_t end,
                  Compute<T>* moments) {
  const int64_t heads = arguments.views[0].heads, pairs = arguments.pairs;
  std::fill_n(moments, (end - begin) * pairs, Compute<T>(0));
  for (int64_t head = 0; head < heads; head += tile.heads) {
    const int64_t last = std::min(head + tile.heads, heads);
    for (int64_t t = begin; t < end; ++t) {
      const Token token{t / arguments.seq, t % arguments.seq, false};
      add_heads<T, interleaved>(arguments, tile, token, head, last, moments + (t - begin) * pairs);
    }
  }
}

/// Adds position times the moments of a token; adds nothing for a token that is not rotated. `sums`
/// are [axes, ...] where angles are summed over axes.
template <typename C>
void add_token(const Arguments& arguments, int64_t number, const C* moments, double* sums) {
  double positions[max_axes];
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    const int64_t batch = number / arguments.seq, seq = number % arguments.seq;
    const core::Position position = position_of(arguments, batch, seq, axis);
    if (leaves_token(arguments, position)) return;
    positions[axis] = core::to_double(position);
  }
  for (int64_t mixed = 0; mixed < mixed_axes(arguments); ++mixed) {
    for (int64_t i = 0; i < arguments.pairs; ++i) {
      const double position =
          positions[arguments.axis_of_pair == nullptr ? mixed : arguments.axis_of_pair[i]];
      sums[mixed * arguments.frequencies.axis_stride + i] +=
          (arguments.reverse ? -position : position) * static_cast<double>(moments[i]);
    }
  }
}

template <typename T, bool interleaved>
void sum_chunk(const Arguments& arguments, int64_t begin, int64_t end, double* sums) {
  alignas(64) Moments<T> moments;
  const int64_t pairs = arguments.pairs;
  const Tile tile = tile_of_moments<T>(arguments);
  for (int64_t first = begin; first < end; first += tile.tokens) {
    const int64_t last = std::min(first + tile.tokens, end);
    tile_moments<T, interleaved>(arguments, tile, first, last, moments);
    for (int64_t t = first; t < last; ++t) {
      add_token(arguments, t, moments + (t - first) * pairs, sums);
    }
  }
}

/// The same for each window and each head that has frequencies of its own.
template <typename T, bool interleaved>
void sum_parts(const Arguments& arguments, int64_t begin, int64_t end, double* sums) {
  for_each_window_sum(arguments, [&](const Arguments& part, int64_t first) {
    if (!is_by_head(part)) return sum_chunk<T, interleaved>(part, begin, end, sums + first);
    for (int64_t head = 0; head < part.views[0].heads; ++head) {
      sum_chunk<T, interleaved>(head_of(part, head), begin, end,
                                sums + first + head * part.frequencies.head_stride);
    }
  });
}

// ------------------------------------------------------------------------------------------
// kernels

template <typename T, bool interleaved>
void rotate_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  switch (choose_walk<T>(arguments, begin, end)) {
    case Walk::pieces:
      return rotate_pieces<T, interleaved>(arguments, begin, end);
    case Walk::shared_tiles:
      return rotate_shared_tiles<T, interleaved>(arguments, begin, end);
    default:
      return rotate_in_order<T, interleaved>(arguments, begin, end);
  }
}

template <typename T>
void name_way(const Arguments& arguments, Walk walk, const char** parts) {
  const HeadView& query = arguments.views[0];
  const bool in_pieces = walk == Walk::pieces;
  const bool streams = in_pieces && streams_windows<T>(arguments, query);
  const Stores of_pieces = streams ? Stores::streaming : Stores::ordinary;
  const Stores stores = in_pieces ? of_pieces : choose_stores<T>(arguments, query);
  const Order order = in_pieces ? Order::by_token : choose_order<T>(arguments, query, stores);
  parts[0] = walk_names[static_cast<int>(walk)];
  parts[1] = store_names[static_cast<int>(stores)];
  parts[2] = order_names[static_cast<int>(order)];
}

}  // namespace

/// The window sizes of models in use are compile-time constants.
template <typename T>
RotateGroup<T> choose_rotation(bool interleaved, bool streaming, int64_t pairs) {
  using Known = std::conditional_t<std::is_same_v<T, double>, std::integer_sequence<int64_t>,
                                   std::integer_sequence<int64_t, 8, 12, 16, 32, 40, 48, 64, 128>>;
  if (interleaved) {
    return streaming ? rotation_of<T, true, true>(pairs, Known{})
                     : rotation_of<T, true, false>(pairs, Known{});
  }
  return streaming ? rotation_of<T, false, true>(pairs, Known{})
                   : rotation_of<T, false, false>(pairs, Known{});
}

template RotateGroup<float> choose_rotation(bool, bool, int64_t);
template RotateGroup<double> choose_rotation(bool, bool, int64_t);
template RotateGroup<core::BFloat16> choose_rotation(bool, bool, int64_t);
template RotateGroup<core::Float16> choose_rotation(bool, bool, int64_t);

void name_walk(const Arguments& arguments, int64_t begin, int64_t end, const char** parts) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    name_way<T>(arguments, choose_walk<T>(arguments, begin, end), parts);
  });
}

void rotate(const Arguments& arguments, int64_t begin, int64_t end) {
  if (begin >= end) return;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto tokens = arguments.interleaved ? rotate_tokens<T, true> : rotate_tokens<T, false>;
    tokens(arguments, begin, end);
  });
}

void sum_moments(const Arguments& arguments, double* sums, int64_t begin, int64_t end) {
  const int64_t tokens = arguments.batch * arguments.seq, size = tokens_of_chunk(tokens);
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto sum = arguments.interleaved ? sum_parts<T, true> : sum_parts<T, false>;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * size, last = tokens - first < size ? tokens : first + size;
      double* const own = sums + chunk * frequency_count(arguments);
      std::fill_n(own, frequency_count(arguments), 0.0);
      sum(arguments, first, last, own);
    }
  });
}

}  // namespace posembed::rotary::POSEMBED_ISA

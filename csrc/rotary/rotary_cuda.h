// Shared by CUDA kernels that rotate: launch arguments by value, 16-byte packs, a token's sines and
// cosines computed once for all heads, and threads that own both members of their pairs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "core/bfloat16_pair.h"
#include "core/device_vector.h"
#include "core/divisor.h"
#include "rotary/rotary.h"

namespace posembed::rotary {
namespace {

using core::Compute;
using core::TurnOf;

constexpr int vector_bytes = 16;
constexpr int threads_wanted = 256;

/// The maximum number of threads of a block whose threads own `size` pairs each.
template <int size>
constexpr int max_threads = size > 1 ? threads_wanted : int{max_pairs};

/// The minimum number of such blocks per multiprocessor, which limits registers: loads in flight
/// hide memory latency.
template <int size, int wanted>
constexpr int min_blocks = size > 1 ? wanted : 1;

constexpr int heads_in_flight = 2;  // per thread: four 16-byte loads hide memory latency
constexpr int heads_of_thread = 5;  // the more, the less a token's own work costs

/// Everything that a launch needs, by value, so that nothing must be prepared or kept alive on the
/// device.
template <typename T, int capacity>
struct Launch {
  HeadView views[2];
  int64_t tokens;
  core::Divisor<int64_t> seq;
  int64_t position_stride[3], offset;
  core::PositionView positions;
  Documents documents;
  Frequencies frequencies;
  core::DeviceError* error;
  Compute<T> amplitude, sine_amplitude;
  int query_heads, heads;               // heads: of query and key together
  core::Divisor<int> threads_per_head;  // threads that share a head
  int heads_of_block;                   // blocks (x: token, y) share the heads of a token
  int heads_per_pass;                   // heads that a block's threads cover at a time
  int pairs;
  int start[2], outside[2];  // of query and of key: components before, and outside, the window
  core::Divisor<int> packs_outside[2];
  int axes;
  bool tangent, interleaved;
  TurnOf<T> turns[capacity];
  int64_t whole_turns[capacity];  // for positions with fractions
  uint8_t axis_of_pair[capacity];
};

/// The source of a kernel's angles.
enum class Form {
  exact,       // positions and turns
  decaying,    // the same with amplitudes: xPos
  table,       // memory
  pairs,       // memory in bfloat16, for data in bfloat16 and products that are rounded to it
  own,         // as exact, by each thread for its own pairs: without barriers, for few tokens
  by_head,     // learned frequencies of each head, by each thread for its own pairs of one head
  head_table,  // memory, by each thread for its own pairs: tables of each head
};

template <Form form>
constexpr bool reads_tables =
    form == Form::table || form == Form::pairs || form == Form::head_table;

/// Arguments of the other forms, which an exact launch need not carry.
template <typename T, int capacity>
struct DecayingLaunch : Launch<T, capacity> {
  double decay_center, decay_sign;
  double decay[capacity];
};

template <typename T, int capacity>
struct TableLaunch : Launch<T, capacity> {
  const void* cosines;
  const void* sines;
  core::Scalar table_scalar;
  int64_t table_stride[3], table_head_stride, table_second;
  bool reverse;
  ProductRounding product_rounding;
};

template <typename T, int capacity, Form form>
using LaunchOf = std::conditional_t<
    form == Form::exact || form == Form::own || form == Form::by_head, Launch<T, capacity>,
    std::conditional_t<reads_tables<form>, TableLaunch<T, capacity>, DecayingLaunch<T, capacity>>>;

/// `size` elements, loaded and stored in one instruction.
template <typename T, int size>
struct Pack {
  T element[size];

  __device__ static Pack read(const T* in) {
    Pack pack;
    if constexpr (size == 1) {
      pack.element[0] = *in;
    } else {
      static_assert(sizeof(Pack) == vector_bytes);
      // Load through uint4: the compiler would load a struct of small members piece by piece.
      const uint4 raw = *reinterpret_cast<const uint4*>(in);
      memcpy(pack.element, &raw, vector_bytes);
    }
    return pack;
  }

  __device__ void write(T* out) const {
    if constexpr (size == 1) {
      *out = element[0];
    } else {
      static_assert(sizeof(Pack) == vector_bytes);
      uint4 raw;
      memcpy(&raw, element, vector_bytes);
      *reinterpret_cast<uint4*>(out) = raw;
    }
  }
};

/// Sine and cosine of the pairs that a thread owns; with xPos, also the factor of the result.
template <typename T, int size, Form form = Form::exact>
struct Angles {
  Compute<T> sine[size], cosine[size];
  Compute<T> outer[form == Form::decaying ? size : 1];

  /// The angle of pair `i`, whose components share it.
  __device__ PairAngle<Compute<T>> of(int i) const {
    return {{cosine[i], cosine[i]}, {sine[i], sine[i]}};
  }
};

/// The same for arithmetic on two numbers at once. Half-split: sines and cosines of two pairs in
/// each word; interleaved: (-sine, sine) and (cosine, cosine) of one.
template <typename T, int size>
struct Angles<T, size, Form::pairs> {
  core::BFloat16Pair sine[size], cosine[size];
};

/// A thread's share of a row: `size` pairs in two packs. Half-split: the first and the second
/// members; interleaved: 2 * size neighbours.
template <typename T, int size, bool interleaved>
struct Pairs {
  Pack<T, size> first, second;

  /// The members of pair `i`.
  __device__ T& a(int i) { return interleaved ? member(2 * i) : first.element[i]; }
  __device__ T& b(int i) { return interleaved ? member(2 * i + 1) : second.element[i]; }

  template <Form form>
  __device__ void rotate(const Angles<T, size, form>& angles) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      const Compute<T> x = core::load(a(i)), y = core::load(b(i));
      const Compute<T> outer = form == Form::decaying ? angles.outer[i] : Compute<T>(1);
      core::store(core::fma(x, angles.cosine[i], -(y * angles.sine[i])) * outer, &a(i));
      core::store(core::fma(y, angles.cosine[i], x * angles.sine[i]) * outer, &b(i));
    }
  }

  /// Rotates pair i by angle(i) in PyTorch's steps: see rounding.h.
  template <ProductRounding rounding, typename Angle>
  __device__ void rotate_in_steps(const Angle& angle) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      rotary::rotate_in_steps<rounding>(T(a(i)), T(b(i)), angle(i), &a(i), &b(i));
    }
  }

  /// The same for products and sums that are rounded to bfloat16, two at once.
  __device__ void rotate_pairs(const Angles<T, size, Form::pairs>& angles) {
#pragma unroll
    for (int i = 0; i < size / 2; ++i) {
      const auto x = pair_at(first, i), y = pair_at(second, i);
      if constexpr (interleaved) {
        constexpr int half = size / 2;
        set_pair(x * angles.cosine[i] + swapped(x) * angles.sine[i], i, &first);
        set_pair(y * angles.cosine[half + i] + swapped(y) * angles.sine[half + i], i, &second);
      } else {
        set_pair(x * angles.cosine[i] + -(y * angles.sine[i]), i, &first);
        set_pair(y * angles.cosine[i] + x * angles.sine[i], i, &second);
      }
    }
  }

 private:
  __device__ static core::BFloat16Pair pair_at(const Pack<T, size>& pack, int i) {
    core::BFloat16Pair pair;
    memcpy(&pair, pack.element + 2 * i, sizeof pair);
    return pair;
  }

  __device__ static void set_pair(core::BFloat16Pair pair, int i, Pack<T, size>* pack) {
    memcpy(pack->element + 2 * i, &pair, sizeof pair);
  }

  __device__ T& member(int i) { return i < size ? first.element[i] : second.element[i - size]; }
};

/// The columns, in the window, of a thread's two packs, and the pairs that they hold. Threads that
/// share a row read neighbouring packs, whether pairs are interleaved or not.
template <int size, bool interleaved>
struct PackColumns {
  static_assert(size > 1 || !interleaved, "one kernel takes single elements in both pairings");

  int first, second, thread;

  /// `neighbours`: a thread's single elements are neighbours, as those of interleaved pairs are.
  __device__ PackColumns(int thread, int pairs, bool neighbours)
      : first(size == 1 && neighbours ? 2 * thread : thread * size),
        second(first + (size == 1 && neighbours ? 1 : pairs)),
        thread(thread) {}

  /// The pair that is number `i` of the thread's.
  __device__ int pair(int i) const {
    if constexpr (size == 1) return thread;
    if constexpr (!interleaved) return first + i;
    return i < size / 2 ? first / 2 + i : second / 2 + i - size / 2;
  }
};

/// The address of a row's window.
template <typename T>
struct Row {
  const T* in;
  T* out;
};

/// A token's indices in its tensors.
struct Token {
  int64_t number, batch, seq;
};

template <typename T, int capacity>
__device__ Token token_of(const Launch<T, capacity>& launch, int64_t number) {
  const auto indices = core::divide(number, launch.seq);
  return {number, indices.quotient, indices.remainder};
}

__device__ inline int64_t offset_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

/// The offset of a head. Where packs are used, strides fit in 32 bits: the product takes one
/// instruction instead of four.
template <int size>
__device__ int64_t head_offset(int head, int64_t stride) {
  return int64_t{head} * (size > 1 ? static_cast<int>(stride) : stride);
}

/// The addresses of a token's heads. Computes common offsets once.
template <typename T, int size, int capacity>
class TokenHeads {
 public:
  __device__ TokenHeads(const Launch<T, capacity>& launch, const Token& token) : launch_(launch) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const HeadView& view = launch.views[r];
      const int start = launch.start[r];
      in_[r] = static_cast<const T*>(view.in) + offset_of(token, 0, view.in_stride) + start;
      out_[r] = static_cast<T*>(view.out) + offset_of(token, 0, view.out_stride) + start;
    }
  }

  /// The row of a head; the query's heads come first.
  __device__ Row<T> row(int head) const {
    const bool is_key = head >= launch_.query_heads;
    const int index = is_key ? head - launch_.query_heads : head;
    const HeadView& view = launch_.views[is_key];
    return {(is_key ? in_[1] : in_[0]) + head_offset<size>(index, view.in_stride[2]),
            (is_key ? out_[1] : out_[0]) + head_offset<size>(index, view.out_stride[2])};
  }

  /// The same for a head that is known to belong to the query (r = 0) or to the key.
  __device__ Row<T> row(int r, int head) const {
    const int index = r == 0 ? head : head - launch_.query_heads;
    const HeadView& view = launch_.views[r];
    return {in_[r] + head_offset<size>(index, view.in_stride[2]),
            out_[r] + head_offset<size>(index, view.out_stride[2])};
  }

 private:
  const Launch<T, capacity>& launch_;
  const T* in_[2];
  T* out_[2];
};

/// The threads that share a head, and this thread's index among them.
struct HeadThreads {
  int count, index;
  int group;  // index of the head among those that the block covers at a time

  __device__ explicit HeadThreads(const core::Divisor<int>& per_head) : count(per_head.value) {
    const auto head = core::divide(static_cast<int>(threadIdx.x), per_head);
    group = head.quotient;
    index = head.remainder;
  }
};

/// Whether the token is rotated: its position is floating or at least 0. Integers below -1 are
/// recorded as errors.
template <typename T, int capacity>
__device__ bool is_rotated(const Launch<T, capacity>& launch, const core::Position& position,
                           const Token& token) {
  if (launch.positions.floating) return true;
  if (position.whole < -1 && threadIdx.x == 0) {
    core::record_error(launch.error, core::ErrorKind::position, position.whole, token.number,
                       /*limit=*/-1);
  }
  return position.whole >= 0;
}

/// Copies, in packs, the components outside the window of heads [begin, end) of the query (r = 0)
/// or the key. A thread owns a pack column of some of the rows and has `in_flight` loads in flight.
template <int in_flight, typename T, int size, int capacity>
__device__ void copy_outside(const Launch<T, capacity>& launch,
                             const TokenHeads<T, size, capacity>& heads, int r, int begin,
                             int end) {
  if (launch.outside[r] == 0) return;  // as in most calls: shortens decoding
  const int before = launch.start[r] / size, window = 2 * launch.pairs / size;
  const int packs = launch.outside[r] / size, threads = static_cast<int>(blockDim.x);
  const auto at = core::divide(static_cast<int>(threadIdx.x), launch.packs_outside[r]);
  // Rows that the block copies at a time; 0: a row has more packs than the block has threads.
  const int rows = core::divide(threads, launch.packs_outside[r]).quotient, step = max(rows, 1);
  if (at.quotient >= step) return;
  const int columns = rows > 0 ? packs : threads;
  for (int column = at.remainder; column < packs; column += columns) {
    const int offset = (column - before + (column < before ? 0 : window)) * size;
    const Row<T> first = heads.row(r, begin + at.quotient);
    if (first.in == first.out) return;  // rotation in place
    const int64_t in_step = head_offset<size>(step, launch.views[r].in_stride[2]);
    const int64_t out_step = head_offset<size>(step, launch.views[r].out_stride[2]);
    const T* in = first.in + offset;
    T* out = first.out + offset;
    for (int left = end - begin - at.quotient; left > 0; left -= in_flight * step) {
      Pack<T, size> copied[in_flight];
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        if (k * step < left) copied[k] = Pack<T, size>::read(in);
        in += in_step;
      }
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        if (k * step < left) copied[k].write(out);
        out += out_step;
      }
    }
  }
}

/// Turns per position of a learned frequency; zeros if it has none.
template <typename T>
struct LearnedTurns {
  TurnOf<T> part;
  int64_t whole;  // for positions with fractions

  __device__ static LearnedTurns of(double radians) {
    if (!core::has_turn(radians)) return {};
    const core::Turn128 wide = core::turn_from_radians(radians);
    TurnOf<T> part;
    if constexpr (std::is_same_v<T, double>) {
      part = wide;
    } else {
      part = core::round_to_turn64(wide);
    }
    return {part, core::whole_turns(radians, part)};
  }
};

/// Sine and cosine at a learned frequency, NaN if it is NaN; for a tangent, the factor that
/// replaces them.
template <typename T>
__device__ void learned_sincos(const Frequencies& frequencies, bool tangent,
                               const core::Position& position, int pair, Compute<T>* sine,
                               Compute<T>* cosine) {
  const double radians = read(frequencies, pair);
  if (tangent) {
    *sine = static_cast<Compute<T>>(core::to_double(position) * radians);
    *cosine = 0;
    return;
  }
  if (!core::has_turn(radians)) {
    *sine = *cosine = static_cast<Compute<T>>(NAN);
    return;
  }
  const auto turns = LearnedTurns<T>::of(radians);
  core::sincos_turn(core::phase(position, turns.part, turns.whole), sine, cosine);
}

/// A pair of a token, with the inputs of its angle.
template <typename T>
struct PairAt {
  int pair;
  core::Position position;
  TurnOf<T> turn;  // unless frequencies are learned
};

/// Calls visit(axis, position) for each axis. Returns whether the token is rotated: by its
/// positions on all axes. A token that is rotated on some axes only is recorded as an error.
template <typename T, int capacity, typename Visit>
__device__ bool visit_axes(const Launch<T, capacity>& launch, const Token& token,
                           const Visit& visit) {
  bool rotated = true, on_first = true;
#pragma unroll 1
  for (int axis = 0; axis < launch.axes; ++axis) {
    const core::Position position = position_of(launch, token.batch, token.seq, axis);
    const bool on_axis = is_rotated(launch, position, token);
    if (axis == 0) on_first = on_axis;
    if (on_axis != on_first && threadIdx.x == 0) {
      core::record_error(launch.error, core::ErrorKind::position, -1, token.number, /*limit=*/-1);
    }
    rotated = on_axis && rotated;
    visit(axis, position);
  }
  return rotated;
}

/// Whether a pair is turned by positions on an axis.
template <typename T, int capacity>
__device__ bool turns_on(const Launch<T, capacity>& launch, int axis, int pair) {
  return launch.axes == 1 || core::through_data_cache(launch.axis_of_pair)[pair] == axis;
}

/// Calls fill(at) for the pairs of a token and makes its writes visible to the block. Returns
/// whether the token is rotated.
template <typename T, int capacity, typename Fill>
__device__ bool fill_angles(const Launch<T, capacity>& launch, const Token& token,
                            const Fill& fill) {
  constexpr bool has_turns = capacity > 1;  // tables replace them
  const TurnOf<T>* turns = core::through_data_cache(launch.turns);
  const int threads = static_cast<int>(blockDim.x), first = static_cast<int>(threadIdx.x);
  TurnOf<T> turn = {};
  if (has_turns && first < launch.pairs)
    turn = turns[first];  // issued before the position is known
  const bool rotated = visit_axes(launch, token, [&](int axis, const core::Position& position) {
    if (axis == 0) __syncthreads();  // until the previous token's angles have been read
    if (!has_turns && axis > 0) return;
    for (int pair = first; pair < launch.pairs; pair += threads) {
      if (has_turns && !turns_on(launch, axis, pair)) continue;
      fill(PairAt<T>{pair, position, !has_turns || pair == first ? turn : turns[pair]});
    }
  });
  __syncthreads();
  return rotated;
}

/// Sine and cosine of a pair, times the common amplitude.
template <typename T, int capacity>
__device__ void angle_of(const Launch<T, capacity>& launch, const PairAt<T>& at, Compute<T>* sine,
                         Compute<T>* cosine) {
  if (launch.frequencies.data != nullptr) {
    learned_sincos<T>(launch.frequencies, launch.tangent, at.position, at.pair, sine, cosine);
  } else if (launch.positions.floating) {
    const int64_t whole_turns = core::through_data_cache(launch.whole_turns)[at.pair];
    core::sincos_turn(core::phase(at.position, at.turn, whole_turns), sine, cosine);
  } else {
    core::sincos_turn(core::phase(at.position.whole, at.turn), sine, cosine);
  }
  const auto scale = static_cast<Compute<T>>(at.position.scale);  // NaN if it is not finite
  *sine *= launch.sine_amplitude * scale;
  *cosine *= launch.amplitude * scale;
}

/// Computes the exact angles of a token. Returns whether it is rotated.
template <typename T, int capacity>
__device__ bool begin_token(const Launch<T, capacity>& launch, const Token& token,
                            Compute<T>* sines, Compute<T>* cosines) {
  return fill_angles(launch, token, [&](const PairAt<T>& at) {
    angle_of(launch, at, sines + at.pair, cosines + at.pair);
  });
}

/// Computes the exact angles of the thread's own pairs, for whole positions and frequencies that
/// are not learned. Returns whether the token is rotated.
template <typename T, int size, bool interleaved, int capacity, Form form>
__device__ bool own_angles(const Launch<T, capacity>& launch, const Token& token,
                           const PackColumns<size, interleaved>& columns,
                           Angles<T, size, form>* angles) {
  const TurnOf<T>* turns = core::through_data_cache(launch.turns);
  TurnOf<T> own_turns[size];  // loaded before the position is known
#pragma unroll
  for (int i = 0; i < size; ++i) own_turns[i] = turns[columns.pair(i)];
  const bool rotated = visit_axes(launch, token, [&](int axis, const core::Position& position) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (turns_on(launch, axis, columns.pair(i)))
        own_turns[i] = core::phase(position.whole, own_turns[i]);
    }
  });
#pragma unroll
  for (int i = 0; i < size; ++i) {
    core::sincos_turn(own_turns[i], &angles->sine[i], &angles->cosine[i]);
    angles->sine[i] *= launch.sine_amplitude;
    angles->cosine[i] *= launch.amplitude;
  }
  return rotated;
}

/// The place of a frequency of a head, for a sum over axes also of an axis.
__device__ inline int64_t place_of(const Frequencies& frequencies, int axis, int head, int pair) {
  return axis * frequencies.axis_stride + head * frequencies.head_stride + pair;
}

/// Turns of the pairs that a thread has of its one head, where each head has frequencies of its
/// own: computed once for all tokens of a block, in shared memory that no other thread uses.
template <typename T, int size>
class HeadTurns {
 public:
  /// For a sum over axes, turns of each axis.
  template <bool interleaved, int capacity>
  __device__ HeadTurns(const Launch<T, capacity>& launch, int head,
                       const PackColumns<size, interleaved>& columns)
      : turns_(reinterpret_cast<LearnedTurns<T>*>(core::dynamic_shared_memory()) + threadIdx.x) {
    const Frequencies& frequencies = launch.frequencies;
    const int count = size * (frequencies.axis_stride != 0 ? launch.axes : 1);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int i = k % size;
      const double radians =
          read(frequencies, place_of(frequencies, k / size, head, columns.pair(i)));
      turns_[k * blockDim.x] = LearnedTurns<T>::of(radians);
      if (!core::has_turn(radians)) without_turn_ |= 1u << i;
    }
  }

  __device__ LearnedTurns<T> of(int axis, int i) const {
    return turns_[(axis * size + i) * blockDim.x];
  }

  /// A bit for each pair that has none.
  __device__ uint32_t without_turn() const { return without_turn_; }

 private:
  LearnedTurns<T>* turns_;
  uint32_t without_turn_ = 0;
};

/// Adds to a number that is kept in the place of turns, and returns it.
template <typename Turn>
__device__ double add_number(double number, Turn* place) {
  double total;
  memcpy(&total, place, sizeof total);
  total += number;
  memcpy(place, &total, sizeof total);
  return total;
}

/// The angles of the thread's pairs of a head that has frequencies of its own, as
/// learned_sincos() computes them, but for angles that may be sums over axes. Returns whether the
/// token is rotated.
template <typename T, int size, bool interleaved, int capacity, Form form>
__device__ bool head_angles(const Launch<T, capacity>& launch, const Token& token, int head,
                            const HeadTurns<T, size>& turns,
                            const PackColumns<size, interleaved>& columns,
                            Angles<T, size, form>* angles) {
  const Frequencies& frequencies = launch.frequencies;
  const bool mixed = frequencies.axis_stride != 0;
  TurnOf<T> total[size] = {};  // for a tangent, numbers: position * frequency
  uint32_t without_angle = turns.without_turn();
  const bool rotated = visit_axes(launch, token, [&](int axis, const core::Position& position) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      const int pair = columns.pair(i), own_axis = mixed ? axis : 0;
      if (!mixed && !turns_on(launch, axis, pair)) continue;
      const LearnedTurns<T> turn = turns.of(own_axis, i);
      if (launch.tangent) {
        const double radians = read(frequencies, place_of(frequencies, own_axis, head, pair));
        add_number(core::to_double(position) * radians, &total[i]);
      } else if (launch.positions.floating) {
        total[i] = sum(total[i], core::phase(position, turn.part, turn.whole));
        if (!(position.scale == 1)) without_angle |= 1u << i;
      } else {
        total[i] = sum(total[i], core::phase(position.whole, turn.part));
      }
    }
  });
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (launch.tangent) {
      angles->sine[i] = static_cast<Compute<T>>(add_number(0, &total[i]));
      angles->cosine[i] = 0;
    } else {
      core::sincos_turn(total[i], &angles->sine[i], &angles->cosine[i]);
    }
    angles->sine[i] *= launch.sine_amplitude;
    angles->cosine[i] *= launch.amplitude;
  }
  if (without_angle != 0 && !launch.tangent) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (without_angle >> i & 1) angles->sine[i] = angles->cosine[i] = Compute<T>(NAN);
    }
  }
  return rotated;
}

/// The angle of a pair from tables, which may be those of a head.
template <Form form = Form::table, typename T, int capacity>
__device__ PairAngle<Compute<T>> table_angle(const TableLaunch<T, capacity>& launch,
                                             const Token& token, int64_t head, int pair) {
  const int64_t first = token.batch * launch.table_stride[0] + token.seq * launch.table_stride[1] +
                        pair * launch.table_stride[2] + head * launch.table_head_stride;
  const core::Scalar scalar = form == Form::pairs ? core::Scalar::bfloat16 : launch.table_scalar;
  const auto value = [&](const void* table, int64_t index) {
    return core::read_floating<Compute<T>>(table, scalar, index);
  };
  const Compute<T> cosine = value(launch.cosines, first), sine = value(launch.sines, first);
  Compute<T> second_cosine = cosine, second_sine = sine;
  if (launch.table_second != 0) {
    second_cosine = value(launch.cosines, first + launch.table_second);
    second_sine = value(launch.sines, first + launch.table_second);
  }
  if (launch.reverse) return {{cosine, second_cosine}, {-second_sine, -sine}};
  return {{cosine, second_cosine}, {sine, second_sine}};
}

/// Whether the components of a pair are turned by different values.
template <typename C>
__device__ bool is_apart(const PairAngle<C>& angle) {
  const auto differ = [](C a, C b) { return !(a == b) || std::signbit(a) != std::signbit(b); };
  return differ(angle.cosine[0], angle.cosine[1]) || differ(angle.sine[0], angle.sine[1]);
}

/// The last token of a block whose tables turn the components of a pair by different values.
__device__ inline int64_t& apart_token() {
  __shared__ int64_t number;
  return number;
}

/// Reads a pair's angle from tables, and records whether its components have different values.
template <Form form = Form::table, typename T, int capacity>
__device__ void read_table(const TableLaunch<T, capacity>& launch, const Token& token, int pair,
                           Compute<T>* sine, Compute<T>* cosine) {
  const auto angle = table_angle<form>(launch, token, /*head=*/0, pair);
  *sine = angle.sine[0];
  *cosine = angle.cosine[0];
  if (is_apart(angle)) apart_token() = token.number;
}

/// The index of a head among those of its tensor; the query's heads come first.
template <typename T, int capacity>
__device__ int own_head(const Launch<T, capacity>& launch, int head) {
  return head < launch.query_heads ? head : head - launch.query_heads;
}

/// Whether all rows and their windows begin at multiples of 16 bytes and have such lengths, and
/// heads are less than 2^31 elements apart.
template <typename T>
bool can_use_vectors(const Arguments& arguments) {
  constexpr int64_t size = core::vector_width<T>;
  bool fits = arguments.pairs % size == 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    const HeadView& view = arguments.views[r];
    fits = fits && window_start(arguments, view) % size == 0 &&
           row_dim(arguments, view) % size == 0 &&
           reinterpret_cast<uintptr_t>(view.in) % vector_bytes == 0 &&
           reinterpret_cast<uintptr_t>(view.out) % vector_bytes == 0;
    for (int i = 0; i < 3; ++i)
      fits = fits && view.in_stride[i] % size == 0 && view.out_stride[i] % size == 0;
    fits = fits && std::abs(view.in_stride[2]) <= INT32_MAX &&
           std::abs(view.out_stride[2]) <= INT32_MAX;
  }
  return fits;
}

/// Returns launch(interleaved), a constant. Single elements are not: their kernels ask the launch.
template <int size, typename Call>
const char* with_pairing(const Arguments& arguments, const Call& call) {
  if constexpr (size > 1) {
    if (arguments.interleaved) return call(std::true_type());
  }
  return call(std::false_type());
}

template <typename T, int capacity, Form form = Form::exact>
LaunchOf<T, capacity, form> make_launch(const Arguments& arguments) {
  LaunchOf<T, capacity, form> launch = {};
  launch.views[0] = arguments.views[0];
  if (arguments.count > 1) launch.views[1] = arguments.views[1];
  launch.tokens = arguments.batch * arguments.seq;
  launch.seq = core::Divisor<int64_t>::of(std::max<int64_t>(1, arguments.seq));
  std::copy(arguments.position_stride, arguments.position_stride + 3, launch.position_stride);
  launch.offset = arguments.offset;
  launch.positions = arguments.positions;
  launch.documents = arguments.documents;
  launch.frequencies = arguments.frequencies;
  launch.error = arguments.error;
  launch.amplitude = static_cast<Compute<T>>(arguments.amplitude);
  launch.sine_amplitude = arguments.reverse ? -launch.amplitude : launch.amplitude;
  launch.query_heads = static_cast<int>(arguments.views[0].heads);
  launch.heads =
      launch.query_heads + (arguments.count > 1 ? static_cast<int>(arguments.views[1].heads) : 0);
  launch.pairs = static_cast<int>(arguments.pairs);
  for (int64_t r = 0; r < arguments.count; ++r) {
    const HeadView& view = arguments.views[r];
    launch.start[r] = static_cast<int>(window_start(arguments, view));
    launch.outside[r] = static_cast<int>(row_dim(arguments, view)) - 2 * launch.pairs;
  }
  launch.axes = static_cast<int>(arguments.axes);
  launch.tangent = arguments.tangent;
  launch.interleaved = arguments.interleaved;
  for (int64_t i = 0; i < (capacity > 1 ? arguments.pairs : 0); ++i) {
    if (arguments.axis_of_pair != nullptr) launch.axis_of_pair[i] = arguments.axis_of_pair[i];
    const bool in_memory = arguments.frequencies.data != nullptr || arguments.cosines != nullptr;
    if (in_memory) continue;  // read on the device
    launch.turns[i] = core::turns_of<T>(arguments)[i];
    if (arguments.positions.floating) {
      launch.whole_turns[i] = core::whole_turns(arguments.radians[i].high, launch.turns[i]);
    }
  }
  if constexpr (reads_tables<form>) {
    launch.cosines = arguments.cosines;
    launch.sines = arguments.sines;
    launch.table_scalar = arguments.table_scalar;
    std::copy(arguments.table_stride, arguments.table_stride + 3, launch.table_stride);
    launch.table_head_stride = arguments.table_head_stride;
    launch.table_second = arguments.table_second;
    launch.reverse = arguments.reverse;
    launch.product_rounding = arguments.product_rounding;
  }
  if constexpr (form == Form::decaying) {
    launch.decay_center = arguments.decay_center;
    launch.decay_sign = arguments.decay_sign;
    std::copy(arguments.decay, arguments.decay + arguments.pairs, launch.decay);
  }
  return launch;
}

/// The number of threads of the warps that have `threads`.
inline int whole_warps(int threads) {
  return static_cast<int>(core::divide_up(threads, core::warp_size)) * core::warp_size;
}

/// Divides the launch's heads among blocks of whole warps, whose threads own `size` pairs each if
/// their number for a head is not given; returns both numbers.
template <typename T, int capacity>
cudaLaunchConfig_t share_heads(Launch<T, capacity>* launch, int size, core::CudaStream stream,
                               int per_head = 0) {
  if (per_head == 0) per_head = std::max(1, launch->pairs / size);
  launch->threads_per_head = core::Divisor<int>::of(per_head);
  for (int r = 0; r < 2; ++r) {
    launch->packs_outside[r] = core::Divisor<int>::of(std::max(1, launch->outside[r] / size));
  }
  // With few tokens, several blocks share a token's heads, so that every multiprocessor has two
  // blocks.
  const int64_t wanted = 2 * static_cast<int64_t>(core::multiprocessors());
  const int64_t groups = core::divide_up(launch->heads, heads_in_flight);
  const int64_t splits = std::clamp<int64_t>(wanted / launch->tokens, 1, groups);
  launch->heads_of_block = static_cast<int>(core::divide_up(launch->heads, splits));
  // Whole warps, if a thread then still has more than one head.
  const int share = launch->tokens > 4 * wanted ? heads_of_thread : heads_in_flight;
  const int64_t passes = core::divide_up(launch->heads_of_block, share);
  const int64_t in_warps =
      core::divide_up(passes * per_head, core::warp_size) * core::warp_size / per_head;
  const int64_t at_once = std::min<int64_t>(in_warps, core::divide_up(launch->heads_of_block, 2));
  launch->heads_per_pass =
      static_cast<int>(std::clamp<int64_t>(at_once, 1, std::max(1, threads_wanted / per_head)));
  // A block of few heads still computes all angles.
  const int threads = std::max(whole_warps(per_head * launch->heads_per_pass),
                               std::min(whole_warps(launch->pairs), threads_wanted));
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>(launch->tokens, INT32_MAX)),
           static_cast<unsigned>(core::divide_up(launch->heads, launch->heads_of_block)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  if (launch->tokens < wanted) core::launch_early(&config);
  return config;
}

/// Gives every thread the pairs of one head, in blocks of at most 128 threads.
template <typename T, int capacity>
cudaLaunchConfig_t spread_heads(Launch<T, capacity>* launch, int size, core::CudaStream stream,
                                int max_block_threads = 128) {
  cudaLaunchConfig_t config = share_heads(launch, size, stream);
  const int per_head = launch->threads_per_head.value;
  launch->heads_per_pass = std::clamp(max_block_threads / per_head, 1, launch->heads);
  launch->heads_of_block = launch->heads_per_pass;
  config.gridDim.y = static_cast<unsigned>(core::divide_up(launch->heads, launch->heads_of_block));
  config.blockDim = dim3(static_cast<unsigned>(per_head * launch->heads_per_pass));
  return config;
}

/// The same for heads with frequencies of their own: few blocks, whose tokens share HeadTurns.
template <typename T, int capacity>
cudaLaunchConfig_t spread_own_heads(Launch<T, capacity>* launch, int size,
                                    core::CudaStream stream) {
  const int axes = launch->frequencies.axis_stride != 0 ? launch->axes : 1;
  cudaLaunchConfig_t config = spread_heads(launch, size, stream, 128 / axes);
  config.dynamicSmemBytes =
      static_cast<size_t>(axes) * size * config.blockDim.x * sizeof(LearnedTurns<T>);
  const int64_t wanted = core::divide_up(8 * core::multiprocessors(), config.gridDim.y);
  config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(config.gridDim.x, wanted));
  return config;
}

/// The angles of a thread's pairs.
template <typename T, int size, bool interleaved>
__device__ Angles<T, size> angles_of(const PackColumns<size, interleaved>& columns,
                                     const Compute<T>* sines, const Compute<T>* cosines) {
  Angles<T, size> angles;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    angles.sine[i] = sines[columns.pair(i)];
    angles.cosine[i] = cosines[columns.pair(i)];
  }
  return angles;
}

}  // namespace
}  // namespace posembed::rotary

// posembed's kernels for C and whatever calls C: rotary embeddings (RoPE), sinusoids, ALiBi and
// rows of token tables, on the CPU and on CUDA, without torch. Results have the bits of posembed's
// operators.
//
// A call takes one struct: set it to zeros, then `size` to its sizeof, then what differs from the
// defaults. Everything is checked before anything is written. Functions may be called from any
// thread. docs/start/without_torch.md has a program.
#ifndef POSEMBED_KERNELS_H_
#define POSEMBED_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#define POSEMBED_C_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/// Rises when a struct or a function changes its meaning. Structs grow at their ends without it.
#define POSEMBED_ABI_VERSION 1
POSEMBED_C_API int32_t posembed_abi_version(void);

typedef enum {
  POSEMBED_OK = 0,
  POSEMBED_VALUE_ERROR = 1,  ///< shapes, strides, options
  POSEMBED_TYPE_ERROR = 2,   ///< dtypes
  POSEMBED_INDEX_ERROR = 3,  ///< ids and positions
  /// Memory is short, the processor is not one of the build's, or a CUDA call failed.
  POSEMBED_RUNTIME_ERROR = 4,
} posembed_status;

/// What was wrong with the last call of this thread that failed: the argument, what was expected,
/// and what came. Valid until the thread's next failure.
POSEMBED_C_API const char* posembed_last_error(void);

/// Of values on CUDA, the host sees none before a call: a kernel that finds an id or a position
/// outside writes zeros, or leaves the row as it is, and records the first. This returns
/// POSEMBED_INDEX_ERROR for a recorded one and forgets it; the next call on CUDA does so, too, and
/// launches nothing. `wait` other than 0 waits for the devices that calls have used. The record is
/// shared with posembed's operators.
POSEMBED_C_API posembed_status posembed_check_errors(int32_t wait);

// ----------------------------------------------------------------------------------------- tensors

#ifdef DLPACK_DLPACK_H_
typedef DLDataType posembed_dtype;
typedef DLTensor posembed_tensor;
#else
typedef struct {
  uint8_t code;  ///< 0: int, 1: uint, 2: float, 4: bfloat, 6: bool
  uint8_t bits;
  uint16_t lanes;  ///< 1
} posembed_dtype;

/// DLPack's DLTensor. Include dlpack.h first to make it that type; otherwise a cast does. All
/// tensors of a call are on one device, on which it runs.
typedef struct {
  void* data;
  struct {
    int32_t device_type;  ///< 1 (CPU), 3 (pinned memory of CUDA's host), or 2 (CUDA)
    int32_t device_id;
  } device;
  int32_t ndim;
  posembed_dtype dtype;
  int64_t* shape;
  int64_t* strides;  ///< in elements, none negative; NULL: contiguous
  uint64_t byte_offset;
} posembed_tensor;
#endif

/// Threads of the caller for calls on the CPU, and the stream for calls on CUDA, which return when
/// the kernel is launched. The current device is afterwards what it was.
typedef struct {
  size_t size;
  /// Calls task(work, begin, end) for parts that cover [0, count) once, each of `grain` items or
  /// more where that is possible, and returns when all are done. NULL: the calling thread does all.
  void (*parallel_for)(void* pool, int64_t count, int64_t grain,
                       void (*task)(void* work, int64_t begin, int64_t end), void* work);
  void* pool;    ///< its first argument
  void* stream;  ///< cudaStream_t; NULL: the default stream
} posembed_threads;

// ------------------------------------------------------------------------------------------ rotary

typedef enum {
  POSEMBED_NO_SCALING = 0,
  POSEMBED_LINEAR = 1,  ///< factor
  POSEMBED_NTK = 2,     ///< factor
  POSEMBED_YARN = 3,    ///< factor, original_max_positions, low and high (beta_slow and beta_fast)
  POSEMBED_LLAMA3 = 4,  ///< factor, original_max_positions, low and high (low_freq_factor, …)
} posembed_scaling;

/// The series of a model's frequencies, as RotarySpec has them.
typedef struct {
  size_t size;
  int64_t rotary_dim;
  double base;  ///< 0: 10000
  posembed_scaling scaling;
  double factor;
  int64_t original_max_positions;
  double low, high;              ///< 0 and 0: those of YaRN (1, 32) and of Llama 3.1 (1, 4)
  int32_t fractional;            ///< YaRN: the blended pairs are not rounded to whole ones
  const uint8_t* restarts_axis;  ///< [rotary_dim / 2]: pairs' axes, each with its own series
} posembed_rotary_series;

/// Writes [rotary_dim / 2] radians per position, as sums of two doubles (positions multiply the
/// error of one), and the factor of rotated pairs, which may be NULL.
POSEMBED_C_API posembed_status posembed_rotary_frequencies(const posembed_rotary_series* series,
                                                           double* frequencies,
                                                           double* frequencies_low,
                                                           double* attention_factor);

typedef enum {
  POSEMBED_BSHD = 0,  ///< [batch, seq, heads, head_dim]
  POSEMBED_BHSD = 1,  ///< [batch, heads, seq, head_dim]
  POSEMBED_SBHD = 2,  ///< [seq, batch, heads, head_dim]
  POSEMBED_THD = 3,   ///< [tokens, heads, head_dim]
} posembed_layout;

/// A rotation of query, or of query and key, by position times frequency, or by given cosines and
/// sines. The last dimension of rotated tensors and of results is contiguous.
typedef struct {
  size_t size;
  const posembed_tensor *query, *key;  ///< float32, float64, bfloat16, float16; key may be NULL
  const posembed_tensor *query_out, *key_out;  ///< the inputs themselves rotate in place
  posembed_layout layout;
  int64_t head_dim;         ///< 0: query's. Tensors may also hold the rotated window alone
  int64_t rotary_dim;       ///< 0: head_dim
  int64_t rotary_start;     ///< the first rotated component
  int32_t interleaved;      ///< pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  int32_t reverse;          ///< the model turns by minus the angle
  int32_t inverse;          ///< undoes the rotation
  int32_t transpose;        ///< the backward pass: query and key are gradients of the results
  double attention_factor;  ///< multiplies rotated pairs; 0: 1
  /// int32, int64, float32 or float64: [seq], [batch or 1, seq], or these after a dimension of
  /// axes. -1 leaves a token as it is. NULL: offset, offset + 1, …
  const posembed_tensor* positions;
  int64_t offset;
  const posembed_tensor* cu_seqlens;  ///< [documents + 1]: positions restart in each; may be NULL
  const double *frequencies, *frequencies_low;  ///< [rotary_dim / 2]; low: NULL for zeros
  const uint8_t* axis_of_pair;  ///< [rotary_dim / 2]: the axis whose position turns it; NULL: one
  int32_t within_axes;          ///< the pairs of an axis are halves of its own components
  const double* decay;          ///< xPos: [rotary_dim / 2], log2 of a query's factor per position
  double decay_center;
  /// Instead of `frequencies`, float32 or float64: [rotary_dim / 2], [heads, rotary_dim / 2] or
  /// [axes, heads, rotary_dim / 2], where angles add up over axes.
  const posembed_tensor* learned_frequencies;
  /// Instead of both and of positions: [seq, width], [batch or 1, seq, width] or [batch or 1, seq,
  /// heads or 1, width], not wider than query's dtype unless `wide_products`.
  const posembed_tensor *cosines, *sines;
  int32_t half_width;     ///< width is rotary_dim / 2: components of a pair share a value
  int32_t wide_products;  ///< products are not rounded before they are added
} posembed_rotation;

POSEMBED_C_API posembed_status posembed_rotary(const posembed_rotation* rotation,
                                               const posembed_threads* threads);

// -------------------------------------------------------------------------------------- sinusoidal

typedef enum {
  POSEMBED_VASWANI = 0,        ///< interleaved
  POSEMBED_MARIAN = 1,         ///< in halves
  POSEMBED_TENSOR2TENSOR = 2,  ///< in halves, to 1 / base inclusive
} posembed_sinusoidal_preset;

/// Writes [(embedding_dim + 1) / 2] radians per position ([embedding_dim / 2] for tensor2tensor).
/// `shift`: the exponent is -i / (embedding_dim / 2 - shift); NULL: the preset's.
POSEMBED_C_API posembed_status posembed_sinusoidal_frequencies(posembed_sinusoidal_preset preset,
                                                               int64_t embedding_dim, double base,
                                                               const double* shift,
                                                               double* frequencies,
                                                               double* frequencies_low);

/// out = x + encodings, or the encodings alone.
typedef struct {
  size_t size;
  const posembed_tensor* x;    ///< [batch, seq, embedding_dim] or [seq, embedding_dim]; or NULL
  const posembed_tensor* out;  ///< of that shape
  const posembed_tensor* positions;  ///< [seq], [batch or 1, seq]; NULL: offset, offset + 1, …
  int64_t offset;
  posembed_sinusoidal_preset preset;
  const double *frequencies, *frequencies_low;
  int32_t cos_first;
  double scale;            ///< multiplies encodings; 0: 1
  int64_t position_scale;  ///< multiplies positions; 0: 1
  int64_t first;  ///< index of position 0 in the series; above 0, position -1 encodes zeros
  int64_t order;  ///< of the derivative by the position
} posembed_sinusoid;

POSEMBED_C_API posembed_status posembed_sinusoidal(const posembed_sinusoid* sinusoid,
                                                   const posembed_threads* threads);

// ------------------------------------------------------------------------------------------- alibi

/// Writes the slopes [heads] of a model; `geometric`: one series for every number of heads.
POSEMBED_C_API posembed_status posembed_alibi_slopes(int64_t heads, double max_bias,
                                                     int32_t geometric, float* slopes);

/// out = -slope * |query position - key position|
typedef struct {
  size_t size;
  const posembed_tensor* slopes;  ///< [heads], [2, heads] (before, after) or [batch, sides, heads]
  const posembed_tensor* out;     ///< [heads, queries, keys] or [batch, heads, queries, keys]
  const int64_t* query_offset;    ///< of the first query; NULL: keys - queries
  int32_t not_causal;             ///< keys after the query are seen
  int32_t no_mask;                ///< hidden keys get 0 instead of -infinity
  const posembed_tensor *query_positions,
      *key_positions;                     ///< [queries], [batch or 1, queries]; NULL
  const posembed_tensor* attention_mask;  ///< bool or uint8 [keys], [batch or 1, keys]; 0: hidden
} posembed_alibi;

POSEMBED_C_API posembed_status posembed_alibi_bias(const posembed_alibi* alibi,
                                                   const posembed_threads* threads);

// ----------------------------------------------------------------------------------------- token

/// out = scale * weight[ids]
typedef struct {
  size_t size;
  const posembed_tensor* weight;  ///< [rows, embedding_dim]
  const posembed_tensor* ids;     ///< int32 or int64, contiguous
  const posembed_tensor* out;     ///< [..., embedding_dim], contiguous
  double scale;                   ///< 0: 1
} posembed_gather;

POSEMBED_C_API posembed_status posembed_embedding(const posembed_gather* gather,
                                                  const posembed_threads* threads);

#ifdef __cplusplus
}
#endif

#endif  // POSEMBED_KERNELS_H_

// Sums a token's row in a buffer in the L1 cache and applies norm and dropout there, so that each
// table row is read once and the output is written once. Sums have the same bits on every
// instruction set.
#include "core/block32.h"
#include "core/stream.h"
#include "input/add_range.h"
#include "input/backward_part.h"
#include "input/drop_factors.h"
#include "input/kernel.h"
#include "input/norm_range.h"
#include "input/token_rows.h"

namespace posembed::input::POSEMBED_ISA {
namespace {

using core::for_blocks;
using core::load_block;
using core::load_values;
using core::store_block;

template <typename T>
bool is_streamed(const Arguments& a, const void* out) {
  return core::streams_rows<T>(out, a.batch * a.seq, a.embedding_dim);
}

/// Whether plain sums have separate loops: only where their speed justifies their code size.
template <typename T>
constexpr bool has_plain = core::wide && !std::is_same_v<T, double>;

// ---- forward ----

template <typename T, bool plain, bool streaming>
void forward_tokens(const ForwardArguments& f, int64_t begin, int64_t end) {
  if (f.input.norm != Norm::none) {
    NormRange<T, plain, streaming>(f, begin, end).run();
  } else if (f.input.seed != nullptr) {
    drop_tokens<T, streaming>(f, begin, end);
  } else {
    add_tokens<T, plain, streaming>(f, begin, end);
  }
  if (streaming) core::stream_fence();
}

template <typename T, bool plain>
void forward_range(const ForwardArguments& f, int64_t begin, int64_t end) {
  if (is_streamed<T>(f.input, f.out)) {
    forward_tokens<T, plain, true>(f, begin, end);
  } else {
    forward_tokens<T, plain, false>(f, begin, end);
  }
}

// ---- backward ----

template <typename T, bool plain>
void backward_parts(const BackwardArguments& b, int64_t begin, int64_t end) {
  const bool streamed =
      is_streamed<T>(b.input, b.sum_gradient) && core::is_aligned_to_vector(b.position_gradient);
  for (int64_t number = begin; number < end; ++number) {
    if (streamed) {
      BackwardPart<T, plain, true>(b, number).run();
    } else {
      BackwardPart<T, plain, false>(b, number).run();
    }
  }
  if (streamed) core::stream_fence();
}

template <typename T>
void add_sums(const BackwardArguments& b, int64_t begin, int64_t end) {
  const int64_t columns = partial_columns(b.input.embedding_dim), stride = sums_of(b) * columns;
  for (int64_t number = begin; number < end; ++number) {
    T* out = sum_target<T>(b, number);
    if (out == nullptr) continue;
    const auto* from = static_cast<const Compute<T>*>(b.partial) + number * columns;
    for_blocks(b.input.embedding_dim, [&](int64_t i, auto count) {
      Block32<T> total{};
      for (int64_t part = 0; part < b.parts; ++part) {
        total = total + load_values<T>(from + part * stride + i);
      }
      store_block(total, out + i, count);
    });
  }
}

// ---- dropout alone ----

// Long inputs are processed in pieces of this size, as rows are.
constexpr int64_t piece = 1024;

template <typename T>
void drop_range(const DropoutArguments& d, int64_t begin, int64_t end) {
  DropFactors<T> factors(d.probability, d.seed, d.first, piece);
  for (int64_t first = begin; first < end; first += piece) {
    const int64_t columns = end - first < piece ? end - first : piece;
    const T* x = static_cast<const T*>(d.x) + first;
    const Compute<T>* factor = factors.at(first, columns);
    T* out = static_cast<T*>(d.out) + first;
    for_blocks(columns, [&](int64_t i, auto count) {
      store_block(load_block(x + i, count) * load_values<T>(factor + i), out + i, count);
    });
  }
}

}  // namespace

void forward(const ForwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        is_plain(arguments.input) ? forward_range<T, has_plain<T>> : forward_range<T, false>;
    run(arguments, begin, end);
  });
}

void backward(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        is_plain(arguments.input) ? backward_parts<T, has_plain<T>> : backward_parts<T, false>;
    run(arguments, begin, end);
  });
}

void add_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    add_sums<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void drop(const DropoutArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    drop_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::input::POSEMBED_ISA

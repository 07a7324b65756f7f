// Gather: one row copy per id, the rows of later ids prefetched. Backward: a radix sort of the ids
// on as many bits as the table needs, then one pass over the gradient rows of each id.
#include <cstring>

#include "token/kernel.h"

namespace posembed::token::POSEMBED_ISA {
namespace {

using core::Compute;
using core::load;
using core::store;

// Far enough ahead for a row to arrive from memory while the rows before it are copied.
constexpr int64_t prefetch_distance = 4;
constexpr int64_t cache_line = 64;

template <typename T>
const T* row_of(const GatherArguments& a, int64_t place) {
  return static_cast<const T*>(a.weight) + (read(a.ids, place) + a.first_row) * a.weight_stride;
}

template <typename T>
void prefetch_row(const GatherArguments& a, int64_t place) {
  const char* row = reinterpret_cast<const char*>(row_of<T>(a, place));
  const int64_t bytes = a.embedding_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < bytes; at += cache_line) __builtin_prefetch(row + at);
}

template <typename T>
void scale_row(const T* POSEMBED_RESTRICT row, Compute<T> scale, int64_t dim,
               T* POSEMBED_RESTRICT out) {
  for (int64_t i = 0; i < dim; ++i) store(load(row[i]) * scale, out + i);
}

template <typename T>
void gather_rows(const GatherArguments& a, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(a.out) + begin * a.embedding_dim;
  const auto scale = static_cast<Compute<T>>(a.scale);
  for (int64_t place = begin; place < end; ++place, out += a.embedding_dim) {
    if (place + prefetch_distance < end) prefetch_row<T>(a, place + prefetch_distance);
    if (scale == 1) {
      std::memcpy(out, row_of<T>(a, place), static_cast<size_t>(a.embedding_dim) * sizeof(T));
    } else {
      scale_row(row_of<T>(a, place), scale, a.embedding_dim, out);
    }
  }
}

constexpr int digit_bits = 11;
constexpr uint64_t digits = uint64_t{1} << digit_bits;

// One stable pass of a least-significant-digit radix sort.
void sort_digit(const uint64_t* from, int64_t count, int shift, uint64_t* to) {
  int64_t position[digits] = {};
  for (int64_t i = 0; i < count; ++i) ++position[(from[i] >> shift) & (digits - 1)];
  int64_t sum = 0;
  for (int64_t& entry : position) {
    const int64_t size = entry;
    entry = sum;
    sum += size;
  }
  for (int64_t i = 0; i < count; ++i) to[position[(from[i] >> shift) & (digits - 1)]++] = from[i];
}

int64_t pack(const GroupArguments& a, uint64_t* entries) {
  int64_t kept = 0;
  for (int64_t place = 0; place < a.count; ++place) {
    const int64_t id = read(a.ids, place);
    if (id != a.padding_idx) {
      entries[kept++] = static_cast<uint64_t>(id) << 32 | static_cast<uint64_t>(place);
    }
  }
  return kept;
}

int passes_for(int64_t num_embeddings) {
  int passes = 0;
  while (passes * digit_bits < 32 && (num_embeddings - 1) >> (passes * digit_bits) > 0) ++passes;
  return passes;
}

void mark_groups(const GroupArguments& a, int64_t kept) {
  int64_t groups = 0;
  for (int64_t i = 0; i < kept; ++i) {
    if (i == 0 || a.entries[i] >> 32 != a.entries[i - 1] >> 32) a.starts[groups++] = i;
  }
  a.starts[groups] = kept;
  *a.groups = groups;
}

// Columns are summed in blocks that stay in registers.
constexpr int64_t block = 32;

template <typename T>
struct Group {
  const T* gradient;
  int64_t dim;
  const uint64_t* begin;
  const uint64_t* end;
  Compute<T> factor;
};

// `width` is `block` everywhere but at a row's end: a constant there lets the compiler unroll.
template <typename T, typename Width>
void sum_columns(const Group<T>& group, int64_t column, Width width, T* out) {
  Compute<T> total[block] = {};
  for (const uint64_t* entry = group.begin; entry < group.end;) {
    const uint64_t* stop = group.end - entry > span ? entry + span : group.end;
    Compute<T> part[block] = {};
    for (; entry < stop; ++entry) {
      const T* row =
          group.gradient + static_cast<int64_t>(*entry & 0xffffffffu) * group.dim + column;
      for (int64_t i = 0; i < width; ++i) part[i] += load(row[i]);
    }
    for (int64_t i = 0; i < width; ++i) total[i] += part[i];
  }
  for (int64_t i = 0; i < width; ++i) store(total[i] * group.factor, out + column + i);
}

template <typename T>
void sum_group(const Group<T>& group, T* out) {
  int64_t column = 0;
  for (; column + block <= group.dim; column += block) {
    sum_columns(group, column, std::integral_constant<int64_t, block>{}, out);
  }
  if (column < group.dim) sum_columns(group, column, group.dim - column, out);
}

template <typename T>
void sum_range(const SumArguments& a, int64_t begin, int64_t end) {
  for (int64_t number = begin; number < end; ++number) {
    const uint64_t* first = a.entries + a.starts[number];
    const uint64_t* last = a.entries + a.starts[number + 1];
    const double count = a.scale_grad_by_freq ? static_cast<double>(last - first) : 1.0;
    const int64_t row = a.dense ? static_cast<int64_t>(*first >> 32) : number;
    const Group<T> group{static_cast<const T*>(a.gradient), a.embedding_dim, first, last,
                         static_cast<Compute<T>>(a.scale / count)};
    sum_group(group, static_cast<T*>(a.out) + row * a.embedding_dim);
  }
}

}  // namespace

void gather(const GatherArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    gather_rows<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void group(const GroupArguments& arguments) {
  // An even number of passes ends in `entries`; an odd one has to start from `scratch`.
  const int passes = passes_for(arguments.num_embeddings);
  uint64_t* from = passes % 2 == 0 ? arguments.entries : arguments.scratch;
  uint64_t* to = passes % 2 == 0 ? arguments.scratch : arguments.entries;
  const int64_t kept = pack(arguments, from);
  for (int pass = 0; pass < passes; ++pass) {
    sort_digit(from, kept, 32 + pass * digit_bits, to);
    uint64_t* sorted = to;
    to = from;
    from = sorted;
  }
  mark_groups(arguments, kept);
}

void sum_groups(const SumArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    sum_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::token::POSEMBED_ISA

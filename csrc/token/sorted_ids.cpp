#include "token/sorted_ids.h"

#include <ATen/ops/empty.h>

#include "dispatcher/checks.h"
#include "dispatcher/parallel.h"

namespace posembed::token {

SortedIds sort_ids(const at::Tensor& ids, int64_t num_embeddings, int64_t padding_idx,
                   int64_t first_row) {
  const int64_t count = ids.numel();
  SortedIds sorted;
  sorted.words = at::empty({2 * count}, at::kLong);
  sorted.counts = at::empty({count + 1}, at::kLong);
  sorted.entries = reinterpret_cast<uint64_t*>(sorted.words.mutable_data_ptr<int64_t>());
  sorted.starts = sorted.counts.mutable_data_ptr<int64_t>();
  GroupArguments arguments;
  arguments.ids = dispatcher::index_view(ids);
  arguments.count = count;
  arguments.num_embeddings = num_embeddings;
  arguments.first_row = first_row;
  arguments.padding_idx = padding_idx;
  arguments.entries = sorted.entries;
  arguments.scratch = sorted.entries + count;
  arguments.starts = sorted.starts;
  arguments.groups = &sorted.groups;
  group_cpu(arguments);
  return sorted;
}

/// Divides entries, not groups, among threads, because some ids are far more frequent than others.
void sum_groups(const SumArguments& arguments, const SortedIds& sorted) {
  const int64_t row_bytes = arguments.embedding_dim * core::size_of(arguments.scalar);
  dispatcher::parallel_for(sorted.kept(), 2 * row_bytes, [&](int64_t begin, int64_t end) {
    sum_groups_cpu(arguments, sorted.group_at(begin), sorted.group_at(end));
  });
}

}  // namespace posembed::token

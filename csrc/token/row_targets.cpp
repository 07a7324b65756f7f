#include "token/row_targets.h"

#include <ATen/ops/empty.h>

#include "core/stream_bytes.h"
#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"

namespace posembed::token {
namespace {

int64_t count_single(const SortedIds& sorted) {
  int64_t count = 0;
  for (int64_t group = 0; group < sorted.groups; ++group) {
    count += sorted.starts[group + 1] - sorted.starts[group] == 1;
  }
  return count;
}

/// Rows of a contiguous tensor.
struct TensorRows {
  char* data;
  int64_t bytes;

  explicit TensorRows(const at::Tensor& tensor)
      : data(static_cast<char*>(tensor.mutable_data_ptr())),
        bytes(tensor.size(1) * tensor.element_size()) {}
  void* row(int64_t number) const { return data + number * bytes; }
};

/// Assigns a target to each token, and drops the groups of one entry from `sums`.
void share_rows(RowTargets& of) {
  const TensorRows rows(of.rows), repeated(of.repeated);
  auto& [words, counts, entries, starts, groups] = of.sums;
  auto* id = of.row_ids.mutable_data_ptr<int64_t>();
  int64_t sums = 0, next = 0;
  for (int64_t group = 0, begin = 0; group < groups; ++group) {
    const int64_t end = starts[group + 1];
    id[group] = static_cast<int64_t>(entries[begin] >> 32);
    if (end - begin == 1) {
      of.targets[static_cast<uint32_t>(entries[begin])] = rows.row(group);
    } else {
      starts[sums++] = next;
      for (int64_t entry = begin; entry < end; ++entry, ++next) {
        of.targets[static_cast<uint32_t>(entries[entry])] = repeated.row(next);
        entries[next] = static_cast<uint64_t>(group) << 32 | static_cast<uint64_t>(next);
      }
    }
    begin = end;
  }
  starts[sums] = next;
  groups = sums;
}

}  // namespace

RowTargets row_targets(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx) {
  RowTargets of;
  of.sums = sort_ids(ids, table.size(0), padding_idx);
  const int64_t dim = table.size(1), touched = of.sums.groups;
  of.row_ids = at::empty({touched}, at::kLong);
  of.rows = dispatcher::empty({touched, dim}, table.options());
  of.repeated = dispatcher::empty({of.sums.kept() - count_single(of.sums), dim}, table.options());
  of.targets.resize(static_cast<size_t>(ids.numel()));
  share_rows(of);
  return of;
}

void sum_repeated(const RowTargets& of) {
  SumArguments arguments;
  arguments.gradient = of.repeated.const_data_ptr();
  arguments.out = of.rows.mutable_data_ptr();
  arguments.streaming = static_cast<int64_t>(of.rows.nbytes()) >= core::stream_bytes;
  arguments.scalar = dispatcher::scalar_of(of.rows);
  arguments.embedding_dim = of.rows.size(1);
  arguments.entries = of.sums.entries;
  arguments.starts = of.sums.starts;
  sum_groups(arguments, of.sums);
}

}  // namespace posembed::token

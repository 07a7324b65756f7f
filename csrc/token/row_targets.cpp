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
void share_rows(RowTargets& destinations) {
  const TensorRows rows(destinations.rows), repeated(destinations.repeated);
  auto& [words, counts, entries, starts, groups] = destinations.sums;
  auto* id = destinations.row_ids.mutable_data_ptr<int64_t>();
  int64_t sums = 0, next = 0;
  for (int64_t group = 0, begin = 0; group < groups; ++group) {
    const int64_t end = starts[group + 1];
    id[group] = static_cast<int64_t>(entries[begin] >> 32);
    if (end - begin == 1) {
      destinations.targets[static_cast<uint32_t>(entries[begin])] = rows.row(group);
    } else {
      starts[sums++] = next;
      for (int64_t entry = begin; entry < end; ++entry, ++next) {
        destinations.targets[static_cast<uint32_t>(entries[entry])] = repeated.row(next);
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
  RowTargets result;
  result.sums = sort_ids(ids, table.size(0), padding_idx);
  const int64_t dim = table.size(1), touched = result.sums.groups;
  result.row_ids = at::empty({touched}, at::kLong);
  result.rows = dispatcher::empty({touched, dim}, table.options());
  result.repeated =
      dispatcher::empty({result.sums.kept() - count_single(result.sums), dim}, table.options());
  result.targets.resize(static_cast<size_t>(ids.numel()));
  share_rows(result);
  return result;
}

void sum_repeated(const RowTargets& destinations) {
  SumArguments arguments;
  arguments.gradient = destinations.repeated.const_data_ptr();
  arguments.out = destinations.rows.mutable_data_ptr();
  arguments.streaming = static_cast<int64_t>(destinations.rows.nbytes()) >= core::stream_bytes;
  arguments.scalar = dispatcher::scalar_of(destinations.rows);
  arguments.embedding_dim = destinations.rows.size(1);
  arguments.entries = destinations.sums.entries;
  arguments.starts = destinations.sums.starts;
  sum_groups(arguments, destinations.sums);
}

}  // namespace posembed::token

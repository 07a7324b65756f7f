#include "token/stored_rows.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "dispatcher/tensors.h"

namespace posembed::token {

StoredRows::StoredRows(const std::vector<pretrained::Place>& parts) : parts_(parts) {
  for (const pretrained::Place& part : parts_) {
    TORCH_CHECK_VALUE(part.columns == columns() && part.dtype == dtype(),
                      "tensors: expected parts of one width and dtype, got ", part.columns, " of ",
                      dispatcher::dtype_name(part.dtype), " after ", columns(), " of ",
                      dispatcher::dtype_name(dtype()));
    part.file->read_at_random();
    rows_ += part.rows;
    ends_.push_back(rows_);
  }
  row_bytes_ = columns() * static_cast<int64_t>(c10::elementSize(dtype()));
}

StoredRows StoredRows::split(int64_t parts) const {
  std::vector<pretrained::Place> shorter = parts_;
  for (pretrained::Place& part : shorter) {
    part.rows *= parts;
    part.columns /= parts;
  }
  return StoredRows(shorter);
}

StoredRows::Row StoredRows::find(int64_t id) const {
  const size_t at =
      ends_.size() == 1 ? 0 : std::upper_bound(ends_.begin(), ends_.end(), id) - ends_.begin();
  const pretrained::Place& part = parts_[at];
  return {part.file.get(), part.begin + (id - ends_[at] + part.rows) * row_bytes_};
}

int64_t StoredRows::read(core::IndexView ids, int64_t begin, int64_t end, char* out) const {
  std::vector<int64_t> missed;
  for (int64_t i = begin; i < end; ++i) {
    const Row row = find(core::read(ids, i));
    if (!row.file->read_cached(row.begin, row_bytes_, out + i * row_bytes_)) missed.push_back(i);
  }
  // All are asked for before the first is waited for, so that the disk works on many at once.
  for (const int64_t i : missed) {
    const Row row = find(core::read(ids, i));
    row.file->prefetch(row.begin, row_bytes_);
  }
  for (const int64_t i : missed) {
    const Row row = find(core::read(ids, i));
    pretrained::with_path(row.file->path(),
                          [&] { row.file->read(row.begin, row_bytes_, out + i * row_bytes_); });
  }
  return static_cast<int64_t>(missed.size());
}

void StoredRows::read_all(char* out) const {
  for (const pretrained::Place& part : parts_) {
    const int64_t bytes = part.rows * row_bytes_;
    pretrained::with_path(part.file->path(), [&] { part.file->read(part.begin, bytes, out); });
    out += bytes;
  }
}

void StoredRows::prefetch(core::IndexView ids, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    const Row row = find(core::read(ids, i));
    row.file->prefetch(row.begin, row_bytes_);
  }
}

}  // namespace posembed::token

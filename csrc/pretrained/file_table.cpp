// Tables in files, whose rows are read as they are needed, and the threads that fetch rows ahead.
#include "posembed/file_table.h"

#include <c10/core/ScalarType.h>
#include <semaphore.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/index.h"
#include "dispatcher/fork.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "posembed/memory.h"
#include "pretrained/source.h"
#include "token/token_operator.h"

namespace posembed::token {

namespace {

// -------------------------------------------------------------------------------------- background

constexpr int most_workers = 2;
constexpr size_t most_waiting = 1024;

/// The threads of one process. Never destroyed, as they outlive main().
class Pool {
 public:
  Pool() {
    sem_init(&waiting_, /*pshared=*/0, 0);
    try {
      for (; workers < most_workers; ++workers) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {  // fewer threads, which keep this object
    }
  }

  void add(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (tasks_.size() == most_waiting) return;
      tasks_.push_back(std::move(task));
    }
    sem_post(&waiting_);
  }

  const pid_t process = getpid();
  int workers = 0;

 private:
  [[noreturn]] void work() {
    for (;;) {
      std::function<void()> task;
      {
        while (sem_wait(&waiting_) != 0) {  // a signal
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  // Not std::condition_variable, whose wait() has a newer symbol than wheels may need.
  sem_t waiting_;  // counts the tasks
  std::deque<std::function<void()>> tasks_;
};

std::atomic<Pool*> current{nullptr};

}  // namespace

/// Runs `task` later on a thread of this process, or never: if too many wait, or the process ends.
/// Runs it at once where the system gives no thread. It must not throw. Works in a forked child,
/// which has threads of its own.
void run_in_background(std::function<void()> task) {
  Pool* pool = current.load(std::memory_order_acquire);
  if (pool == nullptr || pool->process != getpid()) {
    // After a fork the parent's threads do not exist, and its lock may be closed.
    Pool* const made = new Pool;
    if (made->workers == 0) {  // the next call tries again
      delete made;
      return task();
    }
    if (current.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) pool = made;
    // Otherwise another thread was first, and the threads of `made` sleep for good.
  }
  pool->add(std::move(task));
}

// ------------------------------------------------------------------------------------- stored rows
// Rows that are read from files one by one, and threads that ask the system for them ahead.

/// A table of which each part lies in a file.
class StoredRows {
 public:
  /// Parts in the order of their rows, with the same columns and dtype.
  explicit StoredRows(const std::vector<pretrained::Place>& parts);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return parts_[0].columns; }
  torch::Dtype dtype() const { return parts_[0].dtype; }
  int64_t row_bytes() const { return row_bytes_; }

  /// Copies the rows of ids [begin, end), which must have been checked, to their places in `out`.
  /// Returns how many had to be fetched.
  /// Throws FileFormatError if a file has become shorter.
  int64_t read(core::IndexView ids, int64_t begin, int64_t end, char* out) const;

  /// The same bytes, where each row is `parts` rows.
  StoredRows split(int64_t parts) const;

  /// Copies all rows.
  void read_all(char* out) const;

  /// Asks the system for the rows of ids, without waiting for them.
  void prefetch(core::IndexView ids, int64_t count) const;

 private:
  struct Row {
    const pretrained::File* file;
    int64_t begin;
  };

  Row find(int64_t id) const;

  std::vector<pretrained::Place> parts_;
  std::vector<int64_t> ends_;  // of the parts: the row after the last
  int64_t rows_ = 0, row_bytes_ = 0;
};

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

namespace posembed {
namespace {

// -------------------------------------------------------------------------------------- file table
// FileRows, FileTable and the operator that looks up rows in files. Rows of numbers are read into
// the result; codes with their scales become a small table of their own, which is widened.

/// What a system call costs beside its copy, in bytes that are copied meanwhile.
constexpr int64_t bytes_of_a_call = 4096;

bool is_code(torch::Dtype dtype) { return dtype == at::kFloat8_e4m3fn || dtype == at::kChar; }

/// The table of a file, or of several parts.
std::vector<pretrained::StoredTable> tables_of(const std::string& path,
                                               const std::vector<std::string>& tensors) {
  const auto source = pretrained::open_source(path, pretrained::OpenOptions());
  std::vector<pretrained::StoredTable> tables;
  for (const std::string& name : tensors) tables.push_back(source->stored(name));
  if (tensors.empty()) tables.push_back(source->stored(""));
  return tables;
}

template <typename Get>
token::StoredRows rows_of(const std::vector<pretrained::StoredTable>& tables, const Get& get) {
  std::vector<pretrained::Place> parts;
  for (const pretrained::StoredTable& table : tables) parts.push_back(get(table));
  return token::StoredRows(parts);
}

}  // namespace

class FileRows::Implementation {
 public:
  explicit Implementation(const std::vector<pretrained::StoredTable>& parts)
      : table(rows_of(parts, [](const auto& part) { return part.table; })),
        blocks{parts[0].block_rows, parts[0].block_columns} {
    has_codes = parts[0].scale_rows.has_value() || parts[0].scales.defined();
    if (!has_codes) {
      dispatcher::check_floating(table.dtype(), "tensors");
      return;
    }
    TORCH_CHECK_TYPE(is_code(table.dtype()), "tensors: expected codes in float8_e4m3fn or int8, ",
                     "got ", dispatcher::dtype_name(table.dtype()));
    std::vector<torch::Tensor> scales_of_parts;
    for (const pretrained::StoredTable& part : parts) {
      // Blocks of rows must not reach over the end of a part.
      const bool fits = part.scale_rows.has_value() == parts[0].scale_rows.has_value() &&
                        part.block_rows == blocks.rows && part.block_columns == blocks.columns &&
                        (&part == &parts.back() || part.table.rows % blocks.rows == 0);
      TORCH_CHECK_VALUE(fits, "tensors: expected parts whose scales have the same blocks");
      scales_of_parts.push_back(part.scales);
    }
    if (parts[0].scale_rows.has_value()) {
      scale_rows.emplace(rows_of(parts, [](const auto& part) { return *part.scale_rows; }));
    } else {
      scales = at::cat(scales_of_parts);
    }
  }

  /// The same table as shorter rows.
  Implementation(const Implementation& whole, int64_t parts, token::CodeBlocks blocks)
      : table(whole.table.split(parts)),
        blocks(blocks),
        has_codes(whole.has_codes),
        misses(whole.misses) {
    if (!has_codes) return;
    const int64_t in_row = blocks.in_row(table.columns());
    if (whole.scale_rows.has_value()) {
      scale_rows.emplace(whole.scale_rows->split(whole.scale_rows->columns() / in_row));
    } else {
      scales = whole.scales.reshape({-1, in_row});
    }
  }

  int64_t read(const token::StoredRows& rows, const torch::Tensor& ids,
               const torch::Tensor& out) const {
    const core::IndexView view = dispatcher::index_view(ids);
    auto* const bytes = static_cast<char*>(out.mutable_data_ptr());
    std::atomic<int64_t> fetched = 0;
    dispatcher::parallel_for(
        ids.numel(), rows.row_bytes() + bytes_of_a_call,
        [&](int64_t begin, int64_t end) { fetched += rows.read(view, begin, end, bytes); });
    return fetched;
  }

  /// The rows of scales for ids.
  torch::Tensor scale_ids(const torch::Tensor& ids) const {
    const torch::Tensor flat = ids.flatten();
    return blocks.rows == 1 ? flat : flat.floor_divide(blocks.rows);
  }

  torch::Tensor scales_of(const torch::Tensor& ids) const {
    const torch::Tensor own = scale_ids(ids);
    if (!scale_rows.has_value()) return scales.index_select(0, own.to(at::kLong));
    torch::Tensor found = at::empty({ids.numel(), scale_rows->columns()}, scale_rows->dtype());
    read(*scale_rows, own, found);
    return found.scalar_type() == at::kFloat8_e8m0fnu ? found : found.to(at::kFloat);
  }

  const token::StoredRows table;
  std::optional<token::StoredRows> scale_rows;
  torch::Tensor scales;
  const token::CodeBlocks blocks;
  bool has_codes = false;
  const std::shared_ptr<std::atomic<int64_t>> misses = std::make_shared<std::atomic<int64_t>>(0);
  int64_t handle = 0;
};

namespace {

using Implementation = FileRows::Implementation;

/// Open tables by their handles. These are drawn, so that a program that was exported in another
/// process finds no table.
class OpenTables {
 public:
  int64_t add(const std::shared_ptr<const Implementation>& table) {
    const std::unique_lock lock(mutex_);
    int64_t handle = 0;
    while (handle == 0 || tables_.count(handle) > 0) handle = drawn();
    tables_[handle] = table;
    return handle;
  }

  void remove(int64_t handle) {
    const std::unique_lock lock(mutex_);
    tables_.erase(handle);
  }

  std::shared_ptr<const Implementation> find(int64_t handle) {
    std::shared_ptr<const Implementation> found;
    {
      const std::shared_lock lock(mutex_);
      const auto entry = tables_.find(handle);
      if (entry != tables_.end()) found = entry->second.lock();
    }
    TORCH_CHECK_VALUE(found, "file: expected the handle of an open table, got ", handle);
    return found;
  }

 private:
  /// 62 bits of the system's, as a forked child must draw others.
  static int64_t drawn() {
    std::random_device bits;
    return static_cast<int64_t>(bits() & 0x7fffffff) << 31 | (bits() & 0x7fffffff);
  }

  dispatcher::ForkMutex mutex_;
  std::map<int64_t, std::weak_ptr<const Implementation>> tables_;
};

OpenTables& open_tables = *new OpenTables;

void check_on_cpu(const torch::Tensor& ids) {
  dispatcher::check_integers(ids, "ids");
  TORCH_CHECK_VALUE(ids.is_cpu() || ids.is_meta(),
                    "ids: expected them on the CPU, which reads the file, got ", ids.device());
}

dispatcher::Unallocated shape_of_rows(const torch::Tensor& ids, int64_t file, double,
                                      std::optional<at::ScalarType> dtype) {
  check_on_cpu(ids);
  const auto rows = open_tables.find(file);
  const at::ScalarType own = rows->has_codes ? at::kFloat : rows->table.dtype();
  dispatcher::check_floating(dtype.value_or(own), "dtype");
  return {dispatcher::sizes_and(ids, rows->table.columns()),
          ids.options().dtype(dtype.value_or(own))};
}

/// Numbers in another dtype; throws FileFormatError if one becomes infinite.
torch::Tensor converted(const torch::Tensor& numbers, at::ScalarType dtype) {
  if (numbers.scalar_type() == dtype) return numbers;
  torch::Tensor result = at::empty_like(numbers, numbers.options().dtype(dtype));
  const auto lost = pretrained::convert(numbers, result);
  TORCH_CHECK_VALUE(!lost.has_value(), "dtype: expected one in which the rows are finite, got ",
                    dispatcher::dtype_name(dtype), " for ", lost->number);
  return result;
}

torch::Tensor rows_in_file(const torch::Tensor& given, int64_t file, double scale,
                           std::optional<at::ScalarType> dtype) {
  const auto rows = open_tables.find(file);
  const torch::Tensor ids = given.contiguous();
  token::check_ids(ids, rows->table.rows());
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(rows->table.columns());
  torch::Tensor found = dispatcher::empty(shape, ids.options().dtype(rows->table.dtype()));
  *rows->misses += rows->read(rows->table, ids, found);
  if (!rows->has_codes) {
    found = converted(found, dtype.value_or(found.scalar_type()));
    if (scale == 1.0) return found;
  }
  const torch::Tensor places = at::arange(ids.numel(), at::kLong).view(ids.sizes());
  const torch::Tensor table = found.view({ids.numel(), rows->table.columns()});
  if (!rows->has_codes) return token::look_up(table, {places, -1, scale});
  return token::embedding_quantized(table, rows->scales_of(ids),
                                    {places, std::nullopt, 1, rows->blocks.columns, scale, dtype});
}

torch::Tensor read_rows(const torch::Tensor& ids, int64_t file, double scale,
                        std::optional<at::ScalarType> dtype) {
  return pretrained::with_python_errors([&] { return rows_in_file(ids, file, scale, dtype); });
}

const dispatcher::Operator<torch::Tensor(const torch::Tensor&, int64_t, double,
                                         std::optional<at::ScalarType>)>
    file_rows{"file_rows"};

/// Gives a table its handle, as long as it is open.
template <typename... Arguments>
std::shared_ptr<const Implementation> opened(const Arguments&... arguments) {
  const auto close = [](const Implementation* table) {
    open_tables.remove(table->handle);
    delete table;
  };
  const std::shared_ptr<Implementation> made(new Implementation(arguments...), close);
  made->handle = open_tables.add(made);
  return made;
}

}  // namespace

FileRows::FileRows(const std::string& path, const std::vector<std::string>& tensors)
    : implementation_(opened(tables_of(path, tensors))) {}

FileRows::FileRows(std::shared_ptr<const Implementation> implementation)
    : implementation_(std::move(implementation)) {}

std::optional<FileRows> FileRows::split(int64_t parts) const {
  const Implementation& whole = *implementation_;
  const int64_t dim = embedding_dim();
  const token::CodeBlocks blocks = whole.has_codes ? whole.blocks : token::CodeBlocks{1, dim};
  const auto shorter = token::split(blocks, dim, parts);
  if (!shorter.has_value()) return std::nullopt;
  return FileRows(opened(whole, parts, *shorter));
}

int64_t FileRows::num_embeddings() const { return implementation_->table.rows(); }
int64_t FileRows::embedding_dim() const { return implementation_->table.columns(); }
int64_t FileRows::misses() const { return *implementation_->misses; }
int64_t FileRows::handle() const { return implementation_->handle; }

torch::Dtype FileRows::dtype() const {
  return implementation_->has_codes ? at::kFloat : implementation_->table.dtype();
}

int64_t FileRows::bytes_in_files() const {
  const auto& scales = implementation_->scale_rows;
  const int64_t row = implementation_->table.row_bytes() + (scales ? scales->row_bytes() : 0);
  return num_embeddings() * row;
}

int64_t FileRows::bytes_in_memory() const {
  const torch::Tensor& scales = implementation_->scales;
  return scales.defined() ? static_cast<int64_t>(scales.nbytes()) : 0;
}

QuantizedRows FileRows::codes() const {
  const auto& table = *implementation_;
  TORCH_CHECK_TYPE(table.has_codes, "tensors: expected codes with scales, got ",
                   dispatcher::dtype_name(table.table.dtype()));
  const auto whole = [](const token::StoredRows& rows) {
    torch::Tensor tensor = at::empty({rows.rows(), rows.columns()}, rows.dtype());
    prefer_huge_pages(tensor);
    rows.read_all(static_cast<char*>(tensor.mutable_data_ptr()));
    return tensor;
  };
  torch::Tensor scales = table.scale_rows.has_value() ? whole(*table.scale_rows) : table.scales;
  if (scales.scalar_type() != at::kFloat8_e8m0fnu) scales = scales.to(at::kFloat);
  return {whole(table.table), scales, std::nullopt, table.blocks.rows, table.blocks.columns};
}

void FileRows::prefetch(const torch::Tensor& ids) const {
  check_on_cpu(ids);
  const torch::Tensor own = ids.flatten().clone();  // the caller may write to the ids meanwhile
  token::check_ids(own, num_embeddings());
  const torch::Tensor blocks = implementation_->scale_ids(own);
  token::run_in_background([own, blocks, table = implementation_] {
    table->table.prefetch(dispatcher::index_view(own), own.numel());
    if (!table->scale_rows.has_value()) return;
    table->scale_rows->prefetch(dispatcher::index_view(blocks), own.numel());
  });
}

torch::Tensor functional::embedding(const torch::Tensor& ids, const FileRows& rows, double scale,
                                    std::optional<torch::Dtype> dtype) {
  return file_rows(ids, rows.handle(), scale, dtype);
}

FileTableImpl::FileTableImpl(FileRows rows_, std::optional<torch::Dtype> dtype_)
    : rows(std::move(rows_)), dtype(dtype_.value_or(rows.dtype())) {
  dispatcher::check_floating(dtype, "dtype");
}

void FileTableImpl::pretty_print(std::ostream& stream) const {
  stream << "FileTable(" << rows.num_embeddings() << ", " << rows.embedding_dim()
         << ", dtype=torch." << c10::getDtypeNames(dtype).first << ")";
}

void FileTableImpl::to(torch::Device, torch::Dtype dtype, bool) { this->dtype = dtype; }
void FileTableImpl::to(torch::Device, bool) {}
void FileTableImpl::to(torch::Dtype dtype, bool) { this->dtype = dtype; }

torch::Tensor FileTableImpl::forward(const torch::Tensor& ids, double scale) {
  return functional::embedding(ids, rows, scale, dtype);
}

RowsAhead FileTableImpl::prefetch(const torch::Tensor& ids, double scale) const {
  rows.prefetch(ids);
  return {rows, ids.clone(), scale, dtype};
}

RowsAhead::RowsAhead(FileRows rows, torch::Tensor ids, double scale, torch::Dtype dtype)
    : rows_(std::move(rows)), ids_(std::move(ids)), scale_(scale), dtype_(dtype) {}

torch::Tensor RowsAhead::take() {
  TORCH_CHECK(ids_.defined(), "take: expected one call for each prefetch, got another");
  return functional::embedding(std::exchange(ids_, torch::Tensor()), rows_, scale_, dtype_);
}

// Rows in files have no gradient.
TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("file_rows", torch::CppFunction::makeFallthrough());
}

}  // namespace posembed

namespace posembed::token {
namespace {

/// FileRows and codes for posembed._files.
struct HeldRows : torch::CustomClassHolder {
  explicit HeldRows(FileRows opened) : rows(std::move(opened)) {}

  HeldRows(const std::string& path, const std::vector<std::string>& tensors)
      : rows(pretrained::with_python_errors(
            [&] { return FileRows(pretrained::path_of_text(path), tensors); })) {}

  /// The handle, the sizes of the table and its dtype as "float32".
  std::tuple<int64_t, int64_t, int64_t, std::string> facts() const {
    return {rows.handle(), rows.num_embeddings(), rows.embedding_dim(),
            std::string(c10::getDtypeNames(rows.dtype()).first)};
  }

  /// The bytes in files and in memory.
  std::tuple<int64_t, int64_t> bytes() const {
    return {rows.bytes_in_files(), rows.bytes_in_memory()};
  }

  std::optional<c10::intrusive_ptr<HeldRows>> split(int64_t parts) const {
    const auto shorter = rows.split(parts);
    if (!shorter.has_value()) return std::nullopt;
    return c10::make_intrusive<HeldRows>(*shorter);
  }

  std::tuple<torch::Tensor, torch::Tensor, int64_t, int64_t> codes() const {
    const QuantizedRows found = pretrained::with_python_errors([&] { return rows.codes(); });
    return {found.codes, found.scales, found.block_rows, found.block_columns};
  }

  void prefetch(const torch::Tensor& ids) const { rows.prefetch(ids); }
  int64_t misses() const { return rows.misses(); }

  static std::tuple<torch::Tensor, torch::Tensor, std::optional<torch::Tensor>> rowwise_codes(
      const torch::Tensor& packed, int64_t bits) {
    const QuantizedRows found = QuantizedRows::from_rowwise(packed, bits);
    return {found.codes, found.scales, found.biases};
  }

  const FileRows rows;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  file_rows.implement<shape_of_rows, read_rows>(m);
  m.class_<HeldRows>("FileRows")
      .def(torch::init<const std::string&, const std::vector<std::string>&>())
      .def("facts", &HeldRows::facts)
      .def("bytes", &HeldRows::bytes)
      .def("split", &HeldRows::split)
      .def("codes", &HeldRows::codes)
      .def("prefetch", &HeldRows::prefetch)
      .def("misses", &HeldRows::misses)
      .def_static("rowwise_codes", &HeldRows::rowwise_codes);
}

}  // namespace posembed::token

#include "c_interface/tensors.h"

#include "core/device.h"

namespace posembed::c_interface {
namespace {

thread_local char last_error[1024] = "";  // plain memory: no thread has anything to destroy

std::string name_of(posembed_dtype dtype) {
  const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string kind = dtype.code < 7 ? kinds[dtype.code] : "dtype";
  return kind + (dtype.code == 6 ? "" : std::to_string(dtype.bits)) +
         (dtype.lanes == 1 ? "" : "x" + std::to_string(dtype.lanes));
}

bool is(const View& view, int code, int bits) {
  return view.dtype.code == code && view.dtype.bits == bits && view.dtype.lanes == 1;
}

/// The elements of a shape; the largest number if they are more than an address can count.
int64_t product(const View& view) {
  int64_t result = 1;
  bool empty = false, overflows = false;
  for (int64_t i = 0; i < view.rank; ++i) {
    empty |= view.size[i] == 0;
    overflows |= __builtin_mul_overflow(result, view.size[i], &result);
  }
  expect(empty || !overflows, view.name, ": its shape has too many elements, ", view.shape());
  return empty ? 0 : result;
}

/// Pinned memory of CUDA's host (type 3) is memory of the CPU.
void set_device(const posembed_tensor& tensor, const char* name, Device* device) {
  Device own{static_cast<int32_t>(tensor.device.device_type), tensor.device.device_id, name};
  expect(own.type >= 1 && own.type <= 3, name,
         ": expected memory of the CPU or of CUDA (device_type 1, 3 or 2), got ", own.type);
  expect(!own.on_cuda() || core::built_with_cuda, name,
         ": expected memory of the CPU (device_type 1), got 2; this build has no CUDA kernels");
  if (!own.on_cuda()) own = {1, 0, name};
  expect(own.id >= 0 && own.id < core::max_devices, name, ": expected device_id 0 to ",
         core::max_devices - 1, ", got ", own.id);
  if (device->type == 0) *device = own;
  expect(own.type == device->type && own.id == device->id, name, ": expected memory of ", *device,
         ", as ", device->first, ", got ", own);
}

/// Refuses if a kernel of an earlier call recorded an error.
void refuse_recorded_error() {
  const std::string text = core::take_device_error();
  if (!text.empty()) refuse(POSEMBED_INDEX_ERROR, text);
}

void expect_no_failure(const char* error) {
  if (error != nullptr) refuse(POSEMBED_RUNTIME_ERROR, core::cuda_failure(error));
}

void wait_for_devices() {
  if constexpr (core::built_with_cuda) {
    for (int device = 0; device < core::devices_end(); ++device) {
      if (!core::is_device_used(device)) continue;
      const core::DeviceScope scope(device);
      expect_no_failure(scope.error());
      expect_no_failure(core::wait_for_device());
    }
  }
}

void set_strides(const int64_t* strides, View* result) {
  for (int64_t i = result->rank - 1, next = 1; i >= 0; --i) {
    result->stride[i] = strides == nullptr ? next : strides[i];
    expect(result->stride[i] >= 0, result->name, ": expected no negative stride, got ",
           result->stride[i]);
    next *= std::max<int64_t>(1, result->size[i]);
  }
}

}  // namespace

void remember(const char* text) {
  strncpy(last_error, text, sizeof last_error - 1);  // the last byte stays zero
}

View view(const posembed_tensor* tensor, const char* name, Device* device) {
  expect(tensor != nullptr, name, ": expected a tensor, got NULL");
  View result;
  result.name = name;
  result.dtype = tensor->dtype;
  result.rank = tensor->ndim;
  set_device(*tensor, name, device);
  expect(result.rank >= 0 && result.rank <= core::max_rank, name, ": expected at most ",
         core::max_rank, " dimensions, got ", result.rank);
  expect(tensor->shape != nullptr || result.rank == 0, name, ".shape: expected sizes, got NULL");
  std::copy_n(tensor->shape, result.rank, result.size);
  for (int64_t i = 0; i < result.rank; ++i) {
    expect(result.size[i] >= 0, name, ": expected sizes of 0 or more, got ", result.shape());
  }
  const int64_t count = product(result);
  set_strides(tensor->strides, &result);
  expect(tensor->data != nullptr || count == 0, name, ".data: expected memory, got NULL");
  if (tensor->data != nullptr) result.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  const auto address = reinterpret_cast<uintptr_t>(result.data);
  if (address % std::max(1, result.dtype.bits / 8) != 0) {
    refuse(POSEMBED_VALUE_ERROR, name, ": expected memory aligned to ", name_of(result.dtype));
  }
  return result;
}

std::ostream& operator<<(std::ostream& out, const Device& device) {
  return device.on_cuda() ? out << "cuda:" << device.id : out << "the CPU";
}

int64_t View::count() const { return product(*this); }

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << "[";
  for (int64_t i = 0; i < shape.view.rank; ++i) {
    out << (i == 0 ? "" : ", ") << shape.view.size[i];
  }
  return out << "]";
}

bool View::contiguous() const {
  int64_t next = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    if (size[i] != 1 && stride[i] != next) return count() == 0;
    next *= size[i];
  }
  return true;
}

core::StridedMemory View::memory() const {
  return {reinterpret_cast<uintptr_t>(data), dtype.bits / 8, size, stride, rank};
}

core::Scalar scalar_of(const View& view) {
  if (is(view, 2, 32)) return core::Scalar::float32;
  if (is(view, 2, 64)) return core::Scalar::float64;
  if (is(view, 4, 16)) return core::Scalar::bfloat16;
  if (is(view, 2, 16)) return core::Scalar::float16;
  refuse(POSEMBED_TYPE_ERROR, view.name, ": expected float32, float64, bfloat16 or float16, got ",
         name_of(view.dtype));
}

core::IndexView index_view(const View& view) {
  if (is(view, 0, 32)) return {view.data, core::Index::int32};
  if (is(view, 0, 64)) return {view.data, core::Index::int64};
  refuse(POSEMBED_TYPE_ERROR, view.name, ": expected int32 or int64, got ", name_of(view.dtype));
}

core::PositionView position_view(const View& view) {
  if (is(view, 2, 32)) return {view.data, true, core::Index::int64, core::Scalar::float32};
  if (is(view, 2, 64)) return {view.data, true, core::Index::int64, core::Scalar::float64};
  return {view.data, false, index_view(view).type, core::Scalar::float32};
}

void expect_shape(const View& view, const std::vector<int64_t>& shape) {
  View expected = view;
  expected.rank = static_cast<int64_t>(shape.size());
  std::copy(shape.begin(), shape.end(), expected.size);
  const bool same =
      view.rank == expected.rank && std::equal(view.size, view.size + view.rank, expected.size);
  expect(same, view.name, ": expected ", expected.shape(), ", got ", view.shape());
}

void expect_dense_rows(const View& view) {
  expect(view.last() <= 1 || view.stride[view.rank - 1] == 1 || view.count() == 0, view.name,
         ": expected a contiguous last dimension, got stride ", view.stride[view.rank - 1]);
}

void expect_same_dtype(const View& view, const View& other) {
  if (memcmp(&view.dtype, &other.dtype, sizeof view.dtype) == 0) return;
  refuse(POSEMBED_TYPE_ERROR, view.name, ": expected the dtype of ", other.name, ", ",
         name_of(other.dtype), ", got ", name_of(view.dtype));
}

void expect_writable(const View& out) {
  expect_dense_rows(out);
  expect(!core::overlaps_itself(out.memory()), out.name,
         ": expected elements at addresses of their own");
}

void expect_apart(const View& out, const View& other) {
  expect(!core::overlap(out.memory(), other.memory()), out.name, ": shares memory with ",
         other.name);
}

Rows expect_rows(const View& view, int64_t batch, int64_t length, int64_t first_dimension) {
  const int64_t rank = view.rank - first_dimension;
  expect((rank == 1 || rank == 2) && view.last() == length, view.name, ": expected [", length,
         "] or [", batch, ", ", length, "], got ", view.shape());
  const int64_t rows = rank == 2 ? view.size[first_dimension] : 1;
  expect(rows == batch || rows == 1, view.name, ": expected batch ", batch, " or 1, got ", rows);
  return {rows, rows > 1 ? view.stride[first_dimension] : 0, view.stride[view.rank - 1]};
}

void expect_no_overflow(int64_t offset, int64_t count, const char* name) {
  int64_t end;
  expect(!__builtin_add_overflow(offset, count, &end), name,
         ": expected positions in 63 bits, got ", offset);
}

void launch(const Device& device, void* stream,
            const std::function<const char*(core::CudaStream, core::DeviceError*)>& kernel) {
  if constexpr (core::built_with_cuda) {
    const core::DeviceScope scope(device.id);
    expect_no_failure(scope.error());
    refuse_recorded_error();
    core::DeviceError* error = core::error_record(device.id);
    if (error == nullptr) expect_no_failure("CUDA gave no pinned memory for errors of kernels");
    core::mark_device_used(device.id);
    expect_no_failure(kernel(static_cast<core::CudaStream>(stream), error));
  }
}

}  // namespace posembed::c_interface

int32_t posembed_abi_version(void) { return POSEMBED_ABI_VERSION; }

posembed_status posembed_check_errors(int32_t wait) {
  using namespace posembed::c_interface;
  return guarded([&] {
    if (wait != 0) wait_for_devices();
    refuse_recorded_error();
  });
}

const char* posembed_last_error(void) { return posembed::c_interface::last_error; }

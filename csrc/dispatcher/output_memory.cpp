#include "dispatcher/output_memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/cuda_launch.h"
#include "core/device.h"
#include "core/memory.h"
#include "dispatcher/fork.h"
#include "dispatcher/launch.h"
#include "posembed/mapped_memory.h"
#include "posembed/memory.h"

namespace posembed::dispatcher {
namespace {

struct Block {
  c10::DataPtr memory;
  int64_t bytes = 0;
};

/// The memory that this process may use: the machine's, or its container's if that has less.
int64_t usable_memory() {
  int64_t bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    int64_t limit = 0;  // the file says "max" if there is no limit
    if (std::ifstream(path) >> limit) bytes = std::min(bytes, limit);
  }
  return bytes;
}

const pid_t loading_process = getpid();

int64_t standard_limit() { return std::min(int64_t{512} << 20, usable_memory() / 64); }

/// The limit from POSEMBED_CACHE_LIMIT, if it has one. Must not throw: it runs while the library is
/// loaded.
std::optional<int64_t> limit_of_environment() {
  const char* text = std::getenv("POSEMBED_CACHE_LIMIT");
  if (text == nullptr) return std::nullopt;
  int64_t bytes = 0;
  const char* end = text + std::strlen(text);
  const std::from_chars_result result = std::from_chars(text, end, bytes);
  if (result.ec == std::errc() && result.ptr == end) return std::max<int64_t>(0, bytes);
  TORCH_WARN("POSEMBED_CACHE_LIMIT: expected a number of bytes, got '", text, "'; taken as ",
             standard_limit());
  return std::nullopt;
}

/// Freed blocks, newest last. Results never wait for the lock but use malloc instead.
class KeptBlocks {
 public:
  /// The newest block that fits and is at most a quarter larger, if there is one.
  std::optional<Block> take(int64_t bytes) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return std::nullopt;
    const auto fits = [bytes](const Block& block) {
      return bytes <= block.bytes && block.bytes <= bytes + bytes / 4;
    };
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), fits);
    if (found == blocks_.rend()) return std::nullopt;
    Block block = std::move(*found);
    blocks_.erase(std::next(found).base());
    kept_ -= block.bytes;
    return block;
  }

  void keep(Block block) {
    std::vector<Block> surplus;  // freed after the lock is released
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || block.bytes > limit()) return;
    kept_ += block.bytes;
    blocks_.push_back(std::move(block));
    surplus = surplus_over(limit());
  }

  int64_t empty() {
    std::vector<Block> all;
    const std::lock_guard lock(mutex_);
    const int64_t before = kept_;
    all = surplus_over(0);
    return before;
  }

  int64_t set_limit(int64_t bytes) {
    std::vector<Block> surplus;
    const std::lock_guard lock(mutex_);
    surplus = surplus_over(bytes);
    const int64_t before = limit();
    chosen_ = bytes;
    return before;
  }

 private:
  /// The default limit applies to the process that loaded the library; forked workers keep nothing.
  int64_t limit() const {
    return chosen_.value_or(getpid() == loading_process ? standard_limit_ : 0);
  }

  /// Removes the oldest blocks until the rest is within `limit`.
  std::vector<Block> surplus_over(int64_t limit) {
    auto last = blocks_.begin();
    for (; kept_ > limit; ++last) kept_ -= last->bytes;
    std::vector<Block> surplus(std::make_move_iterator(blocks_.begin()),
                               std::make_move_iterator(last));
    blocks_.erase(blocks_.begin(), last);
    return surplus;
  }

  ForkMutex mutex_;
  std::vector<Block> blocks_;
  int64_t kept_ = 0;
  std::optional<int64_t> chosen_ = limit_of_environment();
  int64_t standard_limit_ = standard_limit();
};

/// Never destroyed: tensors of other libraries may outlive static objects of this one.
KeptBlocks& kept_blocks = *new KeptBlocks;

/// Whether the page of `data` is resident. Only a hint: it may change at any time.
bool is_resident(const void* data) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 1;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  mincore(reinterpret_cast<void*>(begin), page, &resident);
  return (resident & 1) != 0;
}

bool is_fresh(const Block& block) {
  return !is_resident(static_cast<const char*>(block.memory.get()) + block.bytes / 2);
}

/// An owner that keeps the block when it is freed.
c10::DataPtr owner_of(Block block) {
  void* const data = block.memory.get();
  const auto keep = [](void* owned) {
    const std::unique_ptr<Block> freed(static_cast<Block*>(owned));
    kept_blocks.keep(std::move(*freed));
  };
  return {data, new Block(std::move(block)), keep, at::kCPU};
}

/// Falls back to torch's own allocator if no kept block fits.
class OutputAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const auto bytes = static_cast<int64_t>(size);
    if (auto kept = kept_blocks.take(bytes)) return owner_of(*std::move(kept));
    Block block{c10::GetCPUAllocator()->allocate(size), bytes};
    if (bytes < core::stream_bytes || !is_fresh(block)) return std::move(block.memory);
    core::prefer_huge_pages(block.memory.get(), bytes);
    return owner_of(std::move(block));
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

OutputAllocator output_allocator;

constexpr c10::DispatchKeySet cpu_keys{c10::DispatchKey::CPU};

/// The bytes of a result, for every size that this file allocates.
int64_t bytes_of(at::IntArrayRef sizes, at::ScalarType type, const char* argument = "result") {
  auto bytes = static_cast<int64_t>(c10::elementSize(type));
  bool fits = true;
  for (const int64_t size : sizes) fits &= !__builtin_mul_overflow(bytes, size, &bytes);
  TORCH_CHECK_VALUE(fits, argument, ": expected a result of fewer than 2^63 bytes, got ", sizes,
                    " of ", type);
  return bytes;
}

int64_t bytes_of(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return bytes_of(sizes, c10::typeMetaToScalarType(options.dtype()));
}

bool is_large_on_cpu(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_cpu() && bytes_of(sizes, options) >= core::stream_bytes;
}

at::Tensor tensor_of(c10::DataPtr memory, at::IntArrayRef sizes, const at::TensorOptions& options) {
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes_of(sizes, options), std::move(memory),
                       &output_allocator, /*resizable=*/true);
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), cpu_keys, options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

/// A block of zeros from calloc, which knows which memory is fresh.
Block zero_block(int64_t bytes) {
  constexpr int64_t alignment = 64;  // torch's own
  void* const data = std::calloc(1, static_cast<size_t>(bytes + alignment));
  TORCH_CHECK(data != nullptr, "posembed: not enough memory for ", bytes, " bytes");
  const auto aligned = (reinterpret_cast<uintptr_t>(data) + alignment - 1) / alignment * alignment;
  return {{reinterpret_cast<void*>(aligned), data, std::free, at::kCPU}, bytes};
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  // Bypass torch's dispatcher: through it, allocating one token costs more than rotating it.
  if (!is_large_on_cpu(sizes, options)) return at::detail::empty_cpu(sizes, dtype);
  return at::detail::empty_generic(sizes, &output_allocator, cpu_keys, dtype, std::nullopt);
}

at::Tensor empty_symint(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  const auto known = c10::asIntArrayRefSlowOpt(sizes);
  return known.has_value() ? empty(*known, options) : at::empty_symint(sizes, options);
}

void check_result(c10::SymIntArrayRef sizes, at::ScalarType type, const char* argument) {
  if (const auto known = c10::asIntArrayRefSlowOpt(sizes)) bytes_of(*known, type, argument);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         const at::TensorOptions& options) {
  if (!is_large_on_cpu(sizes, options)) return at::empty_strided(sizes, strides, options);
  return at::detail::empty_strided_generic(sizes, strides, &output_allocator, cpu_keys,
                                           c10::typeMetaToScalarType(options.dtype()));
}

ZeroTable empty_table(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!is_large_on_cpu(sizes, options)) return {at::empty(sizes, options), false};
  const auto tensor_in = [&](c10::DataPtr memory) {
    return tensor_of(std::move(memory), sizes, options);
  };
  const int64_t bytes = bytes_of(sizes, options);
  if (auto kept = kept_blocks.take(bytes)) return {tensor_in(owner_of(*std::move(kept))), false};
  {
    Block block{c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes)), bytes};
    if (!is_fresh(block)) return {tensor_in(std::move(block.memory)), false};
  }
  return {tensor_in(owner_of(zero_block(bytes))), true};
}

}  // namespace posembed::dispatcher

namespace posembed {

int64_t empty_cache() { return dispatcher::kept_blocks.empty(); }

int64_t set_cache_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "bytes: expected none or more, got ", bytes);
  return dispatcher::kept_blocks.set_limit(bytes);
}

// -------------------------------------------------------------------------------------- huge pages

void prefer_huge_pages(const torch::Tensor& table) {
  // Subclasses (FakeTensor, DTensor) have no memory of their own.
  if (!table.is_cpu() || table.unsafeGetTensorImpl()->is_python_dispatch()) return;
  const at::Storage& memory = table.storage();
  core::prefer_huge_pages(memory.data(), static_cast<int64_t>(memory.nbytes()));
}

// ----------------------------------------------------------------------------------- mapped memory

torch::Tensor mapped(const torch::Tensor& table, torch::Device device) {
  TORCH_CHECK_VALUE(table.is_cpu() && table.is_contiguous(), "table: expected a contiguous tensor ",
                    "on the CPU, got one on ", table.device());
  TORCH_CHECK_VALUE(device.is_cpu() || (core::built_with_cuda && device.type() == at::kCUDA),
                    "device: expected the CPU", core::built_with_cuda ? " or a CUDA device" : "",
                    ", got ", device);
  if (!dispatcher::on_cuda(device) || table.numel() == 0) return table.to(device);
  if constexpr (core::built_with_cuda) {
    const torch::Tensor kept = table.detach();
    if (device.type() == at::kCUDA && !device.has_index()) {
      device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    }
    const c10::DeviceGuard guard(device);
    void* const host = kept.data_ptr();
    const core::Pinned pinned = core::pin(host, kept.nbytes());
    TORCH_CHECK_VALUE(pinned.on_device != nullptr, "table: cannot pin ", kept.nbytes(),
                      " bytes: ", pinned.error);
    const auto release = [kept, host, device, owned = pinned.owned](void*) {
      if (!owned) return;
      try {
        const c10::DeviceGuard on_device(device);
        core::unpin(host);
      } catch (const c10::Error&) {  // the driver is gone: the process ends
      }
    };
    return at::from_blob(pinned.on_device, kept.sizes(), kept.strides(), release,
                         kept.options().device(device));
  }
  return table;
}

}  // namespace posembed

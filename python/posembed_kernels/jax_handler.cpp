// The functions of posembed_kernels.h as one handler of XLA's foreign-function interface. JAX gives
// the struct of a call, and where in it the addresses of arguments, results and numbers belong.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "posembed_kernels.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Task = void (*)(void* work, int64_t begin, int64_t end);
using Words = ffi::Span<const int64_t>;

/// Parts of a kernel's range, which threads take one after another.
class Parts {
 public:
  Parts(int64_t count, int64_t step, Task task, void* work)
      : count_(count), step_(step), parts_((count + step - 1) / step), task_(task), work_(work) {}

  int64_t number() const { return parts_; }

  void take() {
    for (int64_t part = next_++; part < parts_; part = next_++) {
      task_(work_, part * step_, std::min(count_, (part + 1) * step_));
      const std::lock_guard<std::mutex> lock(mutex_);
      if (++done_ == parts_) finished_.notify_one();
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_ == parts_; });
  }

 private:
  const int64_t count_, step_, parts_;
  const Task task_;
  void* const work_;
  std::atomic<int64_t> next_{0};
  int64_t done_ = 0;
  std::mutex mutex_;
  std::condition_variable finished_;
};

/// The caller takes parts too, so a pool without an idle thread delays nothing.
void parallel_for(void* pool, int64_t count, int64_t grain, Task task, void* work) {
  auto& threads = *static_cast<ffi::ThreadPool*>(pool);
  const int64_t number = std::max<int64_t>(1, threads.num_threads());
  const int64_t step = std::max(grain, (count + number - 1) / number);
  const auto parts = std::make_shared<Parts>(count, step, task, work);
  for (int64_t i = 1; i < parts->number(); ++i) threads.Schedule([parts] { parts->take(); });
  parts->take();
  parts->wait();
}

posembed_dtype dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return {2, 32, 1};
    case ffi::DataType::F64:
      return {2, 64, 1};
    case ffi::DataType::F16:
      return {2, 16, 1};
    case ffi::DataType::BF16:
      return {4, 16, 1};
    case ffi::DataType::S32:
      return {0, 32, 1};
    case ffi::DataType::S64:
      return {0, 64, 1};
    case ffi::DataType::PRED:
      return {6, 8, 1};
    default:
      return {3, 8, 1};  // no number: the library refuses it
  }
}

posembed_tensor tensor_of(const ffi::AnyBuffer& buffer) {
  posembed_tensor tensor{};
  tensor.data = buffer.untyped_data();
  tensor.device.device_type = 1;
  tensor.ndim = static_cast<int32_t>(buffer.dimensions().size());
  tensor.dtype = dtype_of(buffer.element_type());
  tensor.shape = const_cast<int64_t*>(buffer.dimensions().begin());
  return tensor;
}

int run(int32_t function, void* call, const posembed_threads* threads) {
  switch (function) {
    case 0:
      return posembed_rotary(static_cast<posembed_rotation*>(call), threads);
    case 1:
      return posembed_sinusoidal(static_cast<posembed_sinusoid*>(call), threads);
    case 2:
      return posembed_alibi_bias(static_cast<posembed_alibi*>(call), threads);
    default:
      return posembed_embedding(static_cast<posembed_gather*>(call), threads);
  }
}

/// `call`: a struct. tensors[i]: the offset in it of argument or result i. places: pairs of an
/// offset and of an index in `memory`.
ffi::Error handle(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  int32_t function, Words call, Words tensors, Words memory, Words places) {
  std::vector<int64_t> words(call.begin(), call.end());
  const auto set = [&](int64_t offset, const void* address) {
    words[static_cast<size_t>(offset / 8)] = reinterpret_cast<int64_t>(address);
  };
  for (size_t i = 0; i + 1 < places.size(); i += 2) {
    set(places.begin()[i], memory.begin() + places.begin()[i + 1]);
  }
  std::vector<posembed_tensor> all;
  for (size_t i = 0; i < arguments.size(); ++i) {
    all.push_back(tensor_of(arguments.get<ffi::AnyBuffer>(i).value()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    all.push_back(tensor_of(*results.get<ffi::AnyBuffer>(i).value()));
  }
  for (size_t i = 0; i < all.size(); ++i) set(tensors.begin()[i], &all[i]);
  posembed_threads threads{sizeof(posembed_threads), parallel_for, &pool};
  if (run(function, words.data(), &threads) == POSEMBED_OK) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(posembed_last_error());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(posembed_jax, handle,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("function")
                                  .Attr<Words>("call")
                                  .Attr<Words>("tensors")
                                  .Attr<Words>("memory")
                                  .Attr<Words>("places"));

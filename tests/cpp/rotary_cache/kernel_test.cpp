// Tests that the cache kernel of every instruction set, and the source of the CUDA kernel run on
// the CPU by tests/cpp/cuda_on_cpu, give the bits of the rotary kernel followed by a copy of rows.
#include <cuda_runtime.h>

// Renamed, because the library may contain the real launcher.
#define rotate_and_cache_cuda rotate_and_cache_cuda_on_cpu
#include "copies.h"
#include "rotary/call.h"
#include "rotary_cache/rotary_cache_cuda.cu"

namespace posembed::rotary_cache {
namespace {

using core::Scalar;
using rotary::Problem;

struct Variant {
  const char* name;
  void (*run)(const Arguments&, int64_t, int64_t);
};

void run_on_gpu(const Arguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(rotate_and_cache_cuda(arguments, nullptr), nullptr);
}

std::vector<Variant> variants() {
  std::vector<Variant> result = {{"cuda source", run_on_gpu}};
  POSEMBED_ADD_COPIES(result, isa::rotate_and_cache)
  return result;
}

struct Paged {
  Problem rotary;
  int64_t value_dim = 32, pages = 3, page_size = 5;
  bool float8 = false, rotate_key = false, heads_first = false;
  bool scale_in_memory = false;
  int64_t shift = 0;  // bytes before the caches, in elements
  core::Index index = core::Index::int64;
  std::vector<int64_t> slots = {14, 0, -1, 7, 3, 9, -1, 1, 12, 5};
};

/// Arguments and memory of one call, and the expected contents after it.
class Call {
 public:
  explicit Call(const Paged& paged) : paged_(paged), rotary_(paged.rotary) {
    const Problem& problem = paged.rotary;
    arguments.rotation = rotary_.arguments;
    if (!paged.rotate_key) arguments.rotation.views[1].out = nullptr;
    arguments.float8 = paged.float8;
    arguments.page_size = paged.page_size;
    arguments.slot_count = paged.pages * paged.page_size;
    set_slots();
    set_value(problem);
    set_cache(key_cache_, row_dim(arguments.rotation, arguments.rotation.views[1]), 0.5f, &arguments.key_cache);
    set_cache(value_cache_, paged.value_dim, 0.3f, &arguments.value_cache);
  }

  Arguments arguments;

  rotary::Call& rotary() { return rotary_; }

  void check(const Variant& variant) {
    rotary::Call alone(paged_.rotary);  // the rotation by itself
    std::vector<char> keys = key_cache_, values = value_cache_;
    const int64_t tokens = paged_.rotary.batch * paged_.rotary.seq;
    rotary::baseline::rotate(alone.arguments, 0, tokens);
    expect_rows(alone.output(1), &keys, &values);
    const std::vector<char> untouched = rotary_.output(1);
    variant.run(arguments, 0, tokens);
    const std::string where = std::string(variant.name) + ", " + paged_.rotary.text();
    ASSERT_EQ(rotary_.output(0), alone.output(0)) << "query: " << where;
    ASSERT_EQ(rotary_.output(1), paged_.rotate_key ? alone.output(1) : untouched) << "key: " << where;
    ASSERT_EQ(key_cache_, keys) << "key cache: " << where;
    ASSERT_EQ(value_cache_, values) << "value cache: " << where;
  }

 private:
  int64_t element_size() const { return core::size_of(paged_.rotary.scalar); }
  int64_t kept_size() const { return paged_.float8 ? 1 : element_size(); }

  void set_slots() {
    arguments.slots.type = paged_.index;
    narrow_.assign(paged_.slots.begin(), paged_.slots.end());
    arguments.slots.data =
        paged_.index == core::Index::int32 ? static_cast<const void*>(narrow_.data()) : paged_.slots.data();
    arguments.slot_stride[0] = paged_.rotary.seq;
    arguments.slot_stride[1] = 1;
  }

  void set_value(const Problem& problem) {
    const int64_t heads = problem.heads[1], row = paged_.value_dim + problem.padding;
    value_.resize(static_cast<size_t>(problem.batch * problem.seq * heads * row * element_size()));
    std::mt19937_64 random(9);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < problem.batch * problem.seq * heads * row; ++i)
      rotary::set_element(value_.data(), problem.scalar, i, 300 * normal(random));
    arguments.value.in = value_.data();
    arguments.value.heads = heads;
    arguments.value.in_stride[0] = problem.seq * heads * row;
    arguments.value.in_stride[1] = heads * row;
    arguments.value.in_stride[2] = row;
    arguments.value_dim = paged_.value_dim;
  }

  void set_cache(std::vector<char>& memory, int64_t dim, float scale, Cache* cache) {
    const int64_t heads = paged_.rotary.heads[1], row = dim + paged_.rotary.padding;
    const int64_t elements = paged_.shift + paged_.pages * paged_.page_size * heads * row;
    memory.assign(static_cast<size_t>(elements * kept_size()), char(0xab));
    cache->data = memory.data() + paged_.shift * kept_size();
    cache->stride[0] = paged_.page_size * heads * row;
    cache->stride[1] = paged_.heads_first ? row : heads * row;
    cache->stride[2] = paged_.heads_first ? paged_.page_size * row : row;
    float& kept = scales_[cache == &arguments.value_cache];
    kept = scale;
    if (paged_.scale_in_memory) cache->scale_data = &kept;
    if (!paged_.scale_in_memory) cache->scale = scale;
  }

  /// Copies or rounds one row of `dim` elements, as the kernel should.
  void expect_row(const char* in, int64_t dim, float scale, char* out) const {
    if (!paged_.float8) {
      memcpy(out, in, static_cast<size_t>(dim * element_size()));
      return;
    }
    for (int64_t i = 0; i < dim; ++i) {
      core::Float8 kept;
      core::store(static_cast<float>(rotary::element(in, paged_.rotary.scalar, i)) / scale, &kept);
      memcpy(out + i, &kept, 1);
    }
  }

  void expect_rows(const std::vector<char>& rotated_keys, std::vector<char>* keys, std::vector<char>* values) {
    const Problem& problem = paged_.rotary;
    const int64_t dim = row_dim(arguments.rotation, arguments.rotation.views[1]);
    for (int64_t token = 0; token < problem.batch * problem.seq; ++token) {
      const int64_t slot = paged_.slots[static_cast<size_t>(token)];
      if (slot < 0 || slot >= arguments.slot_count) continue;
      const int64_t b = token / problem.seq, s = token % problem.seq;
      for (int64_t h = 0; h < problem.heads[1]; ++h) {
        const auto at = [&](const Cache& cache) {
          return (paged_.shift + slot / paged_.page_size * cache.stride[0] + slot % paged_.page_size * cache.stride[1] +
                  h * cache.stride[2]) *
                 kept_size();
        };
        const int64_t* stride = arguments.value.in_stride;
        expect_row(rotated_keys.data() + rotary_.row_offset(1, b, s, h) * element_size(), dim, 0.5f,
                   keys->data() + at(arguments.key_cache));
        expect_row(value_.data() + (b * stride[0] + s * stride[1] + h * stride[2]) * element_size(), paged_.value_dim,
                   0.3f, values->data() + at(arguments.value_cache));
      }
    }
  }

  Paged paged_;
  rotary::Call rotary_;
  std::vector<char> value_, key_cache_, value_cache_;
  std::vector<int32_t> narrow_;
  float scales_[2] = {};
};

void check_all(const Paged& paged) {
  for (const Variant& variant : variants()) {
    Call call(paged);
    call.check(variant);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(RotaryCacheKernel, RotatesAndKeeps) {
  for (const Scalar scalar : rotary::scalars) {
    for (int bits = 0; bits < 128; ++bits) {
      Paged paged;
      paged.rotary.scalar = scalar;
      paged.rotary.interleaved = (bits & 1) != 0;
      paged.float8 = (bits & 2) != 0;
      paged.rotate_key = (bits & 4) != 0;
      paged.heads_first = (bits & 8) != 0;
      paged.scale_in_memory = (bits & 16) != 0;
      paged.index = (bits & 16) != 0 ? core::Index::int32 : core::Index::int64;
      paged.rotary.in_place = (bits & 32) != 0;
      const bool vectors = (bits & 64) != 0;
      paged.rotary.pairs = vectors ? 16 : 13;
      paged.rotary.start = vectors ? 16 : 3;
      paged.rotary.head_dim = 64;
      paged.value_dim = vectors ? 32 : 31;
      paged.rotary.padding = vectors ? 16 : 1;
      paged.shift = vectors ? 0 : 1;
      paged.rotary.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3, 2, 1};
      ASSERT_NO_FATAL_FAILURE(check_all(paged));
    }
    Paged fractional;
    fractional.rotary.scalar = scalar;
    fractional.rotary.fractions = {0.5, -0.25, 1e-3, 131071.75, -1, 1e6 + 0.1, -7, 1.0 / 3, 2, 0};
    ASSERT_NO_FATAL_FAILURE(check_all(fractional));
  }
}

TEST(RotaryCacheKernel, LatentAttention) {
  for (const Scalar scalar : rotary::scalars) {
    for (const bool float8 : {false, true}) {
      Paged paged;
      paged.rotary.scalar = scalar;
      paged.rotary.window_only = true;
      paged.rotary.heads[0] = 16;
      paged.rotary.heads[1] = 1;
      paged.rotary.head_dim = 96;
      paged.rotary.start = 64;
      paged.rotary.pairs = 16;
      paged.rotary.interleaved = true;
      paged.value_dim = 512;
      paged.float8 = float8;
      ASSERT_NO_FATAL_FAILURE(check_all(paged));
    }
  }
}

TEST(RotaryCacheKernel, HeadsOverBlocksAndNoPairs) {
  for (const int multiprocessors : {0, 1, 132}) {
    pretended_multiprocessors = multiprocessors;
    for (const int64_t pairs : {0, 32}) {
      Paged paged;
      paged.rotary.heads[0] = 40;
      paged.rotary.heads[1] = 8;
      paged.rotary.pairs = pairs;
      ASSERT_NO_FATAL_FAILURE(check_all(paged));
    }
  }
  pretended_multiprocessors = 4;
}

TEST(RotaryCacheGpuSource, RecordsASlotOutsideTheCacheAndKeepsNothing) {
  for (const int64_t bad : {int64_t{-2}, int64_t{15}, INT64_MAX, INT64_MIN}) {
    Paged paged;
    paged.slots[3] = bad;
    Call call(paged);
    core::DeviceError error = {};
    call.arguments.rotation.error = &error;
    ASSERT_NO_FATAL_FAILURE(call.check({"cuda source", run_on_gpu}));
    EXPECT_EQ(error.state, 2u);
    EXPECT_EQ(error.kind, core::ErrorKind::slot);
    EXPECT_EQ(error.value, bad);
    EXPECT_EQ(error.index, 3);
    EXPECT_EQ(error.limit, 15);
  }
}

/// The value of the positive float8 with these bits.
float number_of(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 3);
  const float eighths = static_cast<float>(bits & 7u) + (exponent > 0 ? 8.0f : 0.0f);
  return std::ldexp(eighths, std::max(exponent, 1) - 10);
}

TEST(Float8, RoundsEveryIntervalToItsNearerEnd) {
  for (uint32_t bits = 0; bits < 0x7e; ++bits) {
    const float low = number_of(bits), high = number_of(bits + 1), middle = (low + high) / 2;
    EXPECT_EQ(core::float8_bits(low), bits);
    EXPECT_EQ(core::float8_bits(std::nextafter(middle, low)), bits);
    EXPECT_EQ(core::float8_bits(middle), bits + bits % 2);
    EXPECT_EQ(core::float8_bits(-std::nextafter(middle, high)), 0x80u | (bits + 1));
  }
}

/// Numbers whose quotients lie at and beside the boundary between two float8 numbers.
TEST(RotaryCacheGpuSource, ScalesDivideAsDivisionDoes) {
  for (const float divisor : {1.0f, 0.5f, 0x1p-20f, 64.0f, 0x1p-79f, 0x1p79f, 0x1p-90f, 0x1p100f, 0.3f, 3.0f, 1.75f,
                              0.0123f, 1e-30f, -2.0f, -0.7f}) {
    const Scale scale(divisor);
    for (uint32_t bits = 0; bits < 0x7e; ++bits) {
      const float boundary = (number_of(bits) + number_of(bits + 1)) / 2 * divisor;
      for (const float value :
           {boundary, -boundary, std::nextafter(boundary, 0.0f), std::nextafter(boundary, 2 * boundary), 0.0f, -0.0f}) {
        const float found = scale.multiplies() ? scale.multiply(value) : scale.divide(value);
        ASSERT_EQ(core::float8_bits(found), core::float8_bits(value / divisor)) << value << " / " << divisor;
      }
    }
  }
}

TEST(Float8, RoundsToNearestEvenAndSaturates) {
  const auto bits = [](float value) {
    core::Float8 kept;
    core::store(value, &kept);
    return int{kept.bits};
  };
  EXPECT_EQ(bits(0.0f), 0x00);
  EXPECT_EQ(bits(-0.0f), 0x80);
  EXPECT_EQ(bits(1.0f), 0x38);
  EXPECT_EQ(bits(1.0625f), 0x38);  // halfway to 1.125: even
  EXPECT_EQ(bits(1.1875f), 0x3a);
  EXPECT_EQ(bits(0x1p-9f), 0x01);
  EXPECT_EQ(bits(0x1p-10f), 0x00);
  EXPECT_EQ(bits(0x1.8p-9f), 0x02);
  EXPECT_EQ(bits(448.0f), 0x7e);
  EXPECT_EQ(bits(464.0f), 0x7e);
  EXPECT_EQ(bits(1e30f), 0x7e);
  EXPECT_EQ(bits(-INFINITY), 0xfe);
  EXPECT_EQ(bits(NAN) & 0x7f, 0x7f);
}

}  // namespace
}  // namespace posembed::rotary_cache

#include "kernels/bandwidth_limits.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace posembed::benchmarks {
namespace {

[[maybe_unused]] constexpr size_t page = 4096;
[[maybe_unused]] constexpr size_t line = 64;

void update_in_a_loop(void* data, size_t bytes) {
  auto* words = static_cast<uint32_t*>(data);
  for (size_t i = 0; i < bytes / sizeof *words; ++i) words[i] ^= 0x00010001u;
}

void fill_libc(void* data, size_t bytes) { memset(data, 0x3f, bytes); }

void copy_libc(const void* in, void* out, size_t bytes) { memcpy(out, in, bytes); }

#if defined(__x86_64__)

[[gnu::target("avx512f,avx512bw")]] void copy_cached(const void* in, void* out, size_t bytes) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  for (size_t i = 0; i < bytes; i += line) _mm512_store_si512(to + i, _mm512_load_si512(from + i));
}

[[gnu::target("avx512f,avx512bw")]] void copy_streaming(const void* in, void* out, size_t bytes) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  for (size_t i = 0; i < bytes; i += line) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
  }
  _mm_sfence();
}

[[gnu::target("avx512f,avx512bw")]] void copy_four_pages(const void* in, void* out, size_t bytes) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  for (size_t block = 0; block < bytes; block += 4 * page) {
    for (size_t i = 0; i < page; i += 4 * line) {
      for (size_t p = 0; p < 4; ++p) {
        const size_t place = block + p * page + i;
        for (size_t l = place; l < place + 4 * line; l += line) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(to + l), _mm512_load_si512(from + l));
        }
      }
    }
  }
  _mm_sfence();
}

[[gnu::target("avx512f,avx512bw")]] void fill_streaming(void* data, size_t bytes) {
  char* to = static_cast<char*>(data);
  const __m512i value = _mm512_set1_epi8(0x3f);
  for (size_t i = 0; i < bytes; i += line) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), value);
  }
  _mm_sfence();
}

[[gnu::target("avx512f,avx512bw"), gnu::always_inline]] inline void update_line(char* data) {
  _mm512_store_si512(data,
                     _mm512_xor_si512(_mm512_load_si512(data), _mm512_set1_epi32(0x00010001)));
}

[[gnu::target("avx512f,avx512bw")]] void update_straight(void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  for (size_t i = 0; i < bytes; i += line) update_line(at + i);
}

[[gnu::target("avx512f,avx512bw")]] void update_prefetched(void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  for (size_t i = 0; i < bytes; i += line) {
    _mm_prefetch(at + i + page, _MM_HINT_T0);
    update_line(at + i);
  }
}

[[gnu::target("avx512f,avx512bw")]] void update_four_pages(void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  for (size_t block = 0; block < bytes; block += 4 * page) {
    for (size_t i = 0; i < page; i += 4 * line) {
      for (size_t p = 0; p < 4; ++p) {
        char* place = at + block + p * page + i;
        _mm_prefetch(place + page / 4, _MM_HINT_T0);
        for (size_t l = 0; l < 4 * line; l += line) update_line(place + l);
      }
    }
  }
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

#endif

}  // namespace

std::vector<NamedCopy> copies() {
  std::vector<NamedCopy> result = {{"memcpy", copy_libc}};
#if defined(__x86_64__)
  if (has_avx512()) {
    result.push_back({"vector copy", copy_cached});
    result.push_back({"streaming copy", copy_streaming});
    result.push_back({"streaming copy, four pages", copy_four_pages});
  }
#endif
  return result;
}

std::vector<NamedUpdate> updates() {
  std::vector<NamedUpdate> result = {{"update", update_in_a_loop}};
#if defined(__x86_64__)
  if (has_avx512()) {
    result.push_back({"vector update", update_straight});
    result.push_back({"vector update, prefetched", update_prefetched});
    result.push_back({"vector update, four pages", update_four_pages});
  }
#endif
  return result;
}

std::vector<NamedFill> fills() {
  std::vector<NamedFill> result = {{"memset", fill_libc}};
#if defined(__x86_64__)
  if (has_avx512()) result.push_back({"streaming fill", fill_streaming});
#endif
  return result;
}

}  // namespace posembed::benchmarks

// Copies into memory that nobody reads soon: non-temporal stores write whole cache lines without
// reading them first, which saves a third of the traffic of a copy and half of that of a fill.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace posembed::core {

/// Outputs from this size on are streamed past the caches; smaller ones are likely to be read from
/// them.
inline constexpr int64_t stream_bytes = int64_t{4} << 20;

#if defined(__AVX512F__)
using StreamVector = __m512i;
POSEMBED_INLINE void stream(void* out, const void* in) {
  _mm512_stream_si512(static_cast<__m512i*>(out), _mm512_loadu_si512(in));
}
#elif defined(__AVX2__)
using StreamVector = __m256i;
POSEMBED_INLINE void stream(void* out, const void* in) {
  _mm256_stream_si256(static_cast<__m256i*>(out),
                      _mm256_loadu_si256(static_cast<const __m256i*>(in)));
}
#elif defined(__SSE2__)
using StreamVector = __m128i;
POSEMBED_INLINE void stream(void* out, const void* in) {
  _mm_stream_si128(static_cast<__m128i*>(out), _mm_loadu_si128(static_cast<const __m128i*>(in)));
}
#endif

/// memcpy with non-temporal stores. Call stream_fence() before another thread may read the copy.
POSEMBED_INLINE void stream_copy(void* out, const void* in, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t width = sizeof(StreamVector);
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
  int64_t head = -reinterpret_cast<intptr_t>(to) & (width - 1);
  if (head > bytes) head = bytes;
  memcpy(to, from, static_cast<size_t>(head));
  int64_t done = head;
  for (; done + width <= bytes; done += width) stream(to + done, from + done);
  memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
#else
  memcpy(out, in, static_cast<size_t>(bytes));
#endif
}

POSEMBED_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace posembed::core

/* Copies that bypass the caches: a line that is overwritten as a whole need not be read first, and
   takes no other line's place. Such a copy is slower than a plain one if the data is read soon
   after. */

#ifndef RANKDUMP_STREAMED_COPY_H
#define RANKDUMP_STREAMED_COPY_H

#include "widening.h"

#ifdef __AVX512F__
#define STREAM_BYTES 64
#define STREAM(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512(from))
#elif defined __AVX2__
#define STREAM_BYTES 32
#define STREAM(to, from) _mm256_stream_si256((void *)(to), _mm256_loadu_si256((const void *)(from)))
#elif defined __SSE2__
#define STREAM_BYTES 16
#define STREAM(to, from) _mm_stream_si128((void *)(to), _mm_loadu_si128((const void *)(from)))
#endif

INLINE void stream_bytes(unsigned char *target, const unsigned char *source, int64_t bytes)
{
    int64_t at = 0;
#ifdef STREAM
    at = -(intptr_t)target & (STREAM_BYTES - 1);
    at = at < bytes ? at : bytes;
    memcpy(target, source, (size_t)at);
    for (; at + STREAM_BYTES <= bytes; at += STREAM_BYTES)
        STREAM(target + at, source + at);
#endif
    memcpy(target + at, source + at, (size_t)(bytes - at));
}

/* After this call, any thread that is told of the copy sees it. */
INLINE void end_streams(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

#endif

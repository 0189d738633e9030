/* Elements as double, four at a time, from any address. Every value is exact, except 64-bit
   integers, which are rounded once. Compiled into each variant with the variant's instructions. */

#ifndef RANKDUMP_WIDENING_H
#define RANKDUMP_WIDENING_H

#include "kernels.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

typedef double double4 __attribute__((vector_size(32)));
typedef float float4 __attribute__((vector_size(16)));
typedef int32_t int4 __attribute__((vector_size(16)));
typedef uint32_t uint4 __attribute__((vector_size(16)));
typedef uint16_t half4 __attribute__((vector_size(8)));
typedef uint64_t long4 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))
#define LOAD(type, at) ({ type loaded_; memcpy(&loaded_, (at), sizeof loaded_); loaded_; })

/* -- four elements as double ------------------------------------------------------------------- */

/* GCC turns `__builtin_convertvector` into two conversions of half a register. */
INLINE double4 widen_floats(float4 values)
{
#ifdef __AVX2__
    return (double4)_mm256_cvtps_pd((__m128)values);
#else
    return __builtin_convertvector(values, double4);
#endif
}

INLINE uint4 widen_halves(const unsigned char *at)
{
#ifdef __AVX2__
    return (uint4)_mm_cvtepu16_epi32(_mm_loadl_epi64((const void *)at));
#else
    return __builtin_convertvector(LOAD(half4, at), uint4);
#endif
}

INLINE double4 widen_float64(const unsigned char *at) { return LOAD(double4, at); }

INLINE double4 widen_float32(const unsigned char *at)
{
    return widen_floats(LOAD(float4, at));
}

INLINE double4 widen_bfloat16(const unsigned char *at)
{
    return widen_floats((float4)(widen_halves(at) << 16));
}

INLINE double4 widen_float16(const unsigned char *at)
{
#ifdef __F16C__
    return widen_floats((float4)_mm_cvtph_ps(_mm_loadl_epi64((const void *)at)));
#else
    /* Exponent and fraction are moved to their places in float32, then the bias is changed; this is
       exact, also for denormals. */
    uint4 bits = widen_halves(at);
    uint4 magnitude = (bits & 0x7fff) << 13;
    uint4 scaled = (uint4)((float4)magnitude * 0x1p112f);
    uint4 infinite = (uint4)(magnitude >= 0x7c00u << 13) & 0x7f800000;
    return widen_floats((float4)(scaled | infinite | (bits & 0x8000) << 16));
#endif
}

#define DEFINE_SMALL_WIDENING(name, type)                                                          \
    typedef type four_##name __attribute__((vector_size(4 * sizeof(type))));                       \
    INLINE double4 widen_##name(const unsigned char *at)                                           \
    {                                                                                              \
        return __builtin_convertvector(__builtin_convertvector(LOAD(four_##name, at), int4), double4); \
    }

DEFINE_SMALL_WIDENING(int8, int8_t)
DEFINE_SMALL_WIDENING(int16, int16_t)
DEFINE_SMALL_WIDENING(uint8, uint8_t)
DEFINE_SMALL_WIDENING(uint16, uint16_t)

/* Any byte above zero is true and counts as one. */
INLINE double4 widen_bool(const unsigned char *at)
{
    return (double4){at[0] != 0, at[1] != 0, at[2] != 0, at[3] != 0};
}

INLINE double4 widen_int32(const unsigned char *at)
{
#ifdef __AVX2__
    return (double4)_mm256_cvtepi32_pd((__m128i)LOAD(int4, at));
#else
    return __builtin_convertvector(LOAD(int4, at), double4);
#endif
}

/* Both halves of a 64-bit word as doubles without a conversion: 2**52 and 2**84 have no fraction
   bits to the right of the lower and of the upper half. Only the last addition rounds. */
INLINE double4 join_halves(long4 low, long4 high, double offset)
{
    double4 upper = (double4)(high | 0x4530000000000000) - offset;
    return upper + (double4)(low | 0x4330000000000000);
}

INLINE double4 widen_uint32(const unsigned char *at)
{
    long4 words = __builtin_convertvector(LOAD(uint4, at), long4);
    return (double4)(words | 0x4330000000000000) - 0x1p52;
}

INLINE double4 widen_uint64(const unsigned char *at)
{
    long4 words = LOAD(long4, at);
    return join_halves(words & 0xffffffff, words >> 32, 0x1p84 + 0x1p52);
}

INLINE double4 widen_int64(const unsigned char *at)
{
    long4 words = LOAD(long4, at) ^ 0x8000000000000000;
    return join_halves(words & 0xffffffff, words >> 32, 0x1p84 + 0x1p63 + 0x1p52);
}

/* -- denormals ----------------------------------------------------------------------------------- */

/* The threads of a job may flush denormals (torch.set_flush_denormal); kernels must not. */
INLINE unsigned keep_denormals(void)
{
#ifdef __SSE2__
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode & ~(unsigned)(_MM_FLUSH_ZERO_ON | 0x40)); /* 0x40: denormals are treated as zeros */
    return mode;
#else
    return 0;
#endif
}

INLINE void restore_mode(unsigned mode)
{
#ifdef __SSE2__
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

#endif

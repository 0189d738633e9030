/* Common declarations of the compiled kernels: element types, moments, and the functions of one
   variant. Each file of kernels is compiled once for every variant, with KERNEL_VARIANT as the end
   of its function names and with the compiler flags of the variant's instructions; native.c chooses
   a variant when it is loaded.

   Elements may be at any address. They are read as unsigned words of their size, through types that
   may alias others and need no alignment. */

#ifndef RANKDUMP_KERNELS_H
#define RANKDUMP_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The order is that of ELEMENT_CODES in element_moments.py. */
enum element_code {
    ELEMENT_BOOL, ELEMENT_INT8, ELEMENT_INT16, ELEMENT_INT32, ELEMENT_INT64,
    ELEMENT_UINT8, ELEMENT_UINT16, ELEMENT_UINT32, ELEMENT_UINT64,
    ELEMENT_FLOAT16, ELEMENT_BFLOAT16, ELEMENT_FLOAT32, ELEMENT_FLOAT64,
    ELEMENT_CODES
};

static const unsigned char element_bytes[ELEMENT_CODES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};

/* Loops over one block; the requested results select them. */
enum moment_part { PART_EXTREMES = 1, PART_SUMS = 2, PART_COUNTS = 4 };

struct moments {
    double maximum, minimum, total, squares;
    int64_t nans, positive_infinities, negative_infinities, positives, negatives, zeros;
};

#define EMPTY_MOMENTS ((struct moments){.maximum = -INFINITY, .minimum = INFINITY})

/* Number of elements that one loop processes before the next loop does: at most 8 KiB. */
#define BLOCK_ELEMENTS 1024

#define SKETCH_BUCKETS 64
#define MAX_DIMENSIONS 32

struct fingerprint {
    uint64_t digest;
    double sketch[SKETCH_BUCKETS];
    struct moments moments;
};

/* Extents of a shard in memory (C order), and the steps of its global indices. */
struct shard {
    int dimensions;
    int64_t extents[MAX_DIMENSIONS];
    uint64_t strides[MAX_DIMENSIONS];
    uint64_t first;
};

/* One copy between two arrays with the same extents; strides are in bytes. */
struct strided_copy {
    int dimensions;
    int64_t item_bytes;
    int64_t extents[MAX_DIMENSIONS];
    int64_t target_strides[MAX_DIMENSIONS], source_strides[MAX_DIMENSIONS];
};

#define DECLARE_VARIANT(name)                                                                      \
    void measure_elements_##name(const unsigned char *data, int64_t count, int code, int parts,    \
                                 struct moments *found);                                           \
    void measure_block_##name(const unsigned char *data, int64_t count, int code, int parts,       \
                              struct moments *found);                                              \
    void fingerprint_shard_##name(const unsigned char *data, const struct shard *shard, int code,  \
                                  struct fingerprint *found);                                      \
    void copy_strided_##name(unsigned char *target, const unsigned char *source,                   \
                             const struct strided_copy *plan);                                     \
    void stream_memory_##name(unsigned char *target, const unsigned char *source, int64_t bytes);

DECLARE_VARIANT(plain)
DECLARE_VARIANT(avx2)
DECLARE_VARIANT(avx512)

#define VARIANT_JOIN(name, variant) name##_##variant
#define VARIANT_EXPAND(name, variant) VARIANT_JOIN(name, variant)
#define VARIANT(name) VARIANT_EXPAND(name, KERNEL_VARIANT)

#define UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t word8 UNALIGNED;
typedef uint16_t word16 UNALIGNED;
typedef uint32_t word32 UNALIGNED;
typedef uint64_t word64 UNALIGNED;
typedef int8_t signed8 UNALIGNED;
typedef int16_t signed16 UNALIGNED;
typedef int32_t signed32 UNALIGNED;
typedef int64_t signed64 UNALIGNED;

#endif

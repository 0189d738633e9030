/* Statistics of elements: extremes, sums in double, and counts, block by block, so that memory is
   read only once. The results are equal on every processor to the last bit: sums have 16 lanes
   whatever the width of its registers, and products are never fused into sums.

   As signed integers, with the negative half inverted, the bits of floating-point numbers have the
   order of the numbers: NaN beyond the infinities, -0.0 below 0.0. So extremes of any width are
   integer extremes, and they alone show whether a block has any NaN or infinity. */

#include "widening.h"

typedef int8_t byte32 __attribute__((vector_size(32)));
typedef uint8_t unsigned_byte32 __attribute__((vector_size(32)));

#define LANES 16
#define CACHE_LINE_BYTES 64

/* -- sums of a block ----------------------------------------------------------------------------- */

typedef struct { double4 totals[4], squares[4]; } lane_sums;

/* Squares of numbers with at most 24 bits are exact in double, so fusing changes nothing. */
INLINE double4 add_exact_square(double4 sum, double4 value)
{
#ifdef __FMA__
    return (double4)_mm256_fmadd_pd((__m256d)value, (__m256d)value, (__m256d)sum);
#else
    return sum + value * value;
#endif
}

INLINE double4 add_square(double4 sum, double4 value) { return sum + value * value; }

/* Adding a product with one gives the same number. It is used because some processors convert and
   add in the same unit, and can multiply elsewhere at the same time. */
INLINE double4 add_value(double4 sum, double4 value)
{
#ifdef __FMA__
    double4 one = {1, 1, 1, 1};
    __asm__("" : "+x"(one)); /* without this the compiler turns it back into an addition */
    return (double4)_mm256_fmadd_pd((__m256d)value, (__m256d)one, (__m256d)sum);
#else
    return sum + value;
#endif
}

#define DEFINE_LANES(name, bytes, ADD_SQUARE)                                                      \
    INLINE void add_lanes_##name(const unsigned char *at, lane_sums *sums)                         \
    {                                                                                              \
        for (int i = 0; i < 4; i++) {                                                              \
            double4 values = widen_##name(at + 4 * (bytes) * i);                                   \
            sums->totals[i] = add_value(sums->totals[i], values);                                  \
            sums->squares[i] = ADD_SQUARE(sums->squares[i], values);                               \
        }                                                                                          \
    }

DEFINE_LANES(float64, 8, add_square)
DEFINE_LANES(float32, 4, add_exact_square)
DEFINE_LANES(float16, 2, add_exact_square)
DEFINE_LANES(int64, 8, add_square)
DEFINE_LANES(uint64, 8, add_square)
DEFINE_LANES(int32, 4, add_square)
DEFINE_LANES(uint32, 4, add_square)

/* The lower and the upper halves of 32-bit words become float32 by a shift and by a mask: lanes 0 to
   7, and 8 to 15. */
#ifdef __AVX512F__
INLINE void add_eight(double4 *totals, double4 *squares, __m256i words)
{
    __m512d values = _mm512_cvtps_pd((__m256)words);
    _mm512_storeu_pd(totals, _mm512_loadu_pd(totals) + values);
    _mm512_storeu_pd(squares, _mm512_fmadd_pd(values, values, _mm512_loadu_pd(squares)));
}

INLINE void add_lanes_bfloat16(const unsigned char *at, lane_sums *sums)
{
    __m256i words = LOAD(__m256i, at);
    add_eight(sums->totals, sums->squares, _mm256_slli_epi32(words, 16));
    words = _mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000));
    add_eight(sums->totals + 2, sums->squares + 2, words);
}
#else
INLINE void add_four(double4 *total, double4 *squares, double4 values)
{
    *total = add_value(*total, values);
    *squares = add_exact_square(*squares, values);
}

INLINE void add_lanes_bfloat16(const unsigned char *at, lane_sums *sums)
{
    for (int i = 0; i < 2; i++) {
        uint4 words = LOAD(uint4, at + 16 * i);
        add_four(&sums->totals[i], &sums->squares[i], widen_floats((float4)(words << 16)));
        words &= 0xffff0000;
        add_four(&sums->totals[i + 2], &sums->squares[i + 2], widen_floats((float4)words));
    }
}
#endif

/* The sums of a block take longer than its elements need to arrive from memory, so the next elements
   are prefetched. A prefetch of an address after the last element reads nothing. */
#define ADD_AND_PREFETCH(name, bytes)                                                              \
    {                                                                                              \
        for (int line = 0; line < LANES * (bytes); line += CACHE_LINE_BYTES)                       \
            __builtin_prefetch((const void *)((uintptr_t)at + BLOCK_ELEMENTS * (bytes) + line));   \
        add_lanes_##name(at, &sums);                                                               \
    }

#define DEFINE_FLOAT_SUMS(name, bytes)                                                             \
    static void sum_##name(const unsigned char *at, int count, double *total, double *squares)     \
    {                                                                                              \
        lane_sums sums = {0};                                                                      \
        for (; count >= LANES; count -= LANES, at += LANES * (bytes))                              \
            ADD_AND_PREFETCH(name, bytes)                                                          \
        if (count) { /* zeros do not change sums */                                                \
            unsigned char last[LANES * (bytes)] = {0};                                             \
            memcpy(last, at, (size_t)count * (bytes));                                             \
            add_lanes_##name(last, &sums);                                                         \
        }                                                                                          \
        double4 *t = sums.totals, *q = sums.squares;                                               \
        t[0] = (t[0] + t[1]) + (t[2] + t[3]), q[0] = (q[0] + q[1]) + (q[2] + q[3]);                \
        *total = (t[0][0] + t[0][1]) + (t[0][2] + t[0][3]);                                        \
        *squares = (q[0][0] + q[0][1]) + (q[0][2] + q[0][3]);                                      \
    }

/* Sums over a block of small integers are exact as integers, and as the double that they become. */
#define DEFINE_INTEGER_SUMS(name, type, product, wide)                                             \
    static void sum_##name(const unsigned char *at, int count, double *total, double *squares)     \
    {                                                                                              \
        const type *elements = (const type *)at;                                                   \
        int32_t sum = 0;                                                                           \
        wide square = 0;                                                                           \
        for (int i = 0; i < count; i++)                                                            \
            sum += elements[i], square += (product)elements[i] * (product)elements[i];             \
        *total = (double)sum;                                                                      \
        *squares = (double)square;                                                                 \
    }

DEFINE_FLOAT_SUMS(float64, 8)
DEFINE_FLOAT_SUMS(float32, 4)
DEFINE_FLOAT_SUMS(float16, 2)
DEFINE_FLOAT_SUMS(bfloat16, 2)
DEFINE_FLOAT_SUMS(int64, 8)
DEFINE_FLOAT_SUMS(uint64, 8)
DEFINE_FLOAT_SUMS(int32, 4)
DEFINE_FLOAT_SUMS(uint32, 4)
DEFINE_INTEGER_SUMS(int16, signed16, int32_t, int64_t)
DEFINE_INTEGER_SUMS(uint16, word16, uint32_t, uint64_t)
DEFINE_INTEGER_SUMS(int8, signed8, int32_t, int32_t)
DEFINE_INTEGER_SUMS(uint8, word8, int32_t, int32_t)

/* -- extremes and counts of a block -------------------------------------------------------------- */

#define DEFINE_EXTREMES(name, type, key_type, KEY)                                                 \
    static void find_extremes_##name(const unsigned char *at, int count, key_type *highest,        \
                                     key_type *lowest)                                             \
    {                                                                                              \
        const type *elements = (const type *)at;                                                   \
        key_type high = KEY(elements[0]), low = high;                                              \
        for (int i = 0; i < count; i++) {                                                          \
            key_type key = KEY(elements[i]);                                                       \
            high = key > high ? key : high;                                                        \
            low = key < low ? key : low;                                                           \
        }                                                                                          \
        *highest = high;                                                                           \
        *lowest = low;                                                                             \
    }

#define KEEP(bits) (bits)
#define KEY16(bits) ((int16_t)((bits) ^ (((bits) >> 15) & 0x7fff)))
#define KEY32(bits) ((int32_t)((bits) ^ (((bits) >> 31) & 0x7fffffff)))
#define KEY64(bits) ((int64_t)((bits) ^ (((bits) >> 63) & 0x7fffffffffffffff)))

DEFINE_EXTREMES(key16, signed16, int16_t, KEY16)
DEFINE_EXTREMES(key32, signed32, int32_t, KEY32)
DEFINE_EXTREMES(key64, signed64, int64_t, KEY64)
DEFINE_EXTREMES(int8, signed8, int8_t, KEEP)
DEFINE_EXTREMES(int16, signed16, int16_t, KEEP)
DEFINE_EXTREMES(int32, signed32, int32_t, KEEP)
DEFINE_EXTREMES(int64, signed64, int64_t, KEEP)
DEFINE_EXTREMES(uint8, word8, uint8_t, KEEP)
DEFINE_EXTREMES(uint16, word16, uint16_t, KEEP)
DEFINE_EXTREMES(uint32, word32, uint32_t, KEEP)
DEFINE_EXTREMES(uint64, word64, uint64_t, KEEP)

/* A counter has the width of the elements, which is enough for a block, so no element has to be
   widened. */
#define DEFINE_COUNTS(name, type, counter, IS_POSITIVE, IS_NEGATIVE)                               \
    static void count_signs_##name(const unsigned char *at, int count, int64_t *positives,         \
                                   int64_t *negatives)                                             \
    {                                                                                              \
        const type *elements = (const type *)at;                                                   \
        counter above = 0, below = 0;                                                              \
        for (int i = 0; i < count; i++) {                                                          \
            above = (counter)(above + IS_POSITIVE(elements[i]));                                   \
            below = (counter)(below + IS_NEGATIVE(elements[i]));                                   \
        }                                                                                          \
        *positives = above;                                                                        \
        *negatives = below;                                                                        \
    }

#define IS_ABOVE(x) ((x) > 0)
#define IS_BELOW(x) ((x) < 0)
#define IS_NEVER(x) 0
/* Tests of the bits of a floating-point number; a NaN counts on the side of its sign. */
#define IS_BELOW16(x) ((int16_t)((x) ^ INT16_MIN) > 0)
#define IS_BELOW32(x) ((int32_t)((x) ^ INT32_MIN) > 0)
#define IS_BELOW64(x) ((int64_t)((x) ^ INT64_MIN) > 0)

DEFINE_COUNTS(key16, signed16, uint16_t, IS_ABOVE, IS_BELOW16)
DEFINE_COUNTS(key32, signed32, uint32_t, IS_ABOVE, IS_BELOW32)
DEFINE_COUNTS(key64, signed64, uint64_t, IS_ABOVE, IS_BELOW64)
DEFINE_COUNTS(int16, signed16, uint16_t, IS_ABOVE, IS_BELOW)
DEFINE_COUNTS(int32, signed32, uint32_t, IS_ABOVE, IS_BELOW)
DEFINE_COUNTS(int64, signed64, uint64_t, IS_ABOVE, IS_BELOW)
DEFINE_COUNTS(uint16, word16, uint16_t, IS_ABOVE, IS_NEVER)
DEFINE_COUNTS(uint32, word32, uint32_t, IS_ABOVE, IS_NEVER)
DEFINE_COUNTS(uint64, word64, uint64_t, IS_ABOVE, IS_NEVER)

/* A counter of one byte can hold the counts of 127 rows of a block; a block has 64. */
_Static_assert(BLOCK_ELEMENTS / 32 < 128, "counters of a byte would overflow");

#define DEFINE_BYTE_COUNTS(name, row, type)                                                        \
    static void count_signs_##name(const unsigned char *at, int count, int64_t *positives,         \
                                   int64_t *negatives)                                             \
    {                                                                                              \
        byte32 above = {0}, below = {0};                                                           \
        for (; count >= 32; count -= 32, at += 32) {                                               \
            row elements = LOAD(row, at);                                                          \
            above -= (byte32)(elements > 0), below -= (byte32)(elements < 0);                      \
        }                                                                                          \
        int all_above = 0, all_below = 0;                                                          \
        for (int i = 0; i < 32; i++)                                                               \
            all_above += above[i], all_below += below[i];                                          \
        for (int i = 0; i < count; i++)                                                            \
            all_above += (type)at[i] > 0, all_below += (type)at[i] < 0;                            \
        *positives = all_above;                                                                    \
        *negatives = all_below;                                                                    \
    }

DEFINE_BYTE_COUNTS(int8, byte32, int8_t)
DEFINE_BYTE_COUNTS(uint8, unsigned_byte32, uint8_t)

/* -- one block ----------------------------------------------------------------------------------- */

static void widen_extremes(struct moments *found, double high, double low)
{
    if (high > found->maximum || (high == 0 && found->maximum == 0 && !signbit(high)))
        found->maximum = high;
    if (low < found->minimum || (low == 0 && found->minimum == 0 && signbit(low)))
        found->minimum = low;
}

/* Inverting a key again gives back the bits of its number. */
static double number_of_float64(int64_t key)
{
    int64_t bits = KEY64(key);
    return LOAD(double, &bits);
}

static double number_of_float32(int32_t key)
{
    int32_t bits = KEY32(key);
    return LOAD(float, &bits);
}

static double number_of_bfloat16(int16_t key)
{
    uint32_t bits = (uint32_t)(uint16_t)KEY16(key) << 16;
    return LOAD(float, &bits);
}

static double number_of_float16(int16_t key)
{
    uint16_t bits[4] = {(uint16_t)KEY16(key)};
    return widen_float16((const unsigned char *)bits)[0];
}

/* Counts NaN and infinities, only for blocks that have any, and takes the NaN out of the counts by
   sign. */
#define DEFINE_SPECIALS(width)                                                                     \
    static void count_specials_##width(const unsigned char *at, int count, int##width##_t infinity, \
                                       int parts, struct moments *found)                           \
    {                                                                                              \
        const signed##width *elements = (const signed##width *)at;                                 \
        int##width##_t positive_nans = 0, negative_nans = 0, above = 0, below = 0;                 \
        for (int i = 0; i < count; i++) {                                                          \
            int##width##_t key = KEY##width(elements[i]);                                          \
            positive_nans = (int##width##_t)(positive_nans + (key > infinity));                    \
            negative_nans = (int##width##_t)(negative_nans + (key < ~infinity));                   \
            above = (int##width##_t)(above + (key == infinity));                                   \
            below = (int##width##_t)(below + (key == ~infinity));                                  \
        }                                                                                          \
        if (positive_nans | negative_nans)                                                         \
            found->maximum = found->minimum = NAN;                                                 \
        if (!(parts & PART_COUNTS))                                                                \
            return;                                                                                \
        found->nans += positive_nans + negative_nans;                                              \
        found->positives -= positive_nans, found->negatives -= negative_nans;                      \
        found->positive_infinities += above, found->negative_infinities += below;                  \
    }

DEFINE_SPECIALS(16)
DEFINE_SPECIALS(32)
DEFINE_SPECIALS(64)

#define DEFINE_FLOAT_BLOCK(name, width, infinity)                                                  \
    static void measure_##name(const unsigned char *at, int count, int parts,                      \
                               struct moments *found)                                              \
    {                                                                                              \
        if (parts & (PART_EXTREMES | PART_COUNTS)) {                                               \
            int##width##_t high, low;                                                              \
            find_extremes_key##width(at, count, &high, &low);                                      \
            widen_extremes(found, number_of_##name(high), number_of_##name(low));                  \
            if (high >= (infinity) || low <= ~(infinity))                                          \
                count_specials_##width(at, count, (infinity), parts, found);                       \
        }                                                                                          \
        MEASURE_REST(name, key##width)                                                             \
    }

#define DEFINE_INTEGER_BLOCK(name, key_type)                                                       \
    static void measure_##name(const unsigned char *at, int count, int parts,                      \
                               struct moments *found)                                              \
    {                                                                                              \
        if (parts & PART_EXTREMES) {                                                               \
            key_type high, low;                                                                    \
            find_extremes_##name(at, count, &high, &low);                                          \
            widen_extremes(found, (double)high, (double)low);                                      \
        }                                                                                          \
        MEASURE_REST(name, name)                                                                   \
    }

#define MEASURE_REST(name, signs)                                                                  \
    if (parts & PART_SUMS) {                                                                       \
        double total, squares;                                                                     \
        sum_##name(at, count, &total, &squares);                                                   \
        found->total += total, found->squares += squares;                                          \
    }                                                                                              \
    if (parts & PART_COUNTS) {                                                                     \
        int64_t positives, negatives;                                                              \
        count_signs_##signs(at, count, &positives, &negatives);                                    \
        found->positives += positives, found->negatives += negatives;                              \
    }

DEFINE_FLOAT_BLOCK(float64, 64, 0x7ff0000000000000)
DEFINE_FLOAT_BLOCK(float32, 32, 0x7f800000)
DEFINE_FLOAT_BLOCK(float16, 16, 0x7c00)
DEFINE_FLOAT_BLOCK(bfloat16, 16, 0x7f80)
DEFINE_INTEGER_BLOCK(int64, int64_t)
DEFINE_INTEGER_BLOCK(int32, int32_t)
DEFINE_INTEGER_BLOCK(int16, int16_t)
DEFINE_INTEGER_BLOCK(int8, int8_t)
DEFINE_INTEGER_BLOCK(uint64, uint64_t)
DEFINE_INTEGER_BLOCK(uint32, uint32_t)
DEFINE_INTEGER_BLOCK(uint16, uint16_t)
DEFINE_INTEGER_BLOCK(uint8, uint8_t)

static void measure_bool(const unsigned char *at, int count, int parts, struct moments *found)
{
    int64_t trues, none;
    (void)parts;
    count_signs_uint8(at, count, &trues, &none);
    widen_extremes(found, trues > 0, trues == count);
    found->total += (double)trues, found->squares += (double)trues;
    found->positives += trues;
}

typedef void block_measure(const unsigned char *, int, int, struct moments *);

static block_measure *const block_measures[ELEMENT_CODES] = {
    measure_bool, measure_int8, measure_int16, measure_int32, measure_int64,
    measure_uint8, measure_uint16, measure_uint32, measure_uint64,
    measure_float16, measure_bfloat16, measure_float32, measure_float64,
};

/* Adds a block of at most BLOCK_ELEMENTS to the moments found so far; zeros are left to `finish`. */
void VARIANT(measure_block)(const unsigned char *data, int64_t count, int code, int parts,
                            struct moments *found)
{
    block_measures[code](data, (int)count, parts, found);
}

/* Finds the moments of `count` elements block by block, so that later loops read a block from the
   cache. */
void VARIANT(measure_elements)(const unsigned char *data, int64_t count, int code, int parts,
                               struct moments *found)
{
    const int64_t bytes = element_bytes[code];
    block_measure *measure = block_measures[code];
    *found = EMPTY_MOMENTS;
    const unsigned mode = keep_denormals();
    for (int64_t at = 0; at < count; at += BLOCK_ELEMENTS) {
        const int64_t size = count - at < BLOCK_ELEMENTS ? count - at : BLOCK_ELEMENTS;
        measure(data + at * bytes, (int)size, parts, found);
    }
    restore_mode(mode);
    if (parts & PART_COUNTS)
        found->zeros = count - found->positives - found->negatives - found->nans;
}

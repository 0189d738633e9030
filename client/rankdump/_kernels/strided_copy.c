/* Copy between two arrays whose axes are in different orders in memory, which converts tensors from
   the blocks of a device format and back.

   Neighbouring axes with the same layout on both sides are joined into one, and elements that are
   neighbours on both sides into one larger element. What remains is a transposition of planes: one
   axis is contiguous in the target, another one in the source. A plane is copied in tiles in which
   every cache line is read and written as a whole, because the lines of a tile often belong to the
   same set of the cache. */

#include "streamed_copy.h"

/* A row of a tile is one register; with AVX2 two tiles share a register. */
#if defined(__AVX2__)
#include <immintrin.h>
#define TILES 2
typedef __m256i row;
#define LOAD_ROW(at) _mm256_loadu_si256((const __m256i *)(at))
#define ZIP_LOW_8 _mm256_unpacklo_epi8
#define ZIP_LOW_16 _mm256_unpacklo_epi16
#define ZIP_LOW_32 _mm256_unpacklo_epi32
#define ZIP_LOW_64 _mm256_unpacklo_epi64
#define ZIP_HIGH_8 _mm256_unpackhi_epi8
#define ZIP_HIGH_16 _mm256_unpackhi_epi16
#define ZIP_HIGH_32 _mm256_unpackhi_epi32
#define ZIP_HIGH_64 _mm256_unpackhi_epi64
#define STORE_ROW(at, next, value)                                                                 \
    (_mm_storeu_si128((__m128i *)(at), _mm256_castsi256_si128(value)),                             \
     _mm_storeu_si128((__m128i *)(next), _mm256_extracti128_si256(value, 1)))
#elif defined(__SSE2__)
#include <emmintrin.h>
#define TILES 1
typedef __m128i row;
#define LOAD_ROW(at) _mm_loadu_si128((const __m128i *)(at))
#define ZIP_LOW_8 _mm_unpacklo_epi8
#define ZIP_LOW_16 _mm_unpacklo_epi16
#define ZIP_LOW_32 _mm_unpacklo_epi32
#define ZIP_LOW_64 _mm_unpacklo_epi64
#define ZIP_HIGH_8 _mm_unpackhi_epi8
#define ZIP_HIGH_16 _mm_unpackhi_epi16
#define ZIP_HIGH_32 _mm_unpackhi_epi32
#define ZIP_HIGH_64 _mm_unpackhi_epi64
#define STORE_ROW(at, next, value) _mm_storeu_si128((__m128i *)(at), value)
#elif defined(__aarch64__)
#include <arm_neon.h>
#define TILES 1
typedef uint8x16_t row;
#define LOAD_ROW(at) vld1q_u8(at)
#define STORE_ROW(at, next, value) vst1q_u8(at, value)
#define ZIP_OF(width, half, a, b)                                                                  \
    vreinterpretq_u8_u##width(vzip##half##q_u##width(vreinterpretq_u##width##_u8(a),               \
                                                     vreinterpretq_u##width##_u8(b)))
#define ZIP_LOW_8(a, b) vzip1q_u8(a, b)
#define ZIP_LOW_16(a, b) ZIP_OF(16, 1, a, b)
#define ZIP_LOW_32(a, b) ZIP_OF(32, 1, a, b)
#define ZIP_LOW_64(a, b) ZIP_OF(64, 1, a, b)
#define ZIP_HIGH_8(a, b) vzip2q_u8(a, b)
#define ZIP_HIGH_16(a, b) ZIP_OF(16, 2, a, b)
#define ZIP_HIGH_32(a, b) ZIP_OF(32, 2, a, b)
#define ZIP_HIGH_64(a, b) ZIP_OF(64, 2, a, b)
#endif

#define CACHE_LINE_BYTES 64
/* Bytes of a source row that one pass over a plane copies: few enough rows of the target stay in the
   cache. */
#define PASS_BYTES 512

/* A plane: `rows` neighbours in the target, `columns` neighbours in the source. It is passed by
   value, so that no byte of the target can be part of it and it stays in registers. */
struct plane {
    int64_t rows, columns;
    int64_t row_step;    /* bytes from row to row in the source */
    int64_t column_step; /* bytes from column to column in the target */
};

/* -- planes of elements of one register or less -------------------------------------------------- */

#ifdef TILES
/* Interleaving the first and the second half of the rows log2(side) times transposes them. */
#define DEFINE_TILE(width)                                                                         \
    static inline __attribute__((always_inline)) void transpose_tile_##width(                      \
        unsigned char *target, const unsigned char *source, struct plane plane)                    \
    {                                                                                              \
        enum { SIDE = 128 / width };                                                               \
        row rows[SIDE], zipped[SIDE];                                                              \
        _Pragma("GCC unroll 16")                                                                   \
        for (int i = 0; i < SIDE; i++)                                                             \
            rows[i] = LOAD_ROW(source + i * plane.row_step);                                       \
        _Pragma("GCC unroll 4")                                                                    \
        for (int stage = SIDE; stage > 1; stage /= 2) {                                            \
            _Pragma("GCC unroll 8")                                                                \
            for (int i = 0; i < SIDE / 2; i++) {                                                   \
                zipped[2 * i] = ZIP_LOW_##width(rows[i], rows[i + SIDE / 2]);                      \
                zipped[2 * i + 1] = ZIP_HIGH_##width(rows[i], rows[i + SIDE / 2]);                 \
            }                                                                                      \
            _Pragma("GCC unroll 16")                                                               \
            for (int i = 0; i < SIDE; i++)                                                         \
                rows[i] = zipped[i];                                                               \
        }                                                                                          \
        _Pragma("GCC unroll 16")                                                                   \
        for (int i = 0; i < SIDE; i++)                                                             \
            STORE_ROW(target + i * plane.column_step,                                              \
                      target + (i + SIDE) * plane.column_step, rows[i]);                           \
    }
#define SIDE_OF(width) (128 / (width))
#else
#define TILES 1
#define DEFINE_TILE(width)                                                                         \
    static inline void transpose_tile_##width(unsigned char *target, const unsigned char *source,  \
                                              struct plane plane)                                  \
    {                                                                                              \
        (void)plane;                                                                               \
        memcpy(target, source, width / 8);                                                         \
    }
#define SIDE_OF(width) 1
#endif

/* Copies one line of the target, with the columns from `first` to `last`. */
#define DEFINE_PLANE(width)                                                                        \
    DEFINE_TILE(width)                                                                             \
    static void copy_elements_##width(unsigned char *target, const unsigned char *source,          \
                                      struct plane plane, int64_t rows, int64_t first,             \
                                      int64_t last)                                                \
    {                                                                                              \
        for (int64_t column = first; column < last; column++)                                      \
            for (int64_t i = 0; i < rows; i++)                                                     \
                memcpy(target + column * plane.column_step + i * (width / 8),                      \
                       source + i * plane.row_step + column * (width / 8), width / 8);             \
    }                                                                                              \
    static void transpose_line_##width(unsigned char *target, const unsigned char *source,         \
                                       struct plane plane, int64_t rows, int64_t first,            \
                                       int64_t last)                                               \
    {                                                                                              \
        enum { SIDE = SIDE_OF(width) };                                                            \
        const int64_t whole = rows / SIDE * SIDE;                                                  \
        int64_t column = first;                                                                    \
        for (; column + TILES * SIDE <= last; column += TILES * SIDE)                              \
            for (int64_t i = 0; i < whole; i += SIDE)                                              \
                transpose_tile_##width(                                                            \
                    target + column * plane.column_step + i * (width / 8),                         \
                    source + i * plane.row_step + column * (width / 8), plane);                    \
        copy_elements_##width(target, source, plane, whole, column, last);                         \
        copy_elements_##width(target + whole * (width / 8), source + whole * plane.row_step,       \
                              plane, rows - whole, first, last);                                   \
    }                                                                                              \
    static void transpose_plane_##width(unsigned char *target, const unsigned char *source,        \
                                        struct plane plane)                                        \
    {                                                                                              \
        enum { LINE = CACHE_LINE_BYTES * 8 / width, PASS = PASS_BYTES * 8 / width };               \
        for (int64_t first = 0; first < plane.columns; first += PASS) {                            \
            const int64_t last = first + PASS < plane.columns ? first + PASS : plane.columns;      \
            for (int64_t at = 0; at < plane.rows; at += LINE) {                                    \
                const int64_t rows = plane.rows - at < LINE ? plane.rows - at : LINE;              \
                transpose_line_##width(target + at * (width / 8), source + at * plane.row_step,    \
                                       plane, rows, first, last);                                  \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_PLANE(8)
DEFINE_PLANE(16)
DEFINE_PLANE(32)
DEFINE_PLANE(64)

/* -- planes of larger elements ------------------------------------------------------------------- */

/* On the side where neighbours are farther apart, often by a power of two, lines belong to the same
   set of the cache, which holds few lines. So a tile has few of these lines, and long rows on the
   other side. */
#define NEAR_BYTES (4 * CACHE_LINE_BYTES)
#define FAR_BYTES (16 * CACHE_LINE_BYTES)

#define COPY_TILES(outer, outer_extent, outer_size, inner, inner_extent, inner_size)               \
    for (int64_t outer##_at = 0; outer##_at < (outer_extent); outer##_at += (outer_size)) {        \
        const int64_t outer##_end = smaller(outer##_at + (outer_size), outer_extent);              \
        for (int64_t inner##_at = 0; inner##_at < (inner_extent); inner##_at += (inner_size)) {    \
            const int64_t inner##_end = smaller(inner##_at + (inner_size), inner_extent);          \
            for (int64_t outer = outer##_at; outer < outer##_end; outer++)                         \
                for (int64_t inner = inner##_at; inner < inner##_end; inner++)                     \
                    memcpy(target + column * plane.column_step + row * bytes,                      \
                           source + row * plane.row_step + column * bytes, (size_t)bytes);         \
        }                                                                                          \
    }

static inline int64_t absolute(int64_t number) { return number < 0 ? -number : number; }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline __attribute__((always_inline)) void copy_large_plane(
    unsigned char *target, const unsigned char *source, struct plane plane, int64_t bytes)
{
    const int64_t few = bytes < NEAR_BYTES ? NEAR_BYTES / bytes : 1;
    const int64_t many = bytes < FAR_BYTES ? FAR_BYTES / bytes : 1;
    if (absolute(plane.column_step) > absolute(plane.row_step))
        COPY_TILES(row, plane.rows, many, column, plane.columns, few)
    else
        COPY_TILES(column, plane.columns, many, row, plane.rows, few)
}

static void copy_plane(unsigned char *target, const unsigned char *source,
                       struct plane plane, int64_t bytes)
{
    switch (bytes) { /* with a constant size, memcpy is a few instructions */
    case 1: transpose_plane_8(target, source, plane); return;
    case 2: transpose_plane_16(target, source, plane); return;
    case 4: transpose_plane_32(target, source, plane); return;
    case 8: transpose_plane_64(target, source, plane); return;
    case 16: copy_large_plane(target, source, plane, 16); return;
    case 32: copy_large_plane(target, source, plane, 32); return;
    case 64: copy_large_plane(target, source, plane, 64); return;
    case 128: copy_large_plane(target, source, plane, 128); return;
    default: copy_large_plane(target, source, plane, bytes); return;
    }
}

/* -- planes of a large copy, past the caches ------------------------------------------------------ */

/* Size in bytes from which the target does not stay in the caches. Its lines are then written past
   the caches as a whole, so that they are not read first; writing a line in two parts would cost
   more than that saves. */
#define STREAMED_BYTES (1 << 22)
/* Minimum number of contiguous bytes in the target. */
#define MIN_RUN_BYTES 256
#define MAX_RUN_BYTES 512
/* Maximum number of contiguous bytes in the source, and maximum number of runs that they go to. */
#define READ_BYTES 256
#define MAX_RUNS 64
/* A block stays in the nearest cache; this gap puts its runs into different sets. */
#define RUN_GAP_BYTES CACHE_LINE_BYTES
#define BLOCK_BYTES (MAX_RUNS * (MIN_RUN_BYTES + RUN_GAP_BYTES))

/* Returns whether cache lines begin at the same rows in all columns of the target. */
static int is_plane_streamed(const unsigned char *target, struct plane plane, int64_t bytes)
{
#ifndef STREAM
    return 0;
#endif
    const int64_t over = (intptr_t)target & (CACHE_LINE_BYTES - 1);
    return bytes <= CACHE_LINE_BYTES && plane.rows * bytes >= MIN_RUN_BYTES
           && plane.column_step % CACHE_LINE_BYTES == 0 && over % bytes == 0;
}

static void stream_plane(unsigned char *target, const unsigned char *source,
                         struct plane plane, int64_t bytes)
{
    unsigned char block[BLOCK_BYTES] __attribute__((aligned(CACHE_LINE_BYTES)));
    const int64_t runs = smaller(smaller(READ_BYTES / bytes, MAX_RUNS), plane.columns);
    const int64_t run_bytes = smaller(BLOCK_BYTES / runs - RUN_GAP_BYTES, MAX_RUN_BYTES);
    const int64_t most = run_bytes / bytes, step = run_bytes + RUN_GAP_BYTES;
    for (int64_t at = 0, rows; at < plane.rows; at += rows) {
        /* A run ends at the end of a cache line. */
        const int64_t over = (intptr_t)(target + at * bytes) & (CACHE_LINE_BYTES - 1);
        rows = smaller(most - over / bytes, plane.rows - at);
        for (int64_t first = 0; first < plane.columns; first += runs) {
            const struct plane part = {rows, smaller(runs, plane.columns - first),
                                       plane.row_step, step};
            copy_plane(block, source + at * plane.row_step + first * bytes, part, bytes);
            for (int64_t run = 0; run < part.columns; run++)
                stream_bytes(target + (first + run) * plane.column_step + at * bytes,
                             block + run * step, part.rows * bytes);
        }
    }
    end_streams();
}

/* -- what a copy is made of ---------------------------------------------------------------------- */

/* Sorts the axes as in the target, and joins those that have the same layout on both sides. */
static struct strided_copy simplify(const struct strided_copy *plan)
{
    struct strided_copy made = {.item_bytes = plan->item_bytes};
    int *const count = &made.dimensions;
    for (int axis = 0; axis < plan->dimensions; axis++) {
        if (plan->extents[axis] == 1)
            continue;
        int at = (*count)++;
        for (; at && absolute(made.target_strides[at - 1]) < absolute(plan->target_strides[axis]);
             at--) {
            made.extents[at] = made.extents[at - 1];
            made.target_strides[at] = made.target_strides[at - 1];
            made.source_strides[at] = made.source_strides[at - 1];
        }
        made.extents[at] = plan->extents[axis];
        made.target_strides[at] = plan->target_strides[axis];
        made.source_strides[at] = plan->source_strides[axis];
    }
    int kept = 0;
    for (int axis = 0; axis < *count; axis++) {
        const int64_t extent = made.extents[axis];
        const int64_t target = made.target_strides[axis], source = made.source_strides[axis];
        if (kept && made.target_strides[kept - 1] == extent * target
            && made.source_strides[kept - 1] == extent * source) {
            kept--;
            made.extents[kept] *= extent;
        } else {
            made.extents[kept] = extent;
        }
        made.target_strides[kept] = target, made.source_strides[kept++] = source;
    }
    *count = kept;
    if (kept && made.target_strides[kept - 1] == made.item_bytes
        && made.source_strides[kept - 1] == made.item_bytes)
        made.item_bytes *= made.extents[--*count];
    return made;
}

static int64_t count_bytes(const struct strided_copy *plan)
{
    int64_t bytes = plan->item_bytes;
    for (int axis = 0; axis < plan->dimensions; axis++)
        bytes *= plan->extents[axis];
    return bytes;
}

static void remove_axis(struct strided_copy *plan, int axis)
{
    for (plan->dimensions--; axis < plan->dimensions; axis++) {
        plan->extents[axis] = plan->extents[axis + 1];
        plan->target_strides[axis] = plan->target_strides[axis + 1];
        plan->source_strides[axis] = plan->source_strides[axis + 1];
    }
}

/* Returns the axis whose neighbours are neighbours in the source; -1 if there is none. */
static int find_source_axis(const struct strided_copy *plan)
{
    for (int axis = 0; axis < plan->dimensions - 1; axis++)
        if (plan->source_strides[axis] == plan->item_bytes)
            return axis;
    return -1;
}

static void copy_row(unsigned char *target, const unsigned char *source, int64_t count,
                     int64_t target_step, int64_t source_step, int64_t bytes)
{
#define COPY_ITEMS(size)                                                                           \
    for (int64_t i = 0; i < count; i++)                                                            \
    memcpy(target + i * target_step, source + i * source_step, (size_t)(size))
    switch (bytes) {
    case 1: COPY_ITEMS(1); return;
    case 2: COPY_ITEMS(2); return;
    case 4: COPY_ITEMS(4); return;
    case 8: COPY_ITEMS(8); return;
    case 16: COPY_ITEMS(16); return;
    default: COPY_ITEMS(bytes); return;
    }
}

void VARIANT(copy_strided)(unsigned char *target, const unsigned char *source,
                           const struct strided_copy *wanted)
{
    for (int axis = 0; axis < wanted->dimensions; axis++)
        if (wanted->extents[axis] == 0)
            return;
    struct strided_copy plan = simplify(wanted);
    const int64_t bytes = plan.item_bytes;
    int64_t count = 1, target_step = bytes, source_step = bytes;
    struct plane plane = {0};
    if (plan.dimensions) {
        const int inner = plan.dimensions - 1;
        const int across = plan.target_strides[inner] == bytes ? find_source_axis(&plan) : -1;
        if (across >= 0) {
            plane = (struct plane){plan.extents[inner], plan.extents[across],
                                   plan.source_strides[inner], plan.target_strides[across]};
            remove_axis(&plan, inner), remove_axis(&plan, across);
        } else {
            count = plan.extents[inner];
            target_step = plan.target_strides[inner], source_step = plan.source_strides[inner];
            remove_axis(&plan, inner);
        }
    }
    const int is_streamed = is_plane_streamed(target, plane, bytes)
                            && count_bytes(wanted) >= STREAMED_BYTES;
    int64_t indices[MAX_DIMENSIONS] = {0}, target_at = 0, source_at = 0;
    for (;;) {
        if (is_streamed)
            stream_plane(target + target_at, source + source_at, plane, bytes);
        else if (plane.rows)
            copy_plane(target + target_at, source + source_at, plane, bytes);
        else
            copy_row(target + target_at, source + source_at, count, target_step, source_step, bytes);
        int axis = plan.dimensions - 1;
        for (; axis >= 0; axis--) {
            target_at += plan.target_strides[axis], source_at += plan.source_strides[axis];
            if (++indices[axis] < plan.extents[axis])
                break;
            target_at -= plan.target_strides[axis] * plan.extents[axis];
            source_at -= plan.source_strides[axis] * plan.extents[axis];
            indices[axis] = 0;
        }
        if (axis < 0)
            return;
    }
}

/* -- bytes that lie alike on both sides ------------------------------------------------------------ */

void VARIANT(stream_memory)(unsigned char *target, const unsigned char *source, int64_t bytes)
{
    stream_bytes(target, source, bytes);
    end_streams();
}

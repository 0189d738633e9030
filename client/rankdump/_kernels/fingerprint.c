/* Fingerprint of a shard: a digest, a sketch and moments that add up over the shards of a tensor, in
   any partition and order.

   An element with the global index g in the tensor, in C order, has the hash h = splitmix64(g). The
   digest is the sum of (h | 1) * (bits + 1) modulo 2**64, where bits are those of the element; the
   factor is odd, so a change of one element always changes the digest. The sketch is a CountSketch
   (Charikar, Chen and Farach-Colton, 2002): the element adds its value to bucket h >> 58, with a
   negative sign if bit 57 of h is set. The distance of two sketches estimates the distance of the
   tensors. Elements that are not finite count only in the digest and the moments.

   splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */

#include "widening.h"

#define GOLDEN_GAMMA 0x9e3779b97f4a7c15

/* A step of the index is a step of its product with the constant, modulo 2**64. */
static void hash_run(uint64_t first, uint64_t stride, int count, uint64_t *hashes)
{
    uint64_t state = (first + 1) * GOLDEN_GAMMA;
    const uint64_t step = stride * GOLDEN_GAMMA;
    for (int i = 0; i < count; i++, state += step) {
        uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        hashes[i] = z ^ z >> 31;
    }
}

/* Position within a shard: the current run along the innermost dimension, and how much of it is
   done. */
struct position {
    int64_t indices[MAX_DIMENSIONS];
    uint64_t run;
    int64_t done;
};

static void hash_block(const struct shard *shard, struct position *at, int count, uint64_t *hashes)
{
    const int inner = shard->dimensions - 1;
    const uint64_t stride = shard->strides[inner];
    while (count) {
        const int64_t left = shard->extents[inner] - at->done;
        const int size = left < count ? (int)left : count;
        hash_run(at->run + stride * (uint64_t)at->done, stride, size, hashes);
        hashes += size, count -= size, at->done += size;
        if (at->done < shard->extents[inner])
            continue;
        at->done = 0;
        for (int axis = inner - 1; axis >= 0; axis--) {
            at->run += shard->strides[axis];
            if (++at->indices[axis] < shard->extents[axis])
                break;
            at->run -= shard->strides[axis] * (uint64_t)shard->extents[axis];
            at->indices[axis] = 0;
        }
    }
}

#define DEFINE_DIGEST(width)                                                                       \
    static uint64_t digest_##width(const unsigned char *at, int count, const uint64_t *hashes)     \
    {                                                                                              \
        const word##width *elements = (const word##width *)at;                                     \
        uint64_t digest = 0;                                                                       \
        for (int i = 0; i < count; i++) {                                                          \
            uint64_t weight = hashes[i] | 1;                                                       \
            digest += weight * elements[i] + weight;                                               \
        }                                                                                          \
        return digest;                                                                             \
    }

DEFINE_DIGEST(8)
DEFINE_DIGEST(16)
DEFINE_DIGEST(32)
DEFINE_DIGEST(64)

static uint64_t digest_block(const unsigned char *at, int count, int bytes, const uint64_t *hashes)
{
    switch (bytes) {
    case 1: return digest_8(at, count, hashes);
    case 2: return digest_16(at, count, hashes);
    case 4: return digest_32(at, count, hashes);
    default: return digest_64(at, count, hashes);
    }
}

/* -- values of a block --------------------------------------------------------------------------- */

#define DEFINE_VALUES(name, bytes)                                                                 \
    static void widen_block_##name(const unsigned char *at, int count, uint64_t *values)           \
    {                                                                                              \
        for (; count >= 4; count -= 4, at += 4 * (bytes), values += 4) {                           \
            double4 four = widen_##name(at);                                                       \
            memcpy(values, &four, sizeof four);                                                    \
        }                                                                                          \
        unsigned char last[4 * (bytes)] = {0};                                                     \
        memcpy(last, at, (size_t)count * (bytes));                                                 \
        double4 four = widen_##name(last);                                                         \
        memcpy(values, &four, (size_t)count * sizeof four[0]);                                     \
    }

DEFINE_VALUES(bool, 1)
DEFINE_VALUES(int8, 1)
DEFINE_VALUES(int16, 2)
DEFINE_VALUES(int32, 4)
DEFINE_VALUES(int64, 8)
DEFINE_VALUES(uint8, 1)
DEFINE_VALUES(uint16, 2)
DEFINE_VALUES(uint32, 4)
DEFINE_VALUES(uint64, 8)
DEFINE_VALUES(float16, 2)
DEFINE_VALUES(bfloat16, 2)
DEFINE_VALUES(float32, 4)
DEFINE_VALUES(float64, 8)

typedef void block_widening(const unsigned char *, int, uint64_t *);

static block_widening *const block_widenings[ELEMENT_CODES] = {
    widen_block_bool, widen_block_int8, widen_block_int16, widen_block_int32, widen_block_int64,
    widen_block_uint8, widen_block_uint16, widen_block_uint32, widen_block_uint64,
    widen_block_float16, widen_block_bfloat16, widen_block_float32, widen_block_float64,
};

static void clear_nonfinite(uint64_t *values, int count)
{
    for (int i = 0; i < count; i++)
        values[i] = (values[i] & INT64_MAX) < 0x7ff0000000000000 ? values[i] : 0;
}

/* The buckets of a block are added to those of the shard at once: this costs a few more additions,
   but the error of the sums hardly grows with the size of the tensor. */
static void add_to_sketch(const uint64_t *values, int count, const uint64_t *hashes, double *sketch)
{
    double buckets[SKETCH_BUCKETS] = {0};
    for (int i = 0; i < count; i++) {
        const uint64_t bits = values[i] ^ (hashes[i] << 6 & 0x8000000000000000);
        double value;
        memcpy(&value, &bits, sizeof value);
        buckets[hashes[i] >> 58] += value;
    }
    for (int i = 0; i < SKETCH_BUCKETS; i++)
        sketch[i] += buckets[i];
}

void VARIANT(fingerprint_shard)(const unsigned char *data, const struct shard *shard, int code,
                                struct fingerprint *found)
{
    const int bytes = element_bytes[code];
    uint64_t hashes[BLOCK_ELEMENTS], values[BLOCK_ELEMENTS];
    struct position at = {.run = shard->first};
    int64_t left = 1;
    for (int axis = 0; axis < shard->dimensions; axis++)
        left *= shard->extents[axis];
    *found = (struct fingerprint){.moments = EMPTY_MOMENTS};
    const unsigned mode = keep_denormals();
    int64_t zeros = left;
    for (; left; data += BLOCK_ELEMENTS * bytes) {
        const int count = left < BLOCK_ELEMENTS ? (int)left : BLOCK_ELEMENTS;
        const struct moments *m = &found->moments;
        const int64_t nonfinite = m->nans + m->positive_infinities + m->negative_infinities;
        hash_block(shard, &at, count, hashes);
        found->digest += digest_block(data, count, bytes, hashes);
        VARIANT(measure_block)(data, count, code, PART_EXTREMES | PART_SUMS | PART_COUNTS,
                               &found->moments);
        block_widenings[code](data, count, values);
        if (m->nans + m->positive_infinities + m->negative_infinities > nonfinite)
            clear_nonfinite(values, count);
        add_to_sketch(values, count, hashes, found->sketch);
        left -= count;
    }
    restore_mode(mode);
    found->moments.zeros = zeros - found->moments.positives - found->moments.negatives
                           - found->moments.nans;
}

/* Statistics of plain memory in one read: min, max, sum, sum of squares, NaN, Inf and zero counts, checksum.
 *
 * Plain C interface, no Python and no torch inside. Values are accumulated in float64, or exactly for
 * integers. Memory is walked in blocks of 16k elements, so that the checksum finds a block in the cache.
 */

#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 16384
#define STRIP 512
#define GATHERED 4096 /* elements copied together before they are measured */
#define DIRECT_RUN 256 /* shorter runs are gathered */

/* One row of the table of results; columns.py names the same fields. */
typedef struct {
    double max, min, sum, sum_of_squares;
    int64_t nan_count, inf_count, zero_count;
    uint64_t checksum, flags;
} row;

enum { HAS_RANGE = 1, HAS_SUMS = 2, HAS_COUNTS = 4, HAS_CHECKSUM = 8 };
enum { NO_CHECKSUM, CRC, XOR };
enum {
    FLOAT32, FLOAT64, FLOAT16, BFLOAT16, BOOLEAN, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64, DTYPES
};

static const int ITEM_BYTES[DTYPES] = {4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8};

typedef struct {
    double high, low, sum, squares;
    int64_t signed_high, signed_low;
    uint64_t unsigned_high, unsigned_low;
    __int128 whole;
    int64_t nans, infinities, zeros;
    uint64_t checksum;
} totals;

typedef void (*loop)(const void *data, int64_t count, totals *out);
typedef struct {
    loop measure[DTYPES];
    uint64_t (*xor_words)(const void *data, int64_t bytes);
} loops;

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* float16: shifting puts the exponent 112 too low, which the factor mends, also for subnormals. */
static inline float half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13;
    float finite = as_float(magnitude) * 0x1p112f;
    uint32_t special = magnitude | 0x7f800000u;
    uint32_t is_special = -(uint32_t)(magnitude >= 0x0f800000u);
    uint32_t chosen;
    memcpy(&chosen, &finite, sizeof chosen);
    return as_float(sign | (special & is_special) | (chosen & ~is_special));
}

/* 64-bit integers to double by their halves, as processors without such an instruction vectorise it. */
static inline double lower_half(uint64_t x) { return as_double((x & 0xffffffffu) | 0x4330000000000000u) - 0x1p52; }
static inline double unsigned_wide(uint64_t x) {
    return (as_double((x >> 32) | 0x4530000000000000u) - 0x1p84) + lower_half(x);
}
static inline double signed_wide(int64_t x) {
    uint64_t flipped = ((uint64_t)x >> 32) ^ 0x80000000u;
    return (as_double(flipped | 0x4530000000000000u) - (0x1p84 + 0x1p63)) + lower_half((uint64_t)x);
}

#define SAME(x) (x)
#define TRUTH(x) ((x) != 0)
#define HALF(x) half(x)
#define BRAIN(x) as_float((uint32_t)(x) << 16)
#define SIGNED_UPPER(x) ((x) >> 32)
#define UNSIGNED_UPPER(x) ((int64_t)((x) >> 32))
#define SIGNED_WIDE(x) signed_wide(x)
#define UNSIGNED_WIDE(x) unsigned_wide(x)

#define TARGET
#define NAME(x) plain_##x
#include "kernel_body.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
#define NAME(x) avx2_##x
#include "kernel_body.h"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi,bmi2,prefer-vector-width=512")))
#define NAME(x) avx512_##x
#include "kernel_body.h"
#endif

static const loops *chosen = &plain_set;

/* Instruction sets, best last. */
static const char *const SETS[] = {"baseline", "avx2", "avx512"};

static int is_supported(int set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (set == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (set == 2)
        return is_supported(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return set == 0;
}

/* Use an instruction set; returns its name, or NULL when this processor lacks it. */
EXPORT const char *rankscope_use(int set) {
    if (set < 0 || set > 2 || !is_supported(set)) return NULL;
#if defined(__x86_64__)
    const loops *const sets[] = {&plain_set, &avx2_set, &avx512_set};
    chosen = sets[set];
#endif
    return SETS[set];
}

static void begin(totals *t) {
    memset(t, 0, sizeof *t);
    t->high = -INFINITY;
    t->low = INFINITY;
    t->signed_high = INT64_MIN;
    t->signed_low = INT64_MAX;
    t->unsigned_low = UINT64_MAX;
}

static void walk(const char *data, int64_t count, int dtype, int checksum, totals *t) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t some = count - first < BLOCK ? count - first : BLOCK;
        const char *block = data + first * ITEM_BYTES[dtype];
        chosen->measure[dtype](block, some, t);
        if (checksum == XOR) t->checksum ^= chosen->xor_words(block, some * ITEM_BYTES[dtype]);
    }
}

/* Returns 1 when a column cannot hold the value: integers beyond 2**53, float64 sums out of range. */
static int finish(const totals *t, int dtype, int checksum, row *out) {
    int attention = 0;
    if (dtype <= BFLOAT16) {
        out->max = t->nans ? NAN : t->high;
        out->min = t->nans ? NAN : t->low;
        out->sum = t->sum;
        double largest = fmax(fabs(t->high), fabs(t->low));
        if (dtype == FLOAT64 && !t->nans && !t->infinities)
            attention = !isfinite(t->sum) || !isfinite(t->squares) || (largest > 0 && t->squares < 1e-280);
    } else {
        const __int128 exact = (__int128)1 << 53;
        int is_signed = dtype == INT8 || dtype == INT16 || dtype == INT32 || dtype == INT64;
        __int128 high = is_signed ? (__int128)t->signed_high : (__int128)t->unsigned_high;
        __int128 low = is_signed ? (__int128)t->signed_low : (__int128)t->unsigned_low;
        out->max = (double)high;
        out->min = (double)low;
        out->sum = (double)t->whole;
        attention = high > exact || low < -exact || t->whole > exact || t->whole < -exact;
    }
    out->sum_of_squares = t->squares;
    out->nan_count = t->nans;
    out->inf_count = t->infinities;
    out->zero_count = t->zeros;
    out->checksum = t->checksum;
    out->flags = HAS_RANGE | HAS_SUMS | HAS_COUNTS | (checksum ? HAS_CHECKSUM : 0);
    return attention;
}

EXPORT int rankscope_row_bytes(void) { return sizeof(row); }

/* `count` values that lie together, at least one; `code` is 16 * checksum + dtype. */
EXPORT int rankscope_measure(const void *data, int64_t count, row *out, int code) {
    totals t;
    begin(&t);
    walk(data, count, code & 15, code >> 4, &t);
    return finish(&t, code & 15, code >> 4, out);
}

typedef struct {
    char values[GATHERED * 8];
    int64_t used;
    int dtype, checksum;
    totals *t;
} gatherer;

static void flush(gatherer *g) {
    walk(g->values, g->used, g->dtype, g->checksum, g->t);
    g->used = 0;
}

#define COPY(TYPE)                                                         \
    for (int64_t i = 0; i < some; i++)                                     \
        ((TYPE *)g->values)[g->used + i] = ((const TYPE *)run)[i * stride];

static void gather(gatherer *g, const char *run, int64_t size, int64_t stride) {
    const int bytes = ITEM_BYTES[g->dtype];
    while (size) {
        const int64_t room = GATHERED - g->used, some = size < room ? size : room;
        switch (bytes) {
            case 1: COPY(uint8_t) break;
            case 2: COPY(uint16_t) break;
            case 4: COPY(uint32_t) break;
            default: COPY(uint64_t)
        }
        g->used += some;
        if (g->used == GATHERED) flush(g);
        run += some * stride * bytes;
        size -= some;
    }
}

/* Values spread over memory: `extents` holds a size and a stride, in elements, for each of `dimensions`,
 * outermost first and none of size 0. A checksum is of the values in that order. */
EXPORT int rankscope_measure_strided(const void *data, int dimensions, const int64_t *extents, row *out, int code) {
    totals t;
    begin(&t);
    gatherer g;
    g.used = 0, g.dtype = code & 15, g.checksum = code >> 4, g.t = &t;
    const int inner = dimensions - 1, bytes = ITEM_BYTES[g.dtype];
    const int64_t size = extents[2 * inner], stride = extents[2 * inner + 1];
    const int direct = stride == 1 && size >= DIRECT_RUN && !g.checksum;
    int64_t index[64] = {0}, offset = 0;
    for (;;) {
        const char *run = (const char *)data + offset * bytes;
        if (direct)
            walk(run, size, g.dtype, g.checksum, &t);
        else
            gather(&g, run, size, stride);
        int d = inner - 1;
        for (; d >= 0; d--) {
            offset += extents[2 * d + 1];
            if (++index[d] < extents[2 * d]) break;
            offset -= extents[2 * d] * extents[2 * d + 1];
            index[d] = 0;
        }
        if (d < 0) break;
    }
    flush(&g);
    return finish(&t, g.dtype, g.checksum, out);
}

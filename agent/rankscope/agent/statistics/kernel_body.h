/* The loops, compiled once per instruction set: TARGET and NAME(x) are defined by the includer. */

#define PRAGMA(...) _Pragma(#__VA_ARGS__)

/* Any floating values, accumulated in double. */
#define FLOATING(NAME_, STORED, NUMBER, LOAD)                                                     \
    TARGET static void NAME(NAME_)(const void *data, int64_t count, totals *out) {                \
        const STORED *restrict values = data;                                                     \
        NUMBER high = -INFINITY, low = INFINITY;                                                  \
        double sum = 0, squares = 0;                                                              \
        int32_t zeros = 0;                                                                        \
        PRAGMA(omp simd simdlen(16) reduction(max:high) reduction(min:low)                        \
               reduction(+:sum,squares,zeros))                                                    \
        for (int64_t i = 0; i < count; i++) {                                                     \
            NUMBER x = LOAD(values[i]);                                                           \
            high = x > high ? x : high;                                                           \
            low = x < low ? x : low;                                                              \
            double wide = x;                                                                      \
            sum += wide;                                                                          \
            squares += wide * wide;                                                               \
            zeros += x == 0;                                                                      \
        }                                                                                         \
        int32_t nans = 0, infinities = 0;                                                         \
        if (!(squares < INFINITY)) /* rare: some value, or its square, is not finite */           \
            for (int64_t i = 0; i < count; i++) {                                                 \
                NUMBER x = LOAD(values[i]);                                                       \
                nans += x != x;                                                                   \
                infinities += x == INFINITY || x == -INFINITY;                                    \
            }                                                                                     \
        if (high > out->high) out->high = high;                                                   \
        if (low < out->low) out->low = low;                                                       \
        out->sum += sum;                                                                          \
        out->squares += squares;                                                                  \
        out->nans += nans;                                                                        \
        out->infinities += infinities;                                                            \
        out->zeros += zeros;                                                                      \
    }

/* Values that fit float: strips of 512 in float (8 additions a lane), strips together in double. Three times as
 * fast, and off by 1e-7 at most while squares are far from the limits of float; else taken again in double.
 * The four places in a strip that are read together confuse the hardware's prefetching, so that is done here:
 * 16M elements take 4 ms with it and 11 without. */
#define SINGLE(NAME_, STORED, READ)                                                               \
    TARGET static void NAME(NAME_)(const void *data, int64_t count, totals *out) {                \
        const STORED *restrict values = data;                                                     \
        const int64_t whole = count - count % STRIP;                                              \
        float high = -INFINITY, low = INFINITY;                                                   \
        double sum = 0, squares = 0;                                                              \
        int64_t zeros = 0;                                                                        \
        for (int64_t first = 0; first < whole; first += STRIP) {                                  \
            for (int32_t i = 0; i < STRIP * (int32_t)sizeof(STORED); i += 64)                     \
                __builtin_prefetch((const char *)(values + first) + i);                           \
            READ(values + first)                                                                  \
            float strip_sum = 0, squares_0 = 0, squares_1 = 0;                                    \
            int32_t strip_zeros = 0;                                                              \
            PRAGMA(omp simd reduction(max:high) reduction(min:low)                                \
                   reduction(+:strip_sum,squares_0,squares_1,strip_zeros))                        \
            for (int32_t i = 0; i < STRIP / 4; i++) {                                             \
                float a = strip[i], b = strip[i + STRIP / 4];                                     \
                float c = strip[i + STRIP / 2], d = strip[i + 3 * (STRIP / 4)];                   \
                float ab = a > b ? a : b, cd = c > d ? c : d;                                     \
                ab = ab > cd ? ab : cd;                                                           \
                high = ab > high ? ab : high;                                                     \
                ab = a < b ? a : b, cd = c < d ? c : d;                                           \
                ab = ab < cd ? ab : cd;                                                           \
                low = ab < low ? ab : low;                                                        \
                strip_sum += (a + b) + (c + d);                                                   \
                squares_0 += a * a;                                                               \
                squares_0 += b * b;                                                               \
                squares_1 += c * c;                                                               \
                squares_1 += d * d;                                                               \
                strip_zeros += (a == 0) + (b == 0) + (c == 0) + (d == 0);                         \
            }                                                                                     \
            sum += strip_sum;                                                                     \
            squares += (double)squares_0 + squares_1;                                             \
            zeros += strip_zeros;                                                                 \
        }                                                                                         \
        float largest = high > -low ? high : -low;                                                \
        if (!(squares < INFINITY) || largest > 1e15f || (largest < 1e-15f && largest != 0)) {     \
            NAME(NAME_##_wide)(data, count, out);                                                 \
            return;                                                                               \
        }                                                                                         \
        if (whole) {                                                                              \
            if (high > out->high) out->high = high;                                               \
            if (low < out->low) out->low = low;                                                   \
            out->sum += sum;                                                                      \
            out->squares += squares;                                                              \
            out->zeros += zeros;                                                                  \
        }                                                                                         \
        if (whole < count) NAME(NAME_##_wide)(values + whole, count - whole, out);                \
    }

#define READ_SINGLE(from) const float *restrict strip = from;
#define READ_HALF(from) float strip[STRIP]; for (int32_t i = 0; i < STRIP; i++) strip[i] = half((from)[i]);
#define READ_BRAIN(from) float strip[STRIP]; for (int32_t i = 0; i < STRIP; i++) strip[i] = BRAIN((from)[i]);

#define INTEGER(NAME_, STORED, LOAD, SUM, SQUARES, LEAST, MOST, HIGH, LOW)                        \
    TARGET static void NAME(NAME_)(const void *data, int64_t count, totals *out) {                \
        const STORED *restrict values = data;                                                     \
        STORED high = LEAST, low = MOST;                                                          \
        SUM sum = 0;                                                                              \
        SQUARES squares = 0;                                                                      \
        int32_t zeros = 0;                                                                        \
        PRAGMA(omp simd reduction(max:high) reduction(min:low) reduction(+:sum,squares,zeros))    \
        for (int64_t i = 0; i < count; i++) {                                                     \
            STORED x = LOAD(values[i]);                                                           \
            high = x > high ? x : high;                                                           \
            low = x < low ? x : low;                                                              \
            sum += (SUM)x;                                                                        \
            squares += (SQUARES)x * (SQUARES)x;                                                   \
            zeros += x == 0;                                                                      \
        }                                                                                         \
        if (high > out->HIGH) out->HIGH = high;                                                   \
        if (low < out->LOW) out->LOW = low;                                                       \
        out->whole += sum;                                                                        \
        out->squares += (double)squares;                                                          \
        out->zeros += zeros;                                                                      \
    }

/* 64-bit: the sum in two halves, so that no addition overflows. */
#define LONG_INTEGER(NAME_, STORED, UPPER, WIDE, LEAST, MOST, HIGH, LOW)                          \
    TARGET static void NAME(NAME_)(const void *data, int64_t count, totals *out) {                \
        const STORED *restrict values = data;                                                     \
        STORED high = LEAST, low = MOST;                                                          \
        uint64_t lower = 0;                                                                       \
        int64_t upper = 0;                                                                        \
        double squares = 0;                                                                       \
        int64_t zeros = 0;                                                                        \
        PRAGMA(omp simd reduction(max:high) reduction(min:low)                                    \
               reduction(+:lower,upper,squares,zeros))                                            \
        for (int64_t i = 0; i < count; i++) {                                                     \
            STORED x = values[i];                                                                 \
            high = x > high ? x : high;                                                           \
            low = x < low ? x : low;                                                              \
            lower += (uint64_t)x & 0xffffffffu;                                                   \
            upper += UPPER(x);                                                                    \
            double wide = WIDE(x);                                                                \
            squares += wide * wide;                                                               \
            zeros += x == 0;                                                                      \
        }                                                                                         \
        if (high > out->HIGH) out->HIGH = high;                                                   \
        if (low < out->LOW) out->LOW = low;                                                       \
        out->whole += ((__int128)upper << 32) + lower;                                            \
        out->squares += squares;                                                                  \
        out->zeros += zeros;                                                                      \
    }

FLOATING(float64, double, double, SAME)
FLOATING(float32_wide, float, float, SAME)
FLOATING(float16_wide, uint16_t, float, HALF)
FLOATING(bfloat16_wide, uint16_t, float, BRAIN)
SINGLE(float32, float, READ_SINGLE)
SINGLE(float16, uint16_t, READ_HALF)
SINGLE(bfloat16, uint16_t, READ_BRAIN)
INTEGER(boolean, uint8_t, TRUTH, int32_t, uint32_t, 0, UINT8_MAX, unsigned_high, unsigned_low)
INTEGER(int8, int8_t, SAME, int32_t, int32_t, INT8_MIN, INT8_MAX, signed_high, signed_low)
INTEGER(uint8, uint8_t, SAME, int32_t, uint32_t, 0, UINT8_MAX, unsigned_high, unsigned_low)
INTEGER(int16, int16_t, SAME, int32_t, int64_t, INT16_MIN, INT16_MAX, signed_high, signed_low)
INTEGER(uint16, uint16_t, SAME, int32_t, int64_t, 0, UINT16_MAX, unsigned_high, unsigned_low)
INTEGER(int32, int32_t, SAME, int64_t, double, INT32_MIN, INT32_MAX, signed_high, signed_low)
INTEGER(uint32, uint32_t, SAME, int64_t, double, 0, UINT32_MAX, unsigned_high, unsigned_low)
LONG_INTEGER(int64, int64_t, SIGNED_UPPER, SIGNED_WIDE, INT64_MIN, INT64_MAX, signed_high, signed_low)
LONG_INTEGER(uint64, uint64_t, UNSIGNED_UPPER, UNSIGNED_WIDE, 0, UINT64_MAX, unsigned_high, unsigned_low)

TARGET static uint64_t NAME(xor_words)(const void *data, int64_t bytes) {
    const uint64_t *restrict words = data;
    uint64_t value = 0;
    PRAGMA(omp simd reduction(^:value))
    for (int64_t i = 0; i < bytes / 8; i++)
        value ^= words[i];
    if (bytes % 8) {
        uint64_t last = 0;
        memcpy(&last, words + bytes / 8, bytes % 8);
        value ^= last;
    }
    return value;
}

static const loops NAME(set) = {
    {NAME(float32), NAME(float64), NAME(float16), NAME(bfloat16), NAME(boolean), NAME(int8),
     NAME(uint8), NAME(int16), NAME(uint16), NAME(int32), NAME(uint32), NAME(int64), NAME(uint64)},
    NAME(xor_words),
};

#undef PRAGMA
#undef FLOATING
#undef SINGLE
#undef READ_SINGLE
#undef READ_HALF
#undef READ_BRAIN
#undef INTEGER
#undef LONG_INTEGER
#undef TARGET
#undef NAME

/* 8 floats at a time, in the vector types of GCC and clang.
 *
 * What is written with them once is compiled for every instruction set by DK_VARIANTS, and has the same bits
 * on each: no step depends on the width of the registers, and nothing is fused. */

#ifndef EDGEDSV4_WIDE_H
#define EDGEDSV4_WIDE_H

#include "native.h"

enum { DK_WIDE = 8 };

typedef float dk_wide __attribute__((vector_size(32)));
typedef int32_t dk_wide_int __attribute__((vector_size(32)));
typedef uint32_t dk_wide_bits __attribute__((vector_size(32)));
typedef float dk_wide_at __attribute__((vector_size(32), aligned(4), may_alias));

/* Define static void `name` as the inlined function `body` for each instruction set, and the choice. */
#ifdef DK_X86
#define DK_VARIANTS(name, body, parameters, arguments)                                                   \
    static void name##_scalar parameters { body arguments; }                                             \
    DK_AVX2 static void name##_avx2 parameters { body arguments; }                                       \
    DK_AVX512 static void name##_avx512 parameters { body arguments; }                                   \
    static void name parameters                                                                          \
    {                                                                                                    \
        if (dk_level >= DK_LEVEL_AVX512)                                                                 \
            name##_avx512 arguments;                                                                     \
        else if (dk_level >= DK_LEVEL_AVX2)                                                              \
            name##_avx2 arguments;                                                                       \
        else                                                                                             \
            name##_scalar arguments;                                                                     \
    }
#else
#define DK_VARIANTS(name, body, parameters, arguments) \
    static void name parameters { body arguments; }
#endif

#if defined(__clang__)
#define DK_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define DK_SHUFFLE(v, ...) __builtin_shuffle(v, (dk_wide_int){__VA_ARGS__})
#endif
/* Lanes i and i ^ distance change places. */
#define DK_SWAP_1(v) DK_SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6)
#define DK_SWAP_2(v) DK_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5)
#define DK_SWAP_4(v) DK_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3)

DK_INLINE dk_wide dk_wide_of(float value)
{
    return (dk_wide){value, value, value, value, value, value, value, value};
}

/* `count` floats, then zeros. */
DK_INLINE dk_wide dk_wide_load(const float *p, int64_t count)
{
    if (count == DK_WIDE)
        return *(const dk_wide_at *)p;
    dk_wide value = {0};
    for (int64_t i = 0; i < count; i++)
        value[i] = p[i];
    return value;
}

DK_INLINE void dk_wide_store(float *p, dk_wide value, int64_t count)
{
    if (count == DK_WIDE) {
        *(dk_wide_at *)p = value;
        return;
    }
    for (int64_t i = 0; i < count; i++)
        p[i] = value[i];
}

/* a where mask is all ones, b where it is zero. */
DK_INLINE dk_wide dk_wide_select(dk_wide_int mask, dk_wide a, dk_wide b)
{
    return (dk_wide)((mask & (dk_wide_int)a) | (~mask & (dk_wide_int)b));
}

/* All ones for NaN and +inf. */
DK_INLINE dk_wide_int dk_not_below_infinity(dk_wide v) { return ~(v < dk_wide_of(INFINITY)); }

/* Bounded from above or below; a NaN stays. */
DK_INLINE dk_wide dk_wide_at_most(dk_wide x, dk_wide limit) { return dk_wide_select(x > limit, limit, x); }
DK_INLINE dk_wide dk_wide_at_least(dk_wide x, dk_wide limit) { return dk_wide_select(x < limit, limit, x); }

DK_INLINE float dk_wide_sum(dk_wide v)
{
    v += DK_SWAP_4(v);
    v += DK_SWAP_2(v);
    v += DK_SWAP_1(v);
    return v[0];
}

/* e^x within 2 units in the last place: x = n ln 2 + r, e^x = 2^n e^r. NaN stays NaN. */
DK_INLINE dk_wide dk_wide_exp(dk_wide x)
{
    const dk_wide rounder = dk_wide_of(0x1.8p23f); /* adding it leaves a whole number in the low bits */
    x = dk_wide_at_least(dk_wide_at_most(x, dk_wide_of(89.0f)), dk_wide_of(-104.0f));
    dk_wide shifted = x * dk_wide_of(0x1.715476p+0f) + rounder;
    dk_wide n = shifted - rounder;
    /* ln 2 in two parts, the first of so few bits that its product with n is exact. */
    dk_wide r = x - n * dk_wide_of(0x1.62e4p-1f) - n * dk_wide_of(0x1.7f7d1cp-20f);
    dk_wide p = dk_wide_of(1.0f / 5040) * r + dk_wide_of(1.0f / 720);
    p = p * r + dk_wide_of(1.0f / 120);
    p = p * r + dk_wide_of(1.0f / 24);
    p = p * r + dk_wide_of(1.0f / 6);
    p = p * r + dk_wide_of(0.5f);
    p = (p * r * r + r) + dk_wide_of(1.0f);
    /* 2^n in two factors, since n may be beyond the exponents of a float. */
    dk_wide_int whole = (dk_wide_int)((dk_wide_bits)shifted - (dk_wide_bits)rounder);
    dk_wide_int half = whole >> 1;
    dk_wide_bits low = (dk_wide_bits)half + 127u;
    dk_wide_bits high = (dk_wide_bits)whole - (dk_wide_bits)half + 127u;
    return p * (dk_wide)(low << 23) * (dk_wide)(high << 23);
}

DK_INLINE dk_wide dk_wide_sigmoid(dk_wide x)
{
    return dk_wide_of(1.0f) / (dk_wide_of(1.0f) + dk_wide_exp(-x));
}

/* The sum of squares of a row, in an order that depends on n alone. */
DK_INLINE float dk_wide_sum_of_squares(const float *x, int64_t n)
{
    dk_wide sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * DK_WIDE <= n; i += 4 * DK_WIDE) {
        for (int part = 0; part < 4; part++) {
            dk_wide v = dk_wide_load(x + i + part * DK_WIDE, DK_WIDE);
            sums[part] += v * v;
        }
    }
    for (; i < n; i += DK_WIDE) {
        dk_wide v = dk_wide_load(x + i, dk_min(n - i, DK_WIDE));
        sums[0] += v * v;
    }
    return dk_wide_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* Rows of n floats per task, so that a task is worth handing over. */
DK_INLINE int64_t dk_rows_per_task(int64_t n)
{
    enum { TASK_FLOATS = 1 << 14 };
    return dk_max(1, TASK_FLOATS / dk_max(1, n));
}

#endif

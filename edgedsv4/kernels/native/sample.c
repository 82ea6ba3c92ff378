/* What the sampler needs of a row of logits besides a token. */

#include "wide.h"

/* The largest value; NaN when one is NaN or +inf. */
DK_INLINE void largest_body(float *result, const float *x, int64_t n)
{
    enum { CHAINS = 4 }; /* one alone would wait for every comparison */
    dk_wide best[CHAINS];
    dk_wide_int bad = {0};
    for (int chain = 0; chain < CHAINS; chain++)
        best[chain] = dk_wide_of(-INFINITY);
    int64_t i = 0;
    for (; i + CHAINS * DK_WIDE <= n; i += CHAINS * DK_WIDE) {
        for (int chain = 0; chain < CHAINS; chain++) {
            dk_wide v = dk_wide_load(x + i + chain * DK_WIDE, DK_WIDE);
            bad |= dk_not_below_infinity(v);
            best[chain] = dk_wide_select(v > best[chain], v, best[chain]);
        }
    }
    for (; i < n; i += DK_WIDE) {
        dk_wide v = best[0];
        for (int64_t lane = 0; lane < dk_min(DK_WIDE, n - i); lane++)
            v[lane] = x[i + lane];
        bad |= dk_not_below_infinity(v);
        best[0] = dk_wide_select(v > best[0], v, best[0]);
    }
    *result = best[0][0];
    for (int lane = 0; lane < CHAINS * DK_WIDE; lane++) {
        float value = best[lane / DK_WIDE][lane % DK_WIDE];
        *result = value > *result ? value : *result;
    }
    for (int lane = 0; lane < DK_WIDE; lane++)
        if (bad[lane])
            *result = NAN;
}

DK_VARIANTS(largest, largest_body, (float *result, const float *x, int64_t n), (result, x, n))

int64_t dk_argmax(const float *logits, int64_t n)
{
    float best = NAN;
    largest(&best, logits, n);
    if (!(best > -INFINITY))
        return -1;
    int64_t i = 0;
    while (logits[i] != best)
        i++;
    return i;
}

DK_INLINE void find_bad_body(int *result, const float *x, int64_t count)
{
    dk_wide bad = {0};
    int64_t i = 0;
    /* x - x is 0 for finite x, else NaN, and NaN stays in a sum. */
    for (; i + DK_WIDE <= count; i += DK_WIDE) {
        dk_wide v = dk_wide_load(x + i, DK_WIDE);
        bad += v - v;
    }
    if (i < count) {
        dk_wide v = dk_wide_load(x + i, count - i);
        bad += v - v;
    }
    *result = dk_wide_sum(bad) == 0;
}

DK_VARIANTS(find_bad, find_bad_body, (int *result, const float *x, int64_t count), (result, x, count))

int dk_all_finite(const float *x, int64_t count)
{
    int result = 1;
    find_bad(&result, x, count);
    return result;
}

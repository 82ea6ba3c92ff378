/* What the sampler needs of a row of logits. */

#include "wide.h"

DK_INLINE dk_wide_int not_below_infinity(dk_wide v) { return ~(v < dk_wide_of(INFINITY)); }

/* The largest value; NaN when one is NaN or +inf. */
DK_INLINE void largest_body(float *result, const float *x, int64_t n)
{
    dk_wide best = dk_wide_of(-INFINITY);
    dk_wide_int bad = {0};
    int64_t i = 0;
    for (; i + DK_WIDE <= n; i += DK_WIDE) {
        dk_wide v = dk_wide_load(x + i, DK_WIDE);
        bad |= not_below_infinity(v);
        best = dk_wide_select(v > best, v, best);
    }
    if (i < n) {
        dk_wide v = best;
        for (int64_t lane = 0; i + lane < n; lane++)
            v[lane] = x[i + lane];
        bad |= not_below_infinity(v);
        best = dk_wide_select(v > best, v, best);
    }
    *result = best[0];
    for (int lane = 0; lane < DK_WIDE; lane++) {
        if (bad[lane]) {
            *result = NAN;
            return;
        }
        *result = best[lane] > *result ? best[lane] : *result;
    }
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

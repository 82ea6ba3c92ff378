/* Walsh-Hadamard transform of rows in natural order, scaled by n^-0.5. The sums are those of the butterfly
 * stages one after another, so every instruction set gives the bits of the reference. */

#include "wide.h"

typedef struct {
    float *x;
    int64_t rows;
    int64_t n;
    float scale;
} hadamard_job;

/* Stages of distance 1, 2 and 4 within eight elements: a + b below, a - b above. */
DK_INLINE dk_wide inner_stages(dk_wide v)
{
    v = v * (dk_wide){1, -1, 1, -1, 1, -1, 1, -1} + DK_SWAP_1(v);
    v = v * (dk_wide){1, 1, -1, -1, 1, 1, -1, -1} + DK_SWAP_2(v);
    return v * (dk_wide){1, 1, 1, 1, -1, -1, -1, -1} + DK_SWAP_4(v);
}

static void small_row(float *x, int64_t n, float scale)
{
    for (int64_t half = 1; half < n; half *= 2) {
        for (int64_t i = 0; i < n; i++) {
            if (i & half)
                continue;
            float a = x[i], b = x[i + half];
            x[i] = a + b;
            x[i + half] = a - b;
        }
    }
    for (int64_t i = 0; i < n; i++)
        x[i] *= scale;
}

DK_INLINE void transform_body(float *x, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i += DK_WIDE)
        dk_wide_store(x + i, inner_stages(dk_wide_load(x + i, DK_WIDE)), DK_WIDE);
    for (int64_t half = DK_WIDE; half < n; half *= 2) {
        for (int64_t start = 0; start < n; start += 2 * half) {
            for (int64_t i = start; i < start + half; i += DK_WIDE) {
                dk_wide a = dk_wide_load(x + i, DK_WIDE), b = dk_wide_load(x + i + half, DK_WIDE);
                dk_wide_store(x + i, a + b, DK_WIDE);
                dk_wide_store(x + i + half, a - b, DK_WIDE);
            }
        }
    }
    for (int64_t i = 0; i < n; i += DK_WIDE)
        dk_wide_store(x + i, dk_wide_load(x + i, DK_WIDE) * dk_wide_of(scale), DK_WIDE);
}

DK_VARIANTS(transform_row, transform_body, (float *x, int64_t n, float scale), (x, n, scale))

static void transform_rows(void *arg, int64_t task)
{
    const hadamard_job *job = arg;
    int64_t step = dk_rows_per_task(job->n);
    for (int64_t row = task * step; row < dk_min((task + 1) * step, job->rows); row++) {
        if (job->n < DK_WIDE)
            small_row(job->x + row * job->n, job->n, job->scale);
        else
            transform_row(job->x + row * job->n, job->n, job->scale);
    }
}

int dk_hadamard(dk_run *run, float *x, int64_t rows, int64_t n)
{
    hadamard_job job = {x, rows, n, (float)(1.0 / sqrt((double)n))};
    return dk_parallel(run, dk_parts(rows, dk_rows_per_task(n)), transform_rows, &job);
}

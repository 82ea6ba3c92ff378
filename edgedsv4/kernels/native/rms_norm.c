/* RMS norm of rows: y = w * (x * rsqrt(mean(x^2) + eps)). */

#include "wide.h"

typedef struct {
    float *y;
    const float *x;
    const float *weight;
    int64_t rows;
    int64_t n;
    float eps;
} norm_job;

DK_INLINE void scale_part(float *y, const float *x, const float *weight, dk_wide factor, int64_t count)
{
    dk_wide v = dk_wide_load(x, count) * factor;
    dk_wide_store(y, weight == NULL ? v : dk_wide_load(weight, count) * v, count);
}

DK_INLINE void norm_body(const norm_job *job, int64_t row)
{
    int64_t n = job->n, i = 0;
    const float *x = job->x + row * n;
    float *y = job->y + row * n;
    const float *weight = job->weight;
    dk_wide factor = dk_wide_of(1.0f / sqrtf(dk_wide_sum_of_squares(x, n) / (float)n + job->eps));
    for (; i + DK_WIDE <= n; i += DK_WIDE)
        scale_part(y + i, x + i, weight == NULL ? NULL : weight + i, factor, DK_WIDE);
    if (i < n)
        scale_part(y + i, x + i, weight == NULL ? NULL : weight + i, factor, n - i);
}

DK_VARIANTS(norm_row, norm_body, (const norm_job *job, int64_t row), (job, row))

static void norm_rows(void *arg, int64_t task)
{
    const norm_job *job = arg;
    int64_t step = dk_rows_per_task(job->n);
    for (int64_t row = task * step; row < dk_min((task + 1) * step, job->rows); row++)
        norm_row(job, row);
}

int dk_rms_norm(dk_run *run, float *y, const float *x, const float *weight, int64_t rows, int64_t n, float eps)
{
    norm_job job = {y, x, weight, rows, n, eps};
    return dk_parallel(run, dk_parts(rows, dk_rows_per_task(n)), norm_rows, &job);
}

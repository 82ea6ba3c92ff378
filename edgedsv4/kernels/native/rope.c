/* Rotary embedding of the last dims of each head, in pairs (2i, 2i + 1):
 * (a, b) -> (a cos - b sin, a sin + b cos). */

#include "wide.h"

void dk_rope_table(float *cosines, float *sines, int64_t first, int64_t step, int64_t count,
                   const float *frequencies, int64_t half)
{
    for (int64_t t = 0; t < count; t++) {
        float position = (float)(first + t * step);
        for (int64_t i = 0; i < half; i++) {
            float angle = position * frequencies[i];
            cosines[t * half + i] = cosf(angle);
            sines[t * half + i] = sinf(angle);
        }
    }
}

typedef struct {
    float *x;
    int64_t rows; /* tokens * heads */
    int64_t heads;
    int64_t dim;
    const float *cosines;
    const float *sines;
    int64_t half;
    float sign;
} rope_job;

/* Four pairs from the first four lanes of c and s. */
DK_INLINE void rotate_four(float *x, const float *cosines, const float *sines, dk_wide signs)
{
    dk_wide c = {cosines[0], cosines[0], cosines[1], cosines[1], cosines[2], cosines[2], cosines[3], cosines[3]};
    dk_wide s = {sines[0], sines[0], sines[1], sines[1], sines[2], sines[2], sines[3], sines[3]};
    dk_wide v = dk_wide_load(x, DK_WIDE);
    dk_wide_store(x, v * c + DK_SWAP_1(v) * (s * signs), DK_WIDE);
}

DK_INLINE void rotate_body(const rope_job *job, int64_t row)
{
    int64_t token = row / job->heads, half = job->half, i = 0;
    float *x = job->x + (row + 1) * job->dim - 2 * half;
    const float *c = job->cosines + token * half;
    const float *s = job->sines + token * half;
    float p = job->sign;
    dk_wide signs = {-p, p, -p, p, -p, p, -p, p};
    for (; i + 4 <= half; i += 4)
        rotate_four(x + 2 * i, c + i, s + i, signs);
    for (; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c[i] + b * (s[i] * -p);
        x[2 * i + 1] = b * c[i] + a * (s[i] * p);
    }
}

DK_VARIANTS(rotate_row, rotate_body, (const rope_job *job, int64_t row), (job, row))

static void rotate_rows(void *arg, int64_t task)
{
    const rope_job *job = arg;
    int64_t step = dk_rows_per_task(2 * job->half);
    for (int64_t row = task * step; row < dk_min((task + 1) * step, job->rows); row++)
        rotate_row(job, row);
}

int dk_rope(dk_run *run, float *x, int64_t tokens, int64_t heads, int64_t dim, const float *cosines,
            const float *sines, int64_t half, int inverse)
{
    rope_job job = {x, tokens * heads, heads, dim, cosines, sines, half, inverse ? -1.0f : 1.0f};
    return dk_parallel(run, dk_parts(job.rows, dk_rows_per_task(2 * half)), rotate_rows, &job);
}

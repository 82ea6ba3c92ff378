/* Clamped SwiGLU: y = silu(min(gate, limit)) * clamp(up, -limit, limit). */

#include "expert_ffn.h"
#include "wide.h"

typedef struct {
    float *y;
    const float *gate;
    const float *up;
    int64_t count;
    float limit;
} swiglu_job;

enum { ELEMENTS_PER_TASK = 1 << 13 };

DK_INLINE void part(const swiglu_job *job, int64_t at, int64_t count)
{
    dk_wide limit = dk_wide_of(job->limit);
    dk_wide gate = dk_wide_at_most(dk_wide_load(job->gate + at, count), limit);
    dk_wide up = dk_wide_at_least(dk_wide_at_most(dk_wide_load(job->up + at, count), limit), -limit);
    dk_wide_store(job->y + at, gate * dk_wide_sigmoid(gate) * up, count);
}

DK_INLINE void range_body(const swiglu_job *job, int64_t first, int64_t last)
{
    int64_t i = first;
    for (; i + DK_WIDE <= last; i += DK_WIDE)
        part(job, i, DK_WIDE);
    if (i < last)
        part(job, i, last - i);
}

DK_VARIANTS(range, range_body, (const swiglu_job *job, int64_t first, int64_t last), (job, first, last))

static void one_task(void *arg, int64_t task)
{
    const swiglu_job *job = arg;
    range(job, task * ELEMENTS_PER_TASK, dk_min((task + 1) * ELEMENTS_PER_TASK, job->count));
}

void dk_swiglu_part(float *y, const float *gate, const float *up, int64_t count, float limit)
{
    swiglu_job job = {y, gate, up, count, limit};
    range(&job, 0, count);
}

int dk_swiglu(dk_run *run, float *y, const float *gate, const float *up, int64_t count, float limit)
{
    swiglu_job job = {y, gate, up, count, limit};
    return dk_parallel(run, dk_parts(count, ELEMENTS_PER_TASK), one_task, &job);
}

/* The compressor: every `ratio` tokens become one row, pooled by a softmax per channel over the window.
 *
 * With two series a window pools series A of the window before it, then its own series B; the first window
 * has only its own. A window is one task, from its raw rows to the stored row, so that it comes out the same
 * whatever else is in the chunk. */

#include "rows.h"
#include "vector_exp.h"

enum { BIAS_TOKENS_PER_TASK = 32, MAX_WIDTH = 4096 };

typedef struct {
    dk_run *run;
    const dk_compressor *state;
    int64_t start;
    int64_t tokens;
    const float *frequencies;
    int64_t half;
    float eps;
} job_t;

typedef struct {
    float top[MAX_WIDTH] DK_ALIGNED; /* largest gate of each channel */
    float sum[MAX_WIDTH] DK_ALIGNED;
    float row[MAX_WIDTH] DK_ALIGNED;
} pool_t;

static int64_t series_width(const dk_compressor *state) { return (int64_t)state->series * state->width; }

/* Values of a position; its gates follow series_width() later. */
static const float *raw_row(const job_t *job, int64_t position)
{
    const dk_compressor *state = job->state;
    int64_t stride = 2 * series_width(state);
    if (position >= job->start)
        return state->staged + (position - job->start) * stride;
    return state->ring + position % state->slots * stride;
}

/* ---- one slot of all channels ---- */

DK_INLINE void raise_top(float *restrict top, const float *restrict gates, int64_t width)
{
    for (int64_t c = 0; c < width; c++)
        top[c] = gates[c] > top[c] ? gates[c] : top[c];
}

DK_INLINE void add_slot(pool_t *restrict pool, const float *restrict gates, const float *restrict values,
                        int64_t width)
{
    for (int64_t c = 0; c < width; c++) {
        float weight = dk_exp(gates[c] - pool->top[c]);
        pool->sum[c] += weight;
        pool->row[c] += weight * values[c];
    }
}

#define SLOT_PASSES(level, attribute)                                                                       \
    static attribute void raise_top_##level(float *top, const float *gates, int64_t width)                 \
    {                                                                                                       \
        raise_top(top, gates, width);                                                                       \
    }                                                                                                       \
    static attribute void add_slot_##level(pool_t *pool, const float *gates, const float *values,          \
                                           int64_t width)                                                   \
    {                                                                                                       \
        add_slot(pool, gates, values, width);                                                               \
    }

SLOT_PASSES(scalar, )
#ifdef DK_X86
SLOT_PASSES(avx2, DK_AVX2)
SLOT_PASSES(avx512, DK_AVX512)
#endif

/* First pass (largest gates) or second pass (weighted sums) over one series of the positions of a window. */
static void pass_window(pool_t *pool, const job_t *job, int64_t window, int64_t series, int is_second)
{
    void (*raise)(float *, const float *, int64_t) = raise_top_scalar;
    void (*add)(pool_t *, const float *, const float *, int64_t) = add_slot_scalar;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512) {
        raise = raise_top_avx512;
        add = add_slot_avx512;
    } else if (dk_level >= DK_LEVEL_AVX2) {
        raise = raise_top_avx2;
        add = add_slot_avx2;
    }
#endif
    int64_t ratio = job->state->ratio, width = job->state->width;
    for (int64_t p = window * ratio; p < (window + 1) * ratio; p++) {
        const float *values = raw_row(job, p) + series * width;
        const float *gates = values + series_width(job->state);
        if (is_second)
            add(pool, gates, values, width);
        else
            raise(pool->top, gates, width);
    }
}

static void pool_window(pool_t *pool, const job_t *job, int64_t window)
{
    int64_t width = job->state->width, last = job->state->series - 1;
    for (int64_t c = 0; c < width; c++) {
        pool->top[c] = dk_float_of_bits(0xff800000u);
        pool->sum[c] = pool->row[c] = 0.0f;
    }
    for (int is_second = 0; is_second < 2; is_second++) {
        if (last == 1 && window > 0)
            pass_window(pool, job, window - 1, 0, is_second);
        pass_window(pool, job, window, last, is_second);
    }
    for (int64_t c = 0; c < width; c++)
        pool->row[c] /= pool->sum[c];
}

/* ---- tasks ---- */

static void bias_task(void *arg, int64_t task)
{
    const job_t *job = arg;
    const dk_compressor *state = job->state;
    int64_t width = series_width(state), from = task * BIAS_TOKENS_PER_TASK;
    int64_t to = dk_min(from + BIAS_TOKENS_PER_TASK, job->tokens);
    for (int64_t t = from; t < to; t++) {
        float *gates = state->staged + (2 * t + 1) * width;
        const float *bias = state->ape + (job->start + t) % state->ratio * width;
        for (int64_t c = 0; c < width; c++)
            gates[c] += bias[c];
    }
}

static void window_task(void *arg, int64_t task)
{
    const job_t *job = arg;
    const dk_compressor *state = job->state;
    int64_t width = state->width, window = job->start / state->ratio + task;
    float cosines[MAX_WIDTH / 2], sines[MAX_WIDTH / 2];
    pool_t pool;
    pool_window(&pool, job, window);
    dk_rms_norm(job->run, pool.row, pool.row, state->norm, 1, width, job->eps);
    dk_rope_table(cosines, sines, window * state->ratio, 1, 1, job->frequencies, job->half);
    dk_rope(job->run, pool.row, 1, 1, width, cosines, sines, job->half, 0);
    if (!dk_all_finite(pool.row, width))
        dk_mark_bad(job->run);
    if (state->has_hadamard)
        dk_hadamard(job->run, pool.row, 1, width);
    dk_rows_store(job->run, &state->rows, window, pool.row, 1);
}

int dk_compress(dk_run *run, const dk_compressor *state, int64_t start, int64_t tokens,
                const float *frequencies, int64_t half, float eps)
{
    job_t job = {run, state, start, tokens, frequencies, half, eps};
    int64_t bias_tasks = (tokens + BIAS_TOKENS_PER_TASK - 1) / BIAS_TOKENS_PER_TASK;
    if (dk_parallel(run, bias_tasks, bias_task, &job))
        return 1;
    return dk_parallel(run, (start + tokens) / state->ratio - start / state->ratio, window_task, &job);
}

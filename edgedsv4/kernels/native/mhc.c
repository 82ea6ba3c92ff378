/* Hyper-connections of 4 streams: what a sublayer reads and how it writes back.
 *
 * The 4 x 4 matrix of a token is two vectors, rows 0 and 1, rows 2 and 3: sums of rows and columns are
 * exchanges of lanes, and all of Sinkhorn stays in registers. */

#include "wide.h"

typedef struct {
    float *x;
    float *post;
    float *comb;
    const float *streams;
    const float *mix;
    const float *base;
    const float *scale;
    const float *norm;
    int64_t tokens;
    int64_t n;
    int32_t iterations;
    float hc_eps;
    float norm_eps;
} read_job;

typedef struct {
    dk_wide top;
    dk_wide bottom;
} square;

DK_INLINE dk_wide row_sums(dk_wide v)
{
    v += DK_SWAP_1(v);
    return v + DK_SWAP_2(v);
}

DK_INLINE dk_wide row_maxima(dk_wide v)
{
    v = dk_wide_at_least(v, DK_SWAP_1(v));
    return dk_wide_at_least(v, DK_SWAP_2(v));
}

DK_INLINE dk_wide softmax_of_rows(dk_wide v)
{
    v = dk_wide_exp(v - row_maxima(v));
    return v / row_sums(v);
}

DK_INLINE square divide_by_columns(square m, dk_wide eps)
{
    dk_wide sums = m.top + m.bottom;
    sums += DK_SWAP_4(sums) + eps;
    return (square){m.top / sums, m.bottom / sums};
}

DK_INLINE square divide_by_rows(square m, dk_wide eps)
{
    return (square){m.top / (row_sums(m.top) + eps), m.bottom / (row_sums(m.bottom) + eps)};
}

/* comb [4, 4] of a token from its part of the mix, and the factor that normalises the mix. */
DK_INLINE void sinkhorn(float *comb, const float *mix, const float *base, float scale, float factor,
                        const read_job *job)
{
    dk_wide eps = dk_wide_of(job->hc_eps), f = dk_wide_of(factor), s = dk_wide_of(scale);
    dk_wide top = dk_wide_load(mix, DK_WIDE) * f * s + dk_wide_load(base, DK_WIDE);
    dk_wide bottom = dk_wide_load(mix + 8, DK_WIDE) * f * s + dk_wide_load(base + 8, DK_WIDE);
    square m = {softmax_of_rows(top) + eps, softmax_of_rows(bottom) + eps};
    m = divide_by_columns(m, eps);
    for (int32_t i = 1; i < job->iterations; i++)
        m = divide_by_columns(divide_by_rows(m, eps), eps);
    dk_wide_store(comb, m.top, DK_WIDE);
    dk_wide_store(comb + 8, m.bottom, DK_WIDE);
}

DK_INLINE dk_wide weighted(const float *streams, int64_t n, const float *pre, int64_t count)
{
    dk_wide v = dk_wide_load(streams, count) * dk_wide_of(pre[0]);
    v += dk_wide_load(streams + n, count) * dk_wide_of(pre[1]);
    v += dk_wide_load(streams + 2 * n, count) * dk_wide_of(pre[2]);
    return v + dk_wide_load(streams + 3 * n, count) * dk_wide_of(pre[3]);
}

/* x [n] = rms_norm(sum_j pre_j X_j) * norm. */
DK_INLINE void read_one(float *x, const float *streams, const float *pre, const read_job *job)
{
    int64_t n = job->n, i = 0;
    for (; i + DK_WIDE <= n; i += DK_WIDE)
        dk_wide_store(x + i, weighted(streams + i, n, pre, DK_WIDE), DK_WIDE);
    if (i < n)
        dk_wide_store(x + i, weighted(streams + i, n, pre, n - i), n - i);
    dk_wide factor = dk_wide_of(1.0f / sqrtf(dk_wide_sum_of_squares(x, n) / (float)n + job->norm_eps));
    for (i = 0; i + DK_WIDE <= n; i += DK_WIDE) {
        dk_wide normed = dk_wide_load(x + i, DK_WIDE) * factor;
        dk_wide_store(x + i, dk_wide_load(job->norm + i, DK_WIDE) * normed, DK_WIDE);
    }
    for (; i < n; i++)
        x[i] = job->norm[i] * (x[i] * factor[0]);
}

/* What the norm of the flattened streams multiplies the mix with. */
DK_INLINE float mix_factor(const float *streams, const read_job *job)
{
    float size = (float)(4 * job->n);
    return 1.0f / sqrtf(dk_wide_sum_of_squares(streams, 4 * job->n) / size + job->norm_eps);
}

DK_INLINE void read_body(const read_job *job, int64_t token)
{
    const float *streams = job->streams + token * 4 * job->n;
    const float *mix = job->mix + token * 24;
    float factor = mix_factor(streams, job), s0 = job->scale[0], s1 = job->scale[1];
    dk_wide scales = {s0, s0, s0, s0, s1, s1, s1, s1};
    dk_wide gates = dk_wide_load(mix, DK_WIDE) * dk_wide_of(factor) * scales;
    gates = dk_wide_sigmoid(gates + dk_wide_load(job->base, DK_WIDE));
    float pre[4];
    for (int j = 0; j < 4; j++) {
        pre[j] = gates[j] + job->hc_eps;
        job->post[token * 4 + j] = 2 * gates[4 + j];
    }
    sinkhorn(job->comb + token * 16, mix + 8, job->base + 8, job->scale[2], factor, job);
    read_one(job->x + token * job->n, streams, pre, job);
}

DK_VARIANTS(read_token, read_body, (const read_job *job, int64_t token), (job, token))

static void read_tokens(void *arg, int64_t task)
{
    const read_job *job = arg;
    int64_t step = dk_rows_per_task(4 * job->n);
    for (int64_t token = task * step; token < dk_min((task + 1) * step, job->tokens); token++)
        read_token(job, token);
}

int dk_hyper_read(dk_run *run, float *x, float *post, float *comb, const float *streams, const float *mix,
                  const float *base, const float *scale, const float *norm, int64_t tokens, int64_t n,
                  int32_t iterations, float hc_eps, float norm_eps)
{
    read_job job = {x, post, comb, streams, mix, base, scale, norm, tokens, n, iterations, hc_eps, norm_eps};
    return dk_parallel(run, dk_parts(tokens, dk_rows_per_task(4 * n)), read_tokens, &job);
}

/* ---- the head ---- */

DK_INLINE void head_body(const read_job *job, int64_t token)
{
    const float *streams = job->streams + token * 4 * job->n;
    dk_wide mix = dk_wide_load(job->mix + token * 4, 4) * dk_wide_of(mix_factor(streams, job));
    dk_wide gates = dk_wide_sigmoid(mix * dk_wide_of(job->scale[0]) + dk_wide_load(job->base, 4));
    float pre[4];
    for (int j = 0; j < 4; j++)
        pre[j] = gates[j] + job->hc_eps;
    read_one(job->x + token * job->n, streams, pre, job);
}

DK_VARIANTS(head_token, head_body, (const read_job *job, int64_t token), (job, token))

static void head_tokens(void *arg, int64_t task)
{
    const read_job *job = arg;
    int64_t step = dk_rows_per_task(4 * job->n);
    for (int64_t token = task * step; token < dk_min((task + 1) * step, job->tokens); token++)
        head_token(job, token);
}

int dk_hyper_head(dk_run *run, float *x, const float *streams, const float *mix, const float *base,
                  const float *scale, const float *norm, int64_t tokens, int64_t n, float hc_eps,
                  float norm_eps)
{
    read_job job = {x, NULL, NULL, streams, mix, base, scale, norm, tokens, n, 0, hc_eps, norm_eps};
    return dk_parallel(run, dk_parts(tokens, dk_rows_per_task(4 * n)), head_tokens, &job);
}

/* ---- the write ---- */

typedef struct {
    float *y;
    const float *streams;
    const float *output;
    const float *post;
    const float *comb;
    int64_t tokens;
    int64_t n;
} write_job;

/* Elements at .. at + count of all four streams; they are read before one is written. */
DK_INLINE void write_part(const write_job *job, int64_t token, int64_t at, int64_t count)
{
    int64_t n = job->n;
    const float *streams = job->streams + token * 4 * n + at;
    const float *post = job->post + token * 4, *comb = job->comb + token * 16;
    dk_wide output = dk_wide_load(job->output + token * n + at, count), in[4], out[4];
    for (int j = 0; j < 4; j++)
        in[j] = dk_wide_load(streams + j * n, count);
    for (int k = 0; k < 4; k++) {
        out[k] = in[0] * dk_wide_of(comb[k]) + in[1] * dk_wide_of(comb[4 + k]);
        out[k] += in[2] * dk_wide_of(comb[8 + k]) + in[3] * dk_wide_of(comb[12 + k]);
        out[k] += output * dk_wide_of(post[k]);
    }
    for (int k = 0; k < 4; k++)
        dk_wide_store(job->y + token * 4 * n + k * n + at, out[k], count);
}

DK_INLINE void write_body(const write_job *job, int64_t token)
{
    int64_t i = 0;
    for (; i + DK_WIDE <= job->n; i += DK_WIDE)
        write_part(job, token, i, DK_WIDE);
    if (i < job->n)
        write_part(job, token, i, job->n - i);
}

DK_VARIANTS(write_token, write_body, (const write_job *job, int64_t token), (job, token))

static void write_tokens(void *arg, int64_t task)
{
    const write_job *job = arg;
    int64_t step = dk_rows_per_task(4 * job->n);
    for (int64_t token = task * step; token < dk_min((task + 1) * step, job->tokens); token++)
        write_token(job, token);
}

int dk_hyper_write(dk_run *run, float *y, const float *streams, const float *output, const float *post,
                   const float *comb, int64_t tokens, int64_t n)
{
    write_job job = {y, streams, output, post, comb, tokens, n};
    return dk_parallel(run, dk_parts(tokens, dk_rows_per_task(4 * n)), write_tokens, &job);
}

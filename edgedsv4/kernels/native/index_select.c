/* The lightning indexer: score = sum over heads of weight * relu(q . key), then the best rows of each token.
 *
 * Tokens go in batches whose scores fit the scratch memory. A task scores a range of keys for a few tokens,
 * key tile by key tile; another selects for one token. FP4 keys whose width is a multiple of 32 are scored in
 * integers (index_fp4.c), others in float32 by the dots of attention. */

#include "attend_tile.h"
#include "index_fp4.h"
#include "select_top.h"

enum { BATCH = 32, TOKENS_PER_TASK = 4, TILE_BYTES = 65536, DECODED_ROWS = 16, MAX_DIM = 1024, HEADS = 64 };

typedef struct {
    dk_run *run;
    int32_t *selected;
    float *scores; /* or NULL */
    const float *q;
    const float *weights;
    const dk_rows *keys;
    int64_t start;
    int64_t heads;
    int64_t dim;
    int64_t ratio;
    int64_t top;
    int64_t key_count; /* that the last token sees */
    int64_t score_stride;
    int64_t chunk; /* keys per task */
    int64_t first; /* token of the batch */
    int64_t count; /* tokens of the batch */
    float *rows;   /* [batch, score_stride] scores */
    float *scales; /* [batch, heads, dim / 32] */
    int32_t *starts;
    int8_t *codes; /* [batch, heads, dim] */
} job_t;

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t score_stride(int64_t keys) { return (keys + DK_INDEX_BLOCK - 1) / 16 * 16; }

static int64_t batch_tokens(int64_t threads) { return dk_max(threads, dk_min(BATCH, 4 * threads)); }

static int is_integer(const job_t *job)
{
    return job->keys->format == DK_ROWS_FP4 && job->dim % DK_FP4_GROUP == 0;
}

static int64_t visible_keys(const job_t *job, int64_t token) { return (job->start + token + 1) / job->ratio; }

/* A token that sees no more rows than it may take needs no scores. */
static int is_scored(const job_t *job, int64_t token)
{
    return job->scores != NULL || visible_keys(job, token) > job->top;
}

static dk_fp4_queries queries_of(const job_t *job, int64_t token)
{
    int64_t place = token - job->first, groups = job->heads * job->dim / DK_FP4_GROUP;
    dk_fp4_queries queries = {job->codes + place * job->heads * job->dim, job->scales + place * groups,
                              job->starts + place * groups};
    return queries;
}

/* ---- scoring ---- */

static void prepare_task(void *arg, int64_t task)
{
    const job_t *job = arg;
    int64_t token = job->first + task, size = job->heads * job->dim;
    if (!dk_all_finite(job->q + token * size, size) ||
        !dk_all_finite(job->weights + token * job->heads, job->heads))
        dk_mark_bad(job->run);
    if (is_integer(job) && is_scored(job, token)) {
        dk_fp4_queries queries = queries_of(job, token);
        dk_fp4_split_queries(&queries, job->q + token * size, job->heads, job->dim);
    }
}

static float *row_of(const job_t *job, int64_t token)
{
    return job->rows + (token - job->first) * job->score_stride;
}

static void score_integers(const job_t *job, int64_t first_token, int64_t tokens, int64_t key, int64_t stop)
{
    uint8_t bytes[TILE_BYTES] DK_ALIGNED;
    float scales[TILE_BYTES / DK_FP4_GROUP] DK_ALIGNED;
    int64_t size = TILE_BYTES / job->dim / DK_INDEX_BLOCK * DK_INDEX_BLOCK;
    for (; key < stop; key += size) {
        int64_t count = dk_min(size, stop - key);
        dk_fp4_expand(bytes, scales, job->keys, key, count);
        for (int64_t token = first_token; token < first_token + tokens; token++) {
            int64_t blocks = dk_min(count, visible_keys(job, token) - key) + DK_INDEX_BLOCK - 1;
            if (!is_scored(job, token) || blocks < DK_INDEX_BLOCK)
                continue;
            dk_fp4_queries queries = queries_of(job, token);
            dk_fp4_scores(row_of(job, token) + key, bytes, scales, blocks / DK_INDEX_BLOCK, &queries,
                          job->weights + token * job->heads, job->heads, job->dim);
        }
    }
}

/* Add heads to the scores of a tile, in order. */
DK_INLINE void add_heads(float *restrict scores, const float *restrict dots, const float *weights,
                         int64_t count, int64_t heads)
{
    for (int64_t h = 0; h < heads; h++)
        for (int64_t k = 0; k < count; k++) {
            float dot = dots[h * DK_TILE_ROWS + k];
            scores[k] += weights[h] * (dot < 0.0f ? 0.0f : dot); /* NaN stays */
        }
}

static void add_heads_scalar(float *scores, const float *dots, const float *weights, int64_t count,
                             int64_t heads)
{
    add_heads(scores, dots, weights, count, heads);
}

#ifdef DK_X86
static DK_AVX2 void add_heads_avx2(float *scores, const float *dots, const float *weights, int64_t count,
                                   int64_t heads)
{
    add_heads(scores, dots, weights, count, heads);
}
#endif

/* Scores of one token with at most DK_TILE_ROWS keys. */
static void score_tile(const job_t *job, const dk_tile_kernels *kernels, float *scores, int64_t token,
                       const float *keys, int64_t stride, int64_t count)
{
    float dots[HEADS * DK_TILE_ROWS] DK_ALIGNED;
    const float *weights = job->weights + token * job->heads;
    void (*add)(float *, const float *, const float *, int64_t, int64_t) = add_heads_scalar;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX2)
        add = add_heads_avx2;
#endif
    for (int64_t k = 0; k < count; k++)
        scores[k] = 0.0f;
    for (int64_t head = 0; head < job->heads; head += HEADS) {
        int64_t heads = dk_min(HEADS, job->heads - head);
        kernels->dots(dots, job->q + (token * job->heads + head) * job->dim, job->dim, keys, stride, count,
                      heads);
        add(scores, dots, weights + head, count, heads);
    }
}

static void score_floats(const job_t *job, int64_t first_token, int64_t tokens, int64_t key, int64_t stop)
{
    const dk_tile_kernels *kernels = dk_choose_tile_kernels(job->dim);
    float decoded[DECODED_ROWS * MAX_DIM] DK_ALIGNED;
    int is_plain = job->keys->format == DK_ROWS_F32;
    int64_t size = is_plain ? DK_TILE_ROWS : DECODED_ROWS;
    for (; key < stop; key += size) {
        int64_t count = dk_min(size, stop - key), stride = job->dim;
        const float *keys = decoded;
        if (is_plain) {
            keys = (const float *)(const void *)(job->keys->data + key * job->keys->data_stride);
            stride = job->keys->data_stride / 4;
        } else
            dk_rows_read(decoded, stride, job->keys, key, count);
        for (int64_t token = first_token; token < first_token + tokens; token++) {
            int64_t seen = dk_min(count, visible_keys(job, token) - key);
            if (is_scored(job, token) && seen > 0)
                score_tile(job, kernels, row_of(job, token) + key, token, keys, stride, seen);
        }
    }
}

static void score_task(void *arg, int64_t task)
{
    const job_t *job = arg;
    int64_t groups = (job->count + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
    int64_t token = job->first + task % groups * TOKENS_PER_TASK;
    int64_t tokens = dk_min(TOKENS_PER_TASK, job->first + job->count - token);
    int64_t key = task / groups * job->chunk;
    int64_t stop = dk_min(key + job->chunk, visible_keys(job, token + tokens - 1));
    (is_integer(job) ? score_integers : score_floats)(job, token, tokens, key, stop);
}

/* ---- selecting ---- */

static void select_task(void *arg, int64_t task)
{
    const job_t *job = arg;
    int64_t token = job->first + task, visible = visible_keys(job, token);
    int32_t *ids = job->selected + token * job->top;
    if (job->scores != NULL) {
        float *scores = job->scores + token * job->key_count;
        memcpy(scores, row_of(job, token), (size_t)visible * sizeof *scores);
        for (int64_t i = visible; i < job->key_count; i++)
            scores[i] = DK_MINUS_INFINITY;
    }
    if (is_scored(job, token)) {
        dk_select_top(ids, row_of(job, token), visible, job->top);
        return;
    }
    for (int64_t i = 0; i < job->top; i++)
        ids[i] = i < visible ? (int32_t)i : -1;
}

int64_t dk_index_scratch_bytes(int64_t keys, int64_t heads, int64_t dim, int32_t threads)
{
    int64_t per_token = aligned(4 * score_stride(keys)) + aligned(heads * dim) +
                        2 * aligned(4 * heads * (dim / DK_FP4_GROUP));
    return batch_tokens(threads) * per_token + 64;
}

static void lay_out(job_t *job, void *scratch, int64_t batch)
{
    int64_t groups = job->heads * (job->dim / DK_FP4_GROUP);
    uint8_t *at = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
    job->rows = (float *)(void *)at;
    at += aligned(4 * batch * job->score_stride);
    job->codes = (int8_t *)at;
    at += aligned(batch * job->heads * job->dim);
    job->scales = (float *)(void *)at;
    at += aligned(4 * batch * groups);
    job->starts = (int32_t *)(void *)at;
}

int dk_index_select(dk_run *run, int32_t *selected, float *scores, const float *q, const float *weights,
                    const dk_rows *keys, int64_t start, int64_t tokens, int64_t heads, int64_t dim,
                    int64_t ratio, int64_t top, void *scratch)
{
    int64_t batch = batch_tokens(run->threads);
    job_t job = {.run = run, .selected = selected, .scores = scores, .q = q, .weights = weights};
    job.keys = keys;
    job.start = start;
    job.heads = heads;
    job.dim = dim;
    job.ratio = ratio;
    job.top = top;
    job.key_count = (start + tokens) / ratio;
    job.score_stride = score_stride(job.key_count);
    job.chunk = TILE_BYTES / dim / DK_INDEX_BLOCK * DK_INDEX_BLOCK;
    lay_out(&job, scratch, batch);
    for (; job.first < tokens; job.first += job.count) {
        job.count = dk_min(batch, tokens - job.first);
        int64_t groups = (job.count + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
        int64_t chunks = (visible_keys(&job, job.first + job.count - 1) + job.chunk - 1) / job.chunk;
        if (dk_parallel(run, job.count, prepare_task, &job) ||
            dk_parallel(run, groups * chunks, score_task, &job) ||
            dk_parallel(run, job.count, select_task, &job))
            return 1;
    }
    return 0;
}

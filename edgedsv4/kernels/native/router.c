/* Expert routing: the k experts with the largest p + bias, p = sqrt(softplus(logits)), and their weights. */

#include "native.h"

typedef struct {
    int32_t *ids;
    float *weights;
    const float *logits;
    const float *bias;
    const int64_t *table;
    const int64_t *token_ids;
    const int32_t *given;
    int64_t tokens;
    int64_t experts;
    int64_t k;
    float scale;
    dk_run *run;
} route_job;

enum { TOKENS_PER_TASK = 4 };

static const float SUM_GUARD = 1e-20f;       /* a row of zeros divides to zero */
static const float SOFTPLUS_THRESHOLD = 20;  /* above it, softplus is its argument */

static float score(float logit)
{
    return sqrtf(logit > SOFTPLUS_THRESHOLD ? logit : log1pf(expf(logit)));
}

/* Whether a goes before b: larger first, NaN before all. */
static int is_before(float a, float b) { return a > b || (isnan(a) && !isnan(b)); }

/* Ids of the k best, the best first; `best` [k] is scratch. */
static void rank_best(int32_t *ids, float *best, const route_job *job, const float *logits)
{
    int64_t count = 0;
    for (int64_t expert = 0; expert < job->experts; expert++) {
        float value = score(logits[expert]) + (job->bias == NULL ? 0.0f : job->bias[expert]);
        if (count == job->k && !is_before(value, best[count - 1]))
            continue;
        int64_t place = count < job->k ? count++ : count - 1;
        for (; place > 0 && is_before(value, best[place - 1]); place--) {
            best[place] = best[place - 1];
            ids[place] = ids[place - 1];
        }
        best[place] = value;
        ids[place] = (int32_t)expert;
    }
}

/* Ids of the k best in order of id; `best` [k] is scratch. */
static void select_best(int32_t *ids, float *best, const route_job *job, const float *logits)
{
    rank_best(ids, best, job, logits);
    for (int64_t i = 1; i < job->k; i++) {
        int32_t id = ids[i];
        int64_t place = i;
        for (; place > 0 && ids[place - 1] > id; place--)
            ids[place] = ids[place - 1];
        ids[place] = id;
    }
}

static void weigh(float *weights, const int32_t *ids, const route_job *job, const float *logits)
{
    float sum = 0;
    for (int64_t i = 0; i < job->k; i++) {
        weights[i] = score(logits[ids[i]]);
        sum += weights[i];
    }
    for (int64_t i = 0; i < job->k; i++)
        weights[i] = weights[i] / (sum + SUM_GUARD) * job->scale;
}

static void route_token(const route_job *job, int64_t token)
{
    const float *logits = job->logits + token * job->experts;
    float *weights = job->weights + token * job->k;
    if (!dk_all_finite(logits, job->experts))
        __atomic_store_n(&job->run->bad, 1, __ATOMIC_RELAXED);
    if (job->given != NULL) {
        weigh(weights, job->given + token * job->k, job, logits);
        return;
    }
    int32_t *ids = job->ids + token * job->k;
    if (job->table == NULL) {
        select_best(ids, weights, job, logits);
    } else {
        for (int64_t i = 0; i < job->k; i++)
            ids[i] = (int32_t)job->table[job->token_ids[token] * job->k + i];
    }
    weigh(weights, ids, job, logits);
}

static void route_tokens(void *arg, int64_t task)
{
    const route_job *job = arg;
    int64_t last = dk_min((task + 1) * TOKENS_PER_TASK, job->tokens);
    for (int64_t token = task * TOKENS_PER_TASK; token < last; token++)
        route_token(job, token);
}

int dk_route(dk_run *run, int32_t *ids, float *weights, const float *logits, const float *bias,
             const int64_t *table, const int64_t *token_ids, int64_t tokens, int64_t experts, int64_t k,
             float scale)
{
    route_job job = {ids, weights, logits, bias, table, token_ids, NULL, tokens, experts, k, scale, run};
    return dk_parallel(run, dk_parts(tokens, TOKENS_PER_TASK), route_tokens, &job);
}

int dk_route_weights(dk_run *run, float *weights, const float *logits, const int32_t *ids, int64_t tokens,
                     int64_t experts, int64_t k, float scale)
{
    route_job job = {NULL, weights, logits, NULL, NULL, NULL, ids, tokens, experts, k, scale, run};
    return dk_parallel(run, dk_parts(tokens, TOKENS_PER_TASK), route_tokens, &job);
}

static void guess_tokens(void *arg, int64_t task)
{
    const route_job *job = arg;
    int64_t last = dk_min((task + 1) * TOKENS_PER_TASK, job->tokens);
    for (int64_t token = task * TOKENS_PER_TASK; token < last; token++) {
        float best[DK_MOST_GUESSES];
        rank_best(job->ids + token * job->k, best, job, job->logits + token * job->experts);
    }
}

int dk_route_guess(dk_run *run, int32_t *ids, const float *logits, const float *bias, int64_t tokens,
                   int64_t experts, int64_t most)
{
    route_job job = {ids, NULL, logits, bias, NULL, NULL, NULL, tokens, experts, most, 0, run};
    return dk_parallel(run, dk_parts(tokens, TOKENS_PER_TASK), guess_tokens, &job);
}

/* Experts that the CPU computes for a GPU: called in the middle of the GPU's stream, with nobody to report to
 * but the flag of the job. Copies that feed a GPU are here too. */

#include "native.h"
#include "host_desk.h"
#include "layer.h"

#include <math.h>
#include <time.h>

typedef struct {
    int32_t *ids; /* those of the CPU, -1 for the others */
    void *x_memory;
    void *experts;
} layout;

static int64_t lay_out(layout *l, const dk_experts *experts, int64_t tokens, uintptr_t base)
{
    uintptr_t at = base;
    l->ids = dk_take(&at, tokens * experts->k * 4);
    l->x_memory = dk_take(&at, dk_quantized_bytes(tokens, experts->hidden));
    l->experts = dk_take(&at, dk_experts_scratch_bytes(experts, tokens));
    return (int64_t)(at - base);
}

int64_t dk_host_experts_bytes(const dk_experts *experts, int64_t tokens)
{
    layout l;
    return lay_out(&l, experts, tokens, 0);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The step must end with an error, and every value that follows from this one shows it. */
static void fail(dk_host_job *job, int32_t why, int32_t id)
{
    int64_t count = job->tokens * job->experts->hidden;
    job->failed_id = id;
    job->failed = why;
    for (int64_t i = 0; i < count; i++)
        job->out[i] = NAN;
}

enum { FAILED = -1, ABSENT = -2 };

/* Ids of the CPU's slots; their number, FAILED, or ABSENT if somebody can be asked for one that is not there. */
static int64_t choose(dk_host_job *job, int32_t *ids, int *has_int8, int is_desk)
{
    const dk_experts *e = job->experts;
    int64_t found = 0, pairs = job->tokens * e->k;
    if (job->seen)
        memcpy(job->seen, job->ids, (size_t)pairs * 4);
    for (int64_t pair = 0; pair < pairs; pair++) {
        int32_t id = job->ids[pair];
        if (id < 0 || id >= e->experts) {
            fail(job, 1, id);
            return FAILED;
        }
        int is_own = job->places == NULL || job->places[id] < 0;
        ids[pair] = is_own ? id : -1;
        if (!is_own)
            continue;
        found++;
        if (is_desk)
            continue;
        const dk_matrix *three = &e->matrices[3 * (int64_t)id];
        if (three->data == NULL && job->desk)
            return ABSENT;
        if (three->data == NULL) {
            fail(job, 2, id);
            return FAILED;
        }
        *has_int8 |= dk_type_has_int8(three[0].type) || dk_type_has_int8(three[1].type);
    }
    return found;
}

static void count(dk_host_job *job, int64_t found)
{
    job->computed += found;
    job->left += job->tokens * job->experts->k - found;
}

static void work(dk_host_job *job)
{
    const dk_experts *e = job->experts;
    layout l;
    int has_int8 = 0;
    lay_out(&l, e, job->tokens, (uintptr_t)job->scratch);
    int64_t found = choose(job, l.ids, &has_int8, 0);
    if (job->found)
        memset(job->found, 0xff, (size_t)(job->tokens * e->k) * 4);
    if (found == ABSENT) {
        dk_desk_ask(job->desk, job);
        return;
    }
    if (found < 0)
        return;
    count(job, found);
    if (job->found)
        memcpy(job->found, l.ids, (size_t)(job->tokens * e->k) * 4);
    if (found == 0) {
        memset(job->out, 0, (size_t)(job->tokens * e->hidden) * 4);
        return;
    }
    dk_input x;
    if (dk_make_input(job->run, &x, job->x, e->hidden, job->tokens, l.x_memory, e->has_int8 && has_int8) ||
        dk_expert_ffn(job->run, job->out, &x, l.ids, job->weights, e, job->tokens, l.experts))
        fail(job, 3, -1);
}

void dk_host_experts(void *data)
{
    dk_host_job *job = data;
    int64_t began = now_ns();
    work(job);
    job->calls++;
    job->ns += now_ns() - began;
}

/* ---- in parts ---- */

int dk_host_begin(dk_host_job *job)
{
    layout l;
    int has_int8 = 0;
    lay_out(&l, job->experts, job->tokens, (uintptr_t)job->scratch);
    int64_t found = choose(job, l.ids, &has_int8, 1);
    job->row = 0;
    if (found < 0)
        return 1;
    count(job, found);
    return 0;
}

/* Whether a gate or up product of what is chosen can use int8; FAILED for an expert without a record. */
static int look_at(dk_host_job *job, const dk_experts *e, const int32_t *ids, const uint8_t *chosen)
{
    int has_int8 = 0;
    for (int64_t pair = 0; pair < job->tokens * e->k; pair++) {
        if (ids[pair] < 0 || !chosen[ids[pair]])
            continue;
        const dk_matrix *three = &e->matrices[3 * (int64_t)ids[pair]];
        if (three->data == NULL) {
            fail(job, 2, ids[pair]);
            return FAILED;
        }
        has_int8 |= dk_type_has_int8(three[0].type) || dk_type_has_int8(three[1].type);
    }
    return has_int8;
}

int dk_host_part(dk_host_job *job, const dk_matrix *matrices, const uint8_t *chosen)
{
    dk_experts e = *job->experts;
    layout l;
    dk_input x;
    e.matrices = matrices;
    lay_out(&l, &e, job->tokens, (uintptr_t)job->scratch);
    int has_int8 = look_at(job, &e, l.ids, chosen);
    if (has_int8 == FAILED)
        return 1;
    if (dk_make_input(job->run, &x, job->x, e.hidden, job->tokens, l.x_memory, e.has_int8 && has_int8) ||
        dk_expert_part(job->run, &job->row, &x, l.ids, chosen, &e, job->tokens, 0, l.experts)) {
        fail(job, 3, -1);
        return 1;
    }
    return 0;
}

int dk_host_sum(dk_host_job *job)
{
    const dk_experts *e = job->experts;
    layout l;
    lay_out(&l, e, job->tokens, (uintptr_t)job->scratch);
    if (job->row == 0) {
        memset(job->out, 0, (size_t)(job->tokens * e->hidden) * 4);
        return 0;
    }
    if (dk_expert_sum(job->run, job->out, job->weights, e, job->tokens, l.experts)) {
        fail(job, 3, -1);
        return 1;
    }
    return 0;
}

void dk_host_refuse(dk_host_job *job, int32_t id) { fail(job, 2, id); }

/* ---- copies ---- */

enum { PIECE_BYTES = 1 << 20 };

typedef struct {
    void *const *targets;
    const void *const *sources;
    const int64_t *sizes;
    int64_t count;
} copies;

/* One piece of one of the copies; tasks are counted over all of them. */
static void copy_piece(void *arg, int64_t task)
{
    const copies *c = arg;
    for (int64_t i = 0; i < c->count; i++) {
        int64_t pieces = (c->sizes[i] + PIECE_BYTES - 1) / PIECE_BYTES;
        if (task >= pieces) {
            task -= pieces;
            continue;
        }
        int64_t at = task * PIECE_BYTES;
        memcpy((char *)c->targets[i] + at, (const char *)c->sources[i] + at,
               (size_t)dk_min(PIECE_BYTES, c->sizes[i] - at));
        return;
    }
}

int dk_copy_many(dk_run *run, void *const *targets, const void *const *sources, const int64_t *sizes,
                 int64_t count)
{
    copies c = {targets, sources, sizes, count};
    int64_t tasks = 0;
    for (int64_t i = 0; i < count; i++)
        tasks += (sizes[i] + PIECE_BYTES - 1) / PIECE_BYTES;
    return dk_parallel(run, tasks, copy_piece, &c);
}

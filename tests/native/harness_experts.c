/* Experts beside a GPU: the job that its stream calls for, experts that it waits for, and copies that feed it. */

#include "harness.h"

#include <pthread.h>
#include <string.h>

typedef struct {
    dk_desk *desk;
    const dk_matrix *matrices; /* of all experts */
    int64_t experts;
    uint8_t *chosen;
    int served;
} server;

/* Does every job in two parts, until the desk is closed; every third is refused. */
static void *serve(void *arg)
{
    server *s = arg;
    while (!dk_desk_is_closed(s->desk)) {
        dk_host_job *job = dk_desk_next(s->desk, 20);
        if (job == NULL)
            continue;
        int is_over = dk_host_begin(job);
        for (int part = 0; part < 2 && !is_over; part++) {
            for (int64_t i = 0; i < s->experts; i++)
                s->chosen[i] = i % 2 == part;
            is_over = dk_host_part(job, s->matrices, s->chosen);
        }
        if (!is_over)
            dk_host_sum(job);
        if (++s->served % 3 == 0)
            dk_host_refuse(job, -1);
        dk_desk_done(s->desk);
    }
    return NULL;
}

/* A job that finds nothing waits, and has the sums that it has with everything there. */
static void check_desk(dk_host_job job, const float *wanted)
{
    int64_t count = job.tokens * job.experts->hidden, own = 0;
    int is_exact = job.run->is_small || !job.experts->has_int8;
    for (int64_t i = 0; i < job.tokens * job.experts->k; i++)
        own += job.places[job.ids[i]] < 0;
    if (own == 0)
        return; /* nothing to wait for */
    dk_experts absent = *job.experts;
    dk_matrix *none = (dk_matrix *)scratch(3 * absent.experts * (int64_t)sizeof(dk_matrix));
    memset(none, 0, (size_t)(3 * absent.experts) * sizeof(dk_matrix));
    server s = {dk_desk_new(), job.experts->matrices, absent.experts, bytes(absent.experts), 0};
    pthread_t thread;
    absent.matrices = none;
    job.experts = &absent;
    job.desk = s.desk;
    job.found = (int32_t *)bytes(job.tokens * absent.k * 4);
    job.seen = (int32_t *)bytes(job.tokens * absent.k * 4);
    expect(s.desk != NULL && pthread_create(&thread, NULL, serve, &s) == 0, "a desk with a thread");
    for (int turn = 1; turn <= 6; turn++) {
        memset(job.out, 0xff, (size_t)count * 4);
        job.failed = 0;
        dk_host_experts(&job);
        expect(job.failed == (turn % 3 == 0 ? 2 : 0), "a job that waits");
        if (!job.failed && is_exact)
            expect(memcmp(job.out, wanted, (size_t)count * 4) == 0, "sums of what arrived");
        expect(job.failed || dk_all_finite(job.out, count), "finite sums of what arrived");
        expect(memcmp(job.seen, job.ids, (size_t)(job.tokens * absent.k) * 4) == 0, "ids that were seen");
        expect(job.found[0] == -1, "nothing was found");
    }
    dk_desk_close(s.desk);
    pthread_join(thread, NULL);
    job.failed = 0;
    dk_host_experts(&job);
    expect(job.failed == 2, "a closed desk refuses");
    dk_desk_free(s.desk);
}

/* The same experts as a GPU's stream calls for them: some are its own, some slots are empty. */
void check_host_experts(dk_run *run, dk_experts experts, int64_t tokens)
{
    int64_t pairs = tokens * experts.k;
    int32_t *places = (int32_t *)bytes(experts.experts * 4), *ids = (int32_t *)bytes(pairs * 4);
    float *out = floats(tokens * experts.hidden);
    for (int64_t i = 0; i < experts.experts; i++)
        places[i] = (int32_t)(i % 2) - 1;
    for (int64_t i = 0; i < pairs; i++)
        ids[i] = (int32_t)below(experts.experts);
    experts.shared = NULL;
    experts.shared_width = 0;
    dk_host_job job = {.run = run, .experts = &experts, .places = places, .tokens = tokens, .ids = ids};
    job.x = floats(tokens * experts.hidden);
    job.weights = floats(pairs);
    job.out = out;
    job.scratch = scratch(dk_host_experts_bytes(&experts, tokens));
    dk_host_experts(&job);
    expect(!job.failed && dk_all_finite(out, tokens * experts.hidden), "finite host experts");
    float *waited = floats(tokens * experts.hidden);
    dk_host_job other = job;
    other.out = waited;
    check_desk(other, out);
    ids[pairs - 1] = (int32_t)experts.experts;
    dk_host_experts(&job);
    expect(job.failed == 1, "an id that is out of range");
    const void *from[2] = {job.x, job.weights};
    void *to[2] = {out, ids};
    int64_t sizes[2] = {tokens * experts.hidden * 4, pairs * 4};
    dk_copy_many(run, to, from, sizes, 2);
    expect(memcmp(out, job.x, (size_t)sizes[0]) == 0, "copies");
}

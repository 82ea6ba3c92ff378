/* Experts beside a GPU: the job that its stream calls for, and copies that feed it. */

#include "harness.h"

#include <string.h>

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
    ids[pairs - 1] = (int32_t)experts.experts;
    dk_host_experts(&job);
    expect(job.failed == 1, "an id that is out of range");
    const void *from[2] = {job.x, job.weights};
    void *to[2] = {out, ids};
    int64_t sizes[2] = {tokens * experts.hidden * 4, pairs * 4};
    dk_copy_many(run, to, from, sizes, 2);
    expect(memcmp(out, job.x, (size_t)sizes[0]) == 0, "copies");
}

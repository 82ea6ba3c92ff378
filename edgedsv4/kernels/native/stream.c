/* How fast this machine reads memory: the bound that a decode step is measured against.
 *
 * The plain loop is the fastest one where it was tried (Zen 4, one core: 30 GB/s, 26 to 28 with 64-byte
 * loads, software prefetch or several streams), so there is no other version. */

#include "native.h"

enum { TASK_WORDS = 1 << 20 };

typedef struct {
    const uint64_t *data;
    int64_t words;
    uint64_t sum;
} stream_t;

static void add_task(void *arg, int64_t task)
{
    stream_t *stream = arg;
    const uint64_t *first = stream->data + task * TASK_WORDS;
    int64_t count = dk_min(TASK_WORDS, stream->words - task * TASK_WORDS);
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += first[i];
    __atomic_fetch_add(&stream->sum, sum, __ATOMIC_RELAXED);
}

int dk_stream_sum(dk_run *run, uint64_t *sum, const uint64_t *data, int64_t words)
{
    stream_t stream = {.data = data, .words = words};
    int status = dk_parallel(run, (words + TASK_WORDS - 1) / TASK_WORDS, add_task, &stream);
    *sum = stream.sum;
    return status;
}

/* Threads that make, trigger, ask and free cancel objects at the same time; linked with the part of the
 * library that is C alone, so that the race checker sees every access. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

enum { ROUNDS = 20000, THREADS = 4 };

static _Atomic(dsv4_cancel *) shared;
static atomic_int wrong;

/* Frees the shared object and makes another. */
static void *renew(void *unused)
{
    for (int round = 0; round < ROUNDS; round++) {
        dsv4_cancel *made = NULL;
        if (dsv4_cancel_new(&made) || dsv4_cancel_is_set(made) < 0)
            atomic_fetch_add(&wrong, 1);
        dsv4_cancel *old = atomic_exchange(&shared, made);
        if (old && dsv4_cancel_free(old))
            atomic_fetch_add(&wrong, 1);
    }
    return unused;
}

/* Uses whatever is shared, alive or not: an object is used, or refused. */
static void *use(void *unused)
{
    for (int round = 0; round < ROUNDS; round++) {
        dsv4_cancel *found = atomic_load(&shared);
        int32_t set = dsv4_cancel_trigger(found), state = dsv4_cancel_is_set(found);
        int32_t reset = dsv4_cancel_reset(found);
        if (set > 0 || reset > 0 || state > 1)
            atomic_fetch_add(&wrong, 1);
    }
    return unused;
}

/* Errors of two threads at once. */
static void *fail_often(void *name)
{
    for (int round = 0; round < ROUNDS; round++) {
        dsv4_cancel_free((dsv4_cancel *)name);
        if (last_error().status != DSV4_ERR_INVALID_ARGUMENT)
            atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

int main(void)
{
    void *(*const work[THREADS])(void *) = {renew, renew, use, use};
    pthread_t threads[THREADS + 2];
    static char things[2];
    for (int at = 0; at < THREADS; at++)
        pthread_create(&threads[at], NULL, work[at], NULL);
    for (int at = 0; at < 2; at++)
        pthread_create(&threads[THREADS + at], NULL, fail_often, &things[at]);
    for (int at = 0; at < THREADS + 2; at++)
        pthread_join(threads[at], NULL);
    CHECK("race.answers", atomic_load(&wrong) == 0);
    CHECK("race.last_one", dsv4_cancel_free(atomic_load(&shared)) == DSV4_OK);
    return 0;
}

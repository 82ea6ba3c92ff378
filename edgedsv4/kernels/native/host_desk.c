/* Where a GPU's stream waits for experts that are on a drive. The thread of the GPU's runtime that asks sleeps
 * until somebody has done its job; who takes orders may take its time. */

#include "native.h"
#include "host_desk.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

struct dk_desk {
    pthread_mutex_t lock;
    pthread_cond_t came;   /* an order, or the end */
    pthread_cond_t served; /* the order */
    dk_host_job *order;
    int is_taken;
    int is_closed;
};

dk_desk *dk_desk_new(void)
{
    dk_desk *desk = calloc(1, sizeof *desk);
    if (desk == NULL)
        return NULL;
    pthread_mutex_init(&desk->lock, NULL);
    pthread_cond_init(&desk->came, NULL);
    pthread_cond_init(&desk->served, NULL);
    return desk;
}

void dk_desk_free(dk_desk *desk)
{
    if (desk == NULL)
        return;
    pthread_cond_destroy(&desk->served);
    pthread_cond_destroy(&desk->came);
    pthread_mutex_destroy(&desk->lock);
    free(desk);
}

void dk_desk_ask(dk_desk *desk, dk_host_job *job)
{
    pthread_mutex_lock(&desk->lock);
    if (desk->is_closed) {
        pthread_mutex_unlock(&desk->lock);
        dk_host_refuse(job, -1);
        return;
    }
    desk->order = job;
    desk->is_taken = 0;
    pthread_cond_signal(&desk->came);
    while (desk->order)
        pthread_cond_wait(&desk->served, &desk->lock);
    pthread_mutex_unlock(&desk->lock);
}

dk_host_job *dk_desk_next(dk_desk *desk, int64_t ms)
{
    dk_host_job *found = NULL;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += ms / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&desk->lock);
    int why = 0;
    while (!desk->is_closed && (desk->order == NULL || desk->is_taken) && why != ETIMEDOUT)
        why = pthread_cond_timedwait(&desk->came, &desk->lock, &until);
    if (!desk->is_closed && desk->order && !desk->is_taken) {
        desk->is_taken = 1;
        found = desk->order;
    }
    pthread_mutex_unlock(&desk->lock);
    return found;
}

/* With the lock. */
static void end_order(dk_desk *desk)
{
    desk->order = NULL;
    desk->is_taken = 0;
    pthread_cond_broadcast(&desk->served);
}

void dk_desk_done(dk_desk *desk)
{
    pthread_mutex_lock(&desk->lock);
    end_order(desk);
    pthread_mutex_unlock(&desk->lock);
}

void dk_desk_close(dk_desk *desk)
{
    pthread_mutex_lock(&desk->lock);
    desk->is_closed = 1;
    if (desk->order && !desk->is_taken) { /* whoever took one still says that it is done */
        dk_host_refuse(desk->order, -1);
        end_order(desk);
    }
    pthread_cond_broadcast(&desk->came);
    pthread_mutex_unlock(&desk->lock);
}

int dk_desk_is_closed(dk_desk *desk)
{
    pthread_mutex_lock(&desk->lock);
    int is_closed = desk->is_closed;
    pthread_mutex_unlock(&desk->lock);
    return is_closed;
}

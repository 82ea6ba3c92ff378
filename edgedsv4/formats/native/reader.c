/* The reader: ranges of files into memory, many pieces at once, what is waited for before what may be of use.

   A job is some ranges that are needed together. Jobs wait in two queues; whoever reads takes the next piece of the
   first urgent job, else of the first other one, so a job that becomes urgent overtakes at the next piece. Who reads
   is one thread with an io_uring (ring.c), or several that each wait for their own read. A piece that fails or stays
   short is tried again; a job whose piece failed for good drops the rest of its pieces. */

#include "reader_parts.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/stat.h>
#include <sys/syscall.h>
#endif

enum { MAX_TRIES = 4, BLOCK = 4096, STACK_BYTES = 256 << 10, MAX_DEPTH = 1024 };

static void sleep_ms(int32_t ms)
{
    struct timespec rest = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR)
        ;
}

/* ---- jobs; all under the lock ---- */

static void append(dsv4_queue *queue, dsv4_job *job)
{
    job->next = NULL;
    if (queue->last)
        queue->last->next = job;
    else
        queue->first = job;
    queue->last = job;
}

static dsv4_job *take_out(dsv4_queue *queue, int64_t number)
{
    dsv4_job *before = NULL;
    for (dsv4_job *job = queue->first; job; before = job, job = job->next) {
        if (job->number != number)
            continue;
        if (before)
            before->next = job->next;
        else
            queue->first = job->next;
        if (queue->last == job)
            queue->last = before;
        return job;
    }
    return NULL;
}

static void end_job(dsv4_reader *r, dsv4_job *job)
{
    append(&r->done, job);
    r->open_jobs--;
    r->events++;
    pthread_cond_broadcast(&r->came);
}

/* The next piece of a job; the job leaves its queue with the last one. */
static void cut_piece(dsv4_reader *r, dsv4_queue *queue, dsv4_piece *piece)
{
    dsv4_job *job = queue->first;
    const dsv4_read_range *range = &job->ranges[job->range];
    int64_t left = range->nbytes - job->at, take = left < r->piece_bytes ? left : r->piece_bytes;
    *piece = (dsv4_piece){.job = job,
                          .range = range,
                          .offset = range->offset + job->at,
                          .nbytes = take,
                          .address = (uint8_t *)range->address + job->at,
                          .is_urgent = queue == &r->urgent};
    job->at += take;
    if (job->at == range->nbytes) {
        job->at = 0;
        if (++job->range == job->count)
            take_out(queue, job->number);
    }
    job->under_way++;
    r->lazy_under_way += !piece->is_urgent;
}

int dsv4_take_piece(dsv4_reader *r, dsv4_piece *piece)
{
    if (r->urgent.first)
        cut_piece(r, &r->urgent, piece);
    else if (r->lazy.first && r->lazy_under_way < r->most_lazy)
        cut_piece(r, &r->lazy, piece);
    else
        return 0;
    return 1;
}

static void drop_rest(dsv4_reader *r, dsv4_job *job)
{
    if (job->range < job->count && !take_out(&r->urgent, job->number))
        take_out(&r->lazy, job->number);
    job->range = job->count;
}

void dsv4_end_piece(dsv4_reader *r, const dsv4_piece *piece)
{
    dsv4_job *job = piece->job;
    r->lazy_under_way -= !piece->is_urgent;
    if (piece->error && job->error == 0) {
        job->error = piece->error;
        job->failed_range = (int32_t)(piece->range - job->ranges);
        job->failed_offset = piece->offset;
    }
    if (job->error)
        drop_rest(r, job);
    if (--job->under_way == 0 && job->range == job->count)
        end_job(r, job);
}

/* ---- what a read gave ---- */

static int64_t disturbed(dsv4_reader *r, int64_t got)
{
    pthread_mutex_lock(&r->mutex);
    int32_t delay = 0;
    if (r->skip > 0) {
        r->skip--;
    } else if (r->times > 0) {
        r->times--;
        delay = r->delay_ms;
        if (r->fault)
            got = -r->fault;
        else if (got > r->fault_bytes)
            got = r->fault_bytes;
    }
    pthread_mutex_unlock(&r->mutex);
    if (delay)
        sleep_ms(delay);
    return got;
}

int dsv4_piece_is_over(dsv4_reader *r, dsv4_piece *piece, int64_t got)
{
    const dsv4_read_range *range = piece->range;
    if (atomic_load_explicit(&r->is_disturbed, memory_order_relaxed))
        got = disturbed(r, got);
    atomic_fetch_add_explicit(&r->reads, 1, memory_order_relaxed);
    if (got > 0) {
        atomic_fetch_add_explicit(&r->bytes, got, memory_order_relaxed);
        if (got >= piece->nbytes || piece->offset + got >= range->offset + range->needed) {
#if defined(POSIX_FADV_DONTNEED)
            /* What was read will be kept by us; the system's copy would only take room. */
            if (!range->is_direct)
                (void)posix_fadvise(range->fd, piece->offset, piece->nbytes, POSIX_FADV_DONTNEED);
#endif
            return 1;
        }
        int64_t whole = range->is_direct ? got / BLOCK * BLOCK : got;
        piece->offset += whole;
        piece->address += whole;
        piece->nbytes -= whole;
    }
    if (++piece->tries < MAX_TRIES) {
        atomic_fetch_add_explicit(&r->retries, 1, memory_order_relaxed);
        return 0;
    }
    piece->error = got < 0 ? (int32_t)-got : DSV4_READ_ENDED;
    return 1;
}

/* ---- threads that each wait for their own read ---- */

static void *read_pieces(void *data)
{
    dsv4_reader *r = data;
    pthread_mutex_lock(&r->mutex);
    while (!r->is_stopping) {
        dsv4_piece piece;
        if (!dsv4_take_piece(r, &piece)) {
            pthread_cond_wait(&r->work_came, &r->mutex);
            continue;
        }
        pthread_mutex_unlock(&r->mutex);
        ssize_t got;
        do {
            got = pread(piece.range->fd, piece.address, (size_t)piece.nbytes, (off_t)piece.offset);
        } while (!dsv4_piece_is_over(r, &piece, got < 0 ? -errno : got));
        pthread_mutex_lock(&r->mutex);
        dsv4_end_piece(r, &piece);
        if (!piece.is_urgent && r->lazy.first)
            pthread_cond_signal(&r->work_came);
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

/* Starts `count` threads, or none. Signals are for the threads that the program knows. */
static int start_threads(dsv4_reader *r, void *(*work)(void *), int count)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error)
        return error;
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (r->thread_count < count && !error) {
        error = pthread_create(&r->threads[r->thread_count], &attributes, work, r);
        r->thread_count += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return r->thread_count > 0 ? 0 : error;
}

/* ---- called from outside ---- */

static void init_locks(dsv4_reader *r)
{
    pthread_condattr_t attributes;
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->work_came, NULL);
    pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&r->came, &attributes);
    pthread_condattr_destroy(&attributes);
}

dsv4_reader *dsv4_reader_open(int32_t depth, int64_t piece_bytes, int32_t wants_ring, int32_t *error)
{
    dsv4_reader *r = NULL;
    *error = EINVAL;
    if (depth < 1 || depth > MAX_DEPTH || piece_bytes < BLOCK || piece_bytes % BLOCK)
        return NULL;
    r = calloc(1, sizeof *r + (size_t)depth * sizeof(pthread_t));
    *error = ENOMEM;
    if (r == NULL)
        return NULL;
    r->depth = depth;
    r->piece_bytes = piece_bytes;
    r->most_lazy = depth < 4 ? 1 : depth / 4;
    r->process = getpid();
    init_locks(r);
    if (wants_ring && dsv4_ring_open(r) == 0)
        *error = start_threads(r, dsv4_ring_work, 1);
    else
        *error = start_threads(r, read_pieces, depth);
    if (*error) {
        dsv4_ring_close(r);
        free(r);
        return NULL;
    }
    return r;
}

int dsv4_reader_has_ring(const dsv4_reader *r) { return r->ring != NULL; }

static void free_jobs(dsv4_queue *queue)
{
    while (queue->first) {
        dsv4_job *job = queue->first;
        queue->first = job->next;
        free(job);
    }
}

void dsv4_reader_close(dsv4_reader *r)
{
    /* The child of a fork has neither threads nor a ring of its own, and locks in any state. */
    if (r->process != getpid())
        return;
    pthread_mutex_lock(&r->mutex);
    r->is_stopping = 1;
    pthread_cond_broadcast(&r->work_came);
    pthread_mutex_unlock(&r->mutex);
    dsv4_ring_wake(r);
    for (int i = 0; i < r->thread_count; i++)
        pthread_join(r->threads[i], NULL);
    dsv4_ring_close(r);
    free_jobs(&r->urgent);
    free_jobs(&r->lazy);
    free_jobs(&r->done);
    pthread_cond_destroy(&r->came);
    pthread_cond_destroy(&r->work_came);
    pthread_mutex_destroy(&r->mutex);
    free(r);
}

int64_t dsv4_reader_submit(dsv4_reader *r, const dsv4_read_range *ranges, int32_t count, int32_t is_urgent)
{
    if (r->process != getpid())
        return -ECHILD;
    dsv4_job *job = calloc(1, sizeof *job + (size_t)count * sizeof *ranges);
    if (job == NULL)
        return -ENOMEM;
    memcpy(job->ranges, ranges, (size_t)count * sizeof *ranges);
    job->count = count;
    pthread_mutex_lock(&r->mutex);
    int64_t number = job->number = ++r->last_number;
    r->open_jobs++;
    if (count == 0)
        end_job(r, job);
    else
        append(is_urgent ? &r->urgent : &r->lazy, job);
    pthread_cond_broadcast(&r->work_came);
    pthread_mutex_unlock(&r->mutex);
    dsv4_ring_wake(r);
    return number;
}

void dsv4_reader_hurry(dsv4_reader *r, int64_t number)
{
    pthread_mutex_lock(&r->mutex);
    dsv4_job *job = take_out(&r->lazy, number);
    if (job)
        append(&r->urgent, job);
    pthread_cond_broadcast(&r->work_came);
    pthread_mutex_unlock(&r->mutex);
    dsv4_ring_wake(r);
}

/* A job that was taken out of its queue. */
static void cancel_job(dsv4_reader *r, dsv4_job *job)
{
    job->range = job->count;
    job->error = job->error ? job->error : DSV4_READ_CANCELLED;
    if (job->under_way == 0)
        end_job(r, job);
}

void dsv4_reader_cancel(dsv4_reader *r, int64_t number)
{
    pthread_mutex_lock(&r->mutex);
    dsv4_job *job = take_out(&r->urgent, number);
    if (job == NULL)
        job = take_out(&r->lazy, number);
    if (job)
        cancel_job(r, job);
    pthread_mutex_unlock(&r->mutex);
}

void dsv4_reader_clear(dsv4_reader *r)
{
    if (r->process != getpid())
        return;
    pthread_mutex_lock(&r->mutex);
    dsv4_queue *queues[] = {&r->urgent, &r->lazy};
    for (int i = 0; i < 2; i++)
        while (queues[i]->first)
            cancel_job(r, take_out(queues[i], queues[i]->first->number));
    while (r->open_jobs > 0)
        pthread_cond_wait(&r->came, &r->mutex);
    free_jobs(&r->done);
    r->done.last = NULL;
    pthread_mutex_unlock(&r->mutex);
}

int32_t dsv4_reader_wait(dsv4_reader *r, dsv4_read_result *results, int32_t most, int64_t *seen, int32_t timeout_ms)
{
    struct timespec until;
    int32_t count = 0;
#if defined(__APPLE__)
    clock_gettime(CLOCK_REALTIME, &until);
#else
    clock_gettime(CLOCK_MONOTONIC, &until);
#endif
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    until.tv_sec += timeout_ms / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&r->mutex);
    while (timeout_ms > 0 && r->done.first == NULL && r->events == *seen)
        if (pthread_cond_timedwait(&r->came, &r->mutex, &until) != 0)
            break;
    *seen = r->events;
    while (count < most && r->done.first) {
        dsv4_job *job = r->done.first;
        take_out(&r->done, job->number);
        results[count++] = (dsv4_read_result){job->number, job->error, job->failed_range, job->failed_offset};
        free(job);
    }
    pthread_mutex_unlock(&r->mutex);
    return count;
}

void dsv4_reader_wake(dsv4_reader *r)
{
    pthread_mutex_lock(&r->mutex);
    r->events++;
    pthread_cond_broadcast(&r->came);
    pthread_mutex_unlock(&r->mutex);
}

void dsv4_reader_counts(dsv4_reader *r, dsv4_read_counts *counts)
{
    counts->bytes = atomic_load(&r->bytes);
    counts->reads = atomic_load(&r->reads);
    counts->retries = atomic_load(&r->retries);
    counts->queued = 0;
    pthread_mutex_lock(&r->mutex);
    for (const dsv4_job *job = r->urgent.first; job; job = job->next)
        counts->queued++;
    for (const dsv4_job *job = r->lazy.first; job; job = job->next)
        counts->queued++;
    pthread_mutex_unlock(&r->mutex);
}

void dsv4_reader_disturb(dsv4_reader *r, int64_t skip, int64_t times, int32_t error, int64_t bytes, int32_t delay_ms)
{
    pthread_mutex_lock(&r->mutex);
    r->skip = skip;
    r->times = times;
    r->fault = error;
    r->fault_bytes = bytes;
    r->delay_ms = delay_ms;
    atomic_store(&r->is_disturbed, times > 0);
    pthread_mutex_unlock(&r->mutex);
}

int32_t dsv4_direct_alignment(int32_t fd)
{
#if defined(__linux__) && defined(SYS_statx) && defined(STATX_DIOALIGN)
    struct statx found;
    memset(&found, 0, sizeof found);
    if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, STATX_DIOALIGN, &found) != 0 ||
        !(found.stx_mask & STATX_DIOALIGN))
        return -1;
    if (found.stx_dio_offset_align == 0)
        return 0;
    return (int32_t)(found.stx_dio_offset_align > found.stx_dio_mem_align ? found.stx_dio_offset_align
                                                                          : found.stx_dio_mem_align);
#else
    (void)fd;
    return -1;
#endif
}

/* The thread pool: one job at a time, its tasks handed out by a counter.
 *
 * The caller publishes a job and works on it like the others. `state` says how many more workers may join
 * and how many are inside; a worker joins and leaves by changing it in one atomic step, so the caller never
 * waits for one that slept through the job: it shuts the door and waits for those inside. A worker without
 * work spins for some microseconds (`linger_ns` of the last job), since the next operation of a token follows
 * soon, and then sleeps.
 * Where spinning threads get interrupted, there are more runnable threads than CPUs: all sleep at once. */

#include "native.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WORKERS = 1023, STACK_BYTES = 2 << 20 };
enum { SPIN_NS = 40000, INTERRUPTED_NS = 25000, PAUSES_PER_LOOK = 16, QUIET_WAITS = 200 };
enum { POLL_NS = 20000000, TASKS_PER_LOOK = 4 };

/* state: workers that may still join | generation of the job | workers inside. A worker joins by one addition,
 * since sixteen that compare and exchange make each other fail; who finds no seat leaves at once, and the seats,
 * which are at the top, may fall below zero without a carry into the rest. */
#define JOB_SHIFT 16
#define SEAT_SHIFT 48
#define INSIDE_MASK UINT64_C(0xffff)
#define SEATS_MASK (UINT64_C(0xffff) << SEAT_SHIFT)

static uint32_t job_of(uint64_t state) { return (uint32_t)(state >> JOB_SHIFT); }
static int has_seat(uint64_t state) { return (int16_t)(state >> SEAT_SHIFT) > 0; }

typedef struct {
    pthread_t thread;
    int index;
    int is_pinned;
} worker_t;

static struct {
    _Atomic uint64_t state DK_ALIGNED;
    _Atomic int64_t next DK_ALIGNED; /* task */
    dk_run *run DK_ALIGNED;          /* the job; written while nobody is inside */
    void (*fn)(void *, int64_t);
    void *arg;
    int64_t tasks;
    atomic_int is_in_use DK_ALIGNED; /* by a caller */
    atomic_int is_stopping;
    atomic_int sleepers;
    atomic_int is_caller_asleep;
    atomic_int quiet_waits; /* so many waits will not spin */
    atomic_int count;       /* workers; changed by the caller that uses the pool */
    _Atomic int64_t linger_ns; /* of the last job */
    int cpus;
    int has_fork_handler;
#if defined(__linux__)
    cpu_set_t allowed; /* CPUs of the process when the pool grew */
#endif
    pthread_mutex_t mutex; /* for sleeping only */
    pthread_cond_t job_came;
    pthread_cond_t all_left;
    worker_t workers[MAX_WORKERS];
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER,
          .job_came = PTHREAD_COND_INITIALIZER,
          .all_left = PTHREAD_COND_INITIALIZER};

static _Thread_local int is_in_task;
static _Thread_local int is_worker;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void relax(void)
{
#if defined(DK_X86)
    __builtin_ia32_pause();
#elif defined(DK_NEON)
    __asm__ volatile("isb");
#endif
}

/* Bounded spin: 1 when the caller may look again, 0 when it is time to sleep. */
typedef struct {
    int64_t start;
    int64_t last;
    int64_t turn;
    int64_t most; /* nanoseconds */
} spin_t;

static int may_spin(spin_t *spin)
{
    relax();
    if (++spin->turn % PAUSES_PER_LOOK != 1)
        return 1;
    if (spin->last == 0) {
        if (atomic_load_explicit(&pool.quiet_waits, memory_order_relaxed) > 0) {
            atomic_fetch_sub_explicit(&pool.quiet_waits, 1, memory_order_relaxed);
            return 0;
        }
        spin->start = spin->last = now_ns();
    }
    int64_t now = now_ns();
    if (now - spin->last > INTERRUPTED_NS)
        atomic_store_explicit(&pool.quiet_waits, QUIET_WAITS, memory_order_relaxed);
    else if (now - spin->start < spin->most) {
        spin->last = now;
        return 1;
    }
    return 0;
}

/* ---- the job ---- */

static int has_stopped(const dk_run *run) { return __atomic_load_n(&run->stop, __ATOMIC_RELAXED); }

/* Ask poll when 20 ms have passed; nonzero when the run stops. */
static int ask(dk_run *run)
{
    if (run->poll == NULL || is_worker)
        return has_stopped(run);
    int64_t now = now_ns();
    if (run->last_poll_ns == 0)
        run->last_poll_ns = now;
    if (now - run->last_poll_ns >= POLL_NS && !has_stopped(run)) {
        if (run->poll(run->poll_data) != 0)
            __atomic_store_n(&run->stop, 1, __ATOMIC_RELAXED);
        run->last_poll_ns = now_ns();
    }
    return has_stopped(run);
}

static int run_alone(dk_run *run, int64_t tasks, void (*fn)(void *, int64_t), void *arg)
{
    int was_in_task = is_in_task;
    is_in_task = 1;
    for (int64_t task = 0; task < tasks; task++) {
        if (task % TASKS_PER_LOOK == 0 ? ask(run) : has_stopped(run))
            break;
        fn(arg, task);
    }
    is_in_task = was_in_task;
    return has_stopped(run);
}

static void take_tasks(void)
{
    dk_run *run = pool.run;
    is_in_task = 1;
    for (int64_t turn = 0;; turn++) {
        if (turn % TASKS_PER_LOOK == 0 ? ask(run) : has_stopped(run))
            break;
        int64_t task = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (task >= pool.tasks)
            break;
        pool.fn(pool.arg, task);
    }
    is_in_task = 0;
}

/* ---- workers ---- */

static void pin(worker_t *self, int is_pinned)
{
    if (self->is_pinned == is_pinned)
        return;
    self->is_pinned = is_pinned;
#if defined(__linux__)
    cpu_set_t set = pool.allowed;
    int count = CPU_COUNT(&pool.allowed);
    if (is_pinned && count > 0) {
        int wanted = (self->index + 1) % count; /* the first is left to the caller */
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            if (CPU_ISSET(cpu, &pool.allowed) && wanted-- == 0) {
                CPU_ZERO(&set);
                CPU_SET(cpu, &set);
                break;
            }
        }
    }
    /* Pinning is a wish: where the system refuses, the thread runs anywhere. */
    (void)pthread_setaffinity_np(self->thread, sizeof set, &set);
#endif
}

/* Wait for a job after `seen`; 0 when the pool stops. */
static int wait_for_job(uint32_t seen)
{
    spin_t spin = {.most = atomic_load_explicit(&pool.linger_ns, memory_order_relaxed)};
    do {
        if (job_of(atomic_load_explicit(&pool.state, memory_order_acquire)) != seen)
            return 1;
        if (atomic_load_explicit(&pool.is_stopping, memory_order_relaxed))
            return 0;
    } while (may_spin(&spin));
    pthread_mutex_lock(&pool.mutex);
    /* Announced before the last look; the caller publishes before it looks for sleepers. */
    atomic_fetch_add(&pool.sleepers, 1);
    while (job_of(atomic_load(&pool.state)) == seen && !atomic_load(&pool.is_stopping))
        pthread_cond_wait(&pool.job_came, &pool.mutex);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.mutex);
    return !atomic_load(&pool.is_stopping);
}

static void leave_job(void)
{
    uint64_t before = atomic_fetch_sub(&pool.state, 1);
    if ((before & INSIDE_MASK) == 1 && atomic_load(&pool.is_caller_asleep)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_signal(&pool.all_left);
        pthread_mutex_unlock(&pool.mutex);
    }
}

static void *work(void *data)
{
    worker_t *self = data;
    uint32_t seen = job_of(atomic_load(&pool.state)) - 1;
    is_worker = 1;
    while (wait_for_job(seen)) {
        uint64_t state = atomic_load_explicit(&pool.state, memory_order_acquire);
        seen = job_of(state);
        if (!has_seat(state))
            continue;
        state = atomic_fetch_add(&pool.state, 1 - (UINT64_C(1) << SEAT_SHIFT));
        seen = job_of(state);
        if (has_seat(state)) {
            pin(self, pool.run->is_pinned);
            take_tasks();
        }
        leave_job();
    }
    return NULL;
}

/* ---- life of the pool; all by the caller that has it in use ---- */

/* The child of a fork has only the thread that called it. */
static void forget_workers(void)
{
    static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    pool.mutex = mutex;
    pool.job_came = condition;
    pool.all_left = condition;
    atomic_store(&pool.state, 0);
    atomic_store(&pool.count, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.is_caller_asleep, 0);
    atomic_store(&pool.is_stopping, 0);
    atomic_store(&pool.is_in_use, 0);
    is_in_task = 0;
}

static void find_cpus(void)
{
#if defined(__linux__)
    if (sched_getaffinity(0, sizeof pool.allowed, &pool.allowed) == 0) {
        pool.cpus = CPU_COUNT(&pool.allowed);
        return;
    }
    CPU_ZERO(&pool.allowed);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    pool.cpus = online > 0 ? (int)online : 1;
}

/* Have `wanted` workers, or as many as the system gives. */
static void grow(int wanted)
{
    static const int faults[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP};
    pthread_attr_t attributes;
    sigset_t all, before;
    if (!pool.has_fork_handler)
        pool.has_fork_handler = pthread_atfork(NULL, NULL, forget_workers) == 0;
    if (!pool.has_fork_handler || pthread_attr_init(&attributes) != 0)
        return;
    find_cpus();
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals are for the threads that the program knows, but a fault is the thread's own: blocked, it would
     * end the process whatever handler there is. */
    sigfillset(&all);
    for (int i = 0; i < (int)(sizeof faults / sizeof *faults); i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int count = atomic_load(&pool.count);
    for (; count < wanted; count++) {
        worker_t *worker = &pool.workers[count];
        worker->index = count;
        worker->is_pinned = 0;
        if (pthread_create(&worker->thread, &attributes, work, worker) != 0)
            break;
    }
    atomic_store(&pool.count, count);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static int try_use(void)
{
    int no = 0;
    return atomic_compare_exchange_strong(&pool.is_in_use, &no, 1);
}

/* ---- called from outside ---- */

static void publish(int seats)
{
    uint64_t state = atomic_load_explicit(&pool.state, memory_order_relaxed), next;
    do { /* a worker that found no seat may be on its way out */
        next = (uint64_t)(job_of(state) + 1) << JOB_SHIFT | (uint64_t)seats << SEAT_SHIFT | (state & INSIDE_MASK);
    } while (!atomic_compare_exchange_weak(&pool.state, &state, next));
    /* Nobody is at work, so whoever does not sleep is looking for a job. */
    int asleep = atomic_load(&pool.sleepers);
    int missing = seats - (atomic_load(&pool.count) - asleep);
    if (missing <= 0 || asleep == 0)
        return;
    pthread_mutex_lock(&pool.mutex);
    for (int i = 0; i < asleep && i < missing; i++)
        pthread_cond_signal(&pool.job_came);
    pthread_mutex_unlock(&pool.mutex);
}

/* Let nobody join any more, and wait until all have left. */
static void close_job(void)
{
    spin_t spin = {.most = SPIN_NS};
    atomic_fetch_and(&pool.state, ~SEATS_MASK);
    do {
        if ((atomic_load_explicit(&pool.state, memory_order_acquire) & INSIDE_MASK) == 0)
            return;
    } while (may_spin(&spin));
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.is_caller_asleep, 1);
    while ((atomic_load(&pool.state) & INSIDE_MASK) != 0)
        pthread_cond_wait(&pool.all_left, &pool.mutex);
    atomic_store(&pool.is_caller_asleep, 0);
    pthread_mutex_unlock(&pool.mutex);
}

int dk_parallel(dk_run *run, int64_t tasks, void (*fn)(void *arg, int64_t task), void *arg)
{
    if (tasks <= 1 || run->threads <= 1 || is_in_task || !try_use())
        return run_alone(run, tasks, fn, arg);
    int wanted = (int)dk_min(dk_min(run->threads - 1, tasks - 1), MAX_WORKERS);
    if (atomic_load(&pool.count) < wanted)
        grow(wanted);
    if (wanted >= pool.cpus)
        atomic_store_explicit(&pool.quiet_waits, QUIET_WAITS, memory_order_relaxed);
    pool.run = run;
    pool.fn = fn;
    pool.arg = arg;
    pool.tasks = tasks;
    atomic_store_explicit(&pool.linger_ns, run->linger_ns > 0 ? run->linger_ns : SPIN_NS, memory_order_relaxed);
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    publish(wanted);
    take_tasks();
    close_job();
    atomic_store(&pool.is_in_use, 0);
    return has_stopped(run);
}

int dk_pool_size(void) { return atomic_load(&pool.count); }

void dk_pool_stop(void)
{
    while (!try_use())
        sched_yield();
    atomic_store(&pool.is_stopping, 1);
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.job_came);
    pthread_mutex_unlock(&pool.mutex);
    for (int i = 0; i < atomic_load(&pool.count); i++)
        pthread_join(pool.workers[i].thread, NULL);
    atomic_store(&pool.count, 0);
    atomic_store(&pool.is_stopping, 0);
    atomic_store(&pool.is_in_use, 0);
}

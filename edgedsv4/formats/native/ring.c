/* Reads through io_uring, by its system calls: one thread keeps up to `depth` of them in the kernel.

   The thread sleeps in io_uring_enter until a read is over. That new work came it learns from an eventfd, of which
   one read is always under way. Only this thread touches the ring. */

#include "reader_parts.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define HAVE_RING 1
#endif
#endif

#if defined(HAVE_RING)

#include <errno.h>
#include <linux/io_uring.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if !defined(SYS_io_uring_setup)
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

struct dsv4_ring {
    int fd;
    int bell; /* eventfd */
    uint64_t rings;
    void *memory;
    size_t memory_bytes;
    struct io_uring_sqe *entries;
    size_t entries_bytes;
    _Atomic uint32_t *submitted_tail, *done_head, *done_tail;
    uint32_t submitted_mask, done_mask;
    uint32_t *order;
    const struct io_uring_cqe *done;
    uint32_t fresh;      /* entries that the kernel was not told of */
    uint32_t free_count;
    int32_t under_way;   /* pieces */
    uint32_t *free_list; /* [depth] places in pieces */
    dsv4_piece pieces[];
};

static int can_read(int fd)
{
    enum { OPERATIONS = IORING_OP_READ + 1 };
    size_t nbytes = sizeof(struct io_uring_probe) + OPERATIONS * sizeof(struct io_uring_probe_op);
    struct io_uring_probe *probe = calloc(1, nbytes);
    if (probe == NULL)
        return 0;
    int can = syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, probe, OPERATIONS) == 0 &&
              probe->last_op >= IORING_OP_READ && (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED);
    free(probe);
    return can;
}

/* Maps the kernel's side; an errno on failure. */
static int map_ring(dsv4_ring *ring, const struct io_uring_params *p)
{
    size_t submitted = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t done = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->memory_bytes = submitted > done ? submitted : done;
    ring->entries_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    uint8_t *base = mmap(NULL, ring->memory_bytes, protection, flags, ring->fd, IORING_OFF_SQ_RING);
    if (base == MAP_FAILED)
        return errno;
    ring->memory = base;
    void *entries = mmap(NULL, ring->entries_bytes, protection, flags, ring->fd, IORING_OFF_SQES);
    if (entries == MAP_FAILED)
        return errno;
    ring->entries = entries;
    ring->submitted_tail = (void *)(base + p->sq_off.tail);
    ring->submitted_mask = *(uint32_t *)(base + p->sq_off.ring_mask);
    ring->order = (void *)(base + p->sq_off.array);
    ring->done_head = (void *)(base + p->cq_off.head);
    ring->done_tail = (void *)(base + p->cq_off.tail);
    ring->done_mask = *(uint32_t *)(base + p->cq_off.ring_mask);
    ring->done = (void *)(base + p->cq_off.cqes);
    return 0;
}

int dsv4_ring_open(dsv4_reader *r)
{
    struct io_uring_params parameters;
    size_t depth = (size_t)r->depth;
    dsv4_ring *ring = calloc(1, sizeof *ring + depth * (sizeof(dsv4_piece) + sizeof(uint32_t)));
    if (ring == NULL)
        return ENOMEM;
    r->ring = ring;
    ring->bell = -1;
    ring->free_list = (void *)(ring->pieces + depth);
    for (uint32_t i = 0; i < depth; i++)
        ring->free_list[ring->free_count++] = i;
    memset(&parameters, 0, sizeof parameters);
    /* One more than pieces: the bell. */
    ring->fd = (int)syscall(SYS_io_uring_setup, (uint32_t)depth + 1, &parameters);
    int error = ring->fd < 0 ? errno : 0;
    if (!error && !(parameters.features & IORING_FEAT_SINGLE_MMAP && can_read(ring->fd)))
        error = ENOSYS;
    if (!error)
        error = map_ring(ring, &parameters);
    if (!error && (ring->bell = eventfd(0, EFD_CLOEXEC)) < 0)
        error = errno;
    if (error)
        dsv4_ring_close(r);
    return error;
}

void dsv4_ring_close(dsv4_reader *r)
{
    dsv4_ring *ring = r->ring;
    if (ring == NULL)
        return;
    if (ring->entries)
        munmap(ring->entries, ring->entries_bytes);
    if (ring->memory)
        munmap(ring->memory, ring->memory_bytes);
    if (ring->bell >= 0)
        close(ring->bell);
    if (ring->fd >= 0)
        close(ring->fd);
    free(ring);
    r->ring = NULL;
}

void dsv4_ring_wake(dsv4_reader *r)
{
    const uint64_t one = 1;
    /* Fails only when the counter is full: then it rings anyway. */
    if (r->ring && write(r->ring->bell, &one, sizeof one) < 0)
        return;
}

static void push(dsv4_ring *ring, int fd, void *to, int64_t nbytes, int64_t offset, uint64_t what)
{
    uint32_t tail = atomic_load_explicit(ring->submitted_tail, memory_order_relaxed);
    uint32_t place = tail & ring->submitted_mask;
    struct io_uring_sqe *entry = &ring->entries[place];
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_READ;
    entry->fd = fd;
    entry->addr = (uint64_t)(uintptr_t)to;
    entry->len = (uint32_t)nbytes;
    entry->off = (uint64_t)offset;
    entry->user_data = what;
    ring->order[place] = place;
    atomic_store_explicit(ring->submitted_tail, tail + 1, memory_order_release);
    ring->fresh++;
}

static void push_bell(dsv4_ring *ring) { push(ring, ring->bell, &ring->rings, sizeof ring->rings, 0, 0); }

static void push_piece(dsv4_ring *ring, uint32_t place)
{
    const dsv4_piece *piece = &ring->pieces[place];
    push(ring, piece->range->fd, piece->address, piece->nbytes, piece->offset, place + 1);
}

/* Reads of the kernel that are over. */
static void take_done(dsv4_reader *r)
{
    dsv4_ring *ring = r->ring;
    uint32_t head = atomic_load_explicit(ring->done_head, memory_order_relaxed);
    while (head != atomic_load_explicit(ring->done_tail, memory_order_acquire)) {
        const struct io_uring_cqe *entry = &ring->done[head & ring->done_mask];
        uint64_t what = entry->user_data;
        int64_t got = entry->res;
        atomic_store_explicit(ring->done_head, ++head, memory_order_release);
        if (what == 0) {
            push_bell(ring);
            continue;
        }
        uint32_t place = (uint32_t)what - 1;
        if (!dsv4_piece_is_over(r, &ring->pieces[place], got)) {
            push_piece(ring, place);
            continue;
        }
        ring->free_list[ring->free_count++] = place;
        ring->under_way--;
        pthread_mutex_lock(&r->mutex);
        dsv4_end_piece(r, &ring->pieces[place]);
        pthread_mutex_unlock(&r->mutex);
    }
}

void *dsv4_ring_work(void *data)
{
    dsv4_reader *r = data;
    dsv4_ring *ring = r->ring;
    push_bell(ring);
    for (;;) {
        pthread_mutex_lock(&r->mutex);
        int is_stopping = r->is_stopping;
        while (!is_stopping && ring->free_count > 0) {
            uint32_t place = ring->free_list[ring->free_count - 1];
            if (!dsv4_take_piece(r, &ring->pieces[place]))
                break;
            ring->free_count--;
            ring->under_way++;
            push_piece(ring, place);
        }
        pthread_mutex_unlock(&r->mutex);
        if (is_stopping && ring->under_way == 0)
            return NULL;
        long told = syscall(SYS_io_uring_enter, ring->fd, ring->fresh, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (told > 0)
            ring->fresh -= (uint32_t)told;
        else if (told < 0 && errno != EINTR)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* the kernel is short of something */
        take_done(r);
    }
}

#else

int dsv4_ring_open(dsv4_reader *reader)
{
    (void)reader;
    return 1;
}

void dsv4_ring_close(dsv4_reader *reader) { (void)reader; }

void dsv4_ring_wake(dsv4_reader *reader) { (void)reader; }

void *dsv4_ring_work(void *reader) { return reader; }

#endif

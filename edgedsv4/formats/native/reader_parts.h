/* What the files of the reader share. */

#ifndef DSV4_READER_PARTS_H
#define DSV4_READER_PARTS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "reader.h"

enum { DSV4_READ_ENDED = -1, DSV4_READ_CANCELLED = -2 };

typedef struct dsv4_job {
    struct dsv4_job *next;
    int64_t number;
    int64_t at;          /* bytes of the range that comes next that were handed out */
    int32_t range;       /* the range that comes next, `count` after the last */
    int32_t count;
    int32_t under_way;   /* pieces */
    int32_t error;
    int32_t failed_range;
    int64_t failed_offset;
    dsv4_read_range ranges[];
} dsv4_job;

typedef struct {
    dsv4_job *first;
    dsv4_job *last;
} dsv4_queue;

typedef struct {
    dsv4_job *job;
    const dsv4_read_range *range;
    int64_t offset;
    int64_t nbytes;      /* still to come */
    uint8_t *address;
    int32_t tries;
    int32_t error;
    int32_t is_urgent;
} dsv4_piece;

typedef struct dsv4_ring dsv4_ring;

struct dsv4_reader {
    pthread_mutex_t mutex;    /* of everything that is not atomic or constant */
    pthread_cond_t work_came; /* for threads that read */
    pthread_cond_t came;      /* for those that wait for jobs */
    dsv4_queue urgent, lazy, done;
    int64_t last_number;
    int64_t events;
    int64_t open_jobs;   /* that are not over */
    int64_t piece_bytes;
    int32_t depth;
    int32_t most_lazy;
    int32_t lazy_under_way;
    int32_t is_stopping;
    pid_t process;
    atomic_int_fast64_t bytes, reads, retries;
    atomic_int is_disturbed;
    int64_t skip, times, fault_bytes;
    int32_t fault, delay_ms;
    dsv4_ring *ring;
    int thread_count;
    pthread_t threads[];      /* [depth] */
};

/* Under the lock: the next piece to read; 0 when there is none. */
int dsv4_take_piece(dsv4_reader *reader, dsv4_piece *piece);
/* Judges what a read gave, a count of bytes or minus an errno: 1 when the piece is over, else it says what to read. */
int dsv4_piece_is_over(dsv4_reader *reader, dsv4_piece *piece, int64_t got);
/* Under the lock: a piece is over. */
void dsv4_end_piece(dsv4_reader *reader, const dsv4_piece *piece);

/* Makes the ring of a reader; an errno where the kernel has none. */
int dsv4_ring_open(dsv4_reader *reader);
/* Frees it, if there is one. */
void dsv4_ring_close(dsv4_reader *reader);
/* Lets its thread look for work, if there is one. */
void dsv4_ring_wake(dsv4_reader *reader);
/* The thread that keeps it full. */
void *dsv4_ring_work(void *reader);

#endif

/* Prototypes of the reader; read by cffi and by the C compiler. Any thread may call any of them at any time, but
   dsv4_reader_close must be the last. Whatever a range names (file descriptor, memory) must stay until its job
   came out of dsv4_reader_wait, or the reader is closed. */

typedef struct dsv4_reader dsv4_reader;

typedef struct {
    int32_t fd;
    int32_t is_direct;   /* opened with O_DIRECT: offset, nbytes and address are multiples of what that asks for */
    int64_t offset;      /* first byte in the file */
    int64_t nbytes;      /* to read; the file may end earlier, */
    int64_t needed;      /* but not before so many bytes */
    uintptr_t address;   /* where the first byte goes */
} dsv4_read_range;

typedef struct {
    int64_t job;
    int32_t error;       /* 0; an errno; -1: the file ended, or reads stayed short; -2: cancelled */
    int32_t range;       /* the one that failed */
    int64_t offset;      /* where in the file */
} dsv4_read_result;

typedef struct {
    int64_t bytes;       /* that came from the system */
    int64_t reads;
    int64_t retries;
    int64_t queued;      /* jobs that have pieces nobody began to read */
} dsv4_read_counts;

/* A reader with its threads. At most `depth` reads of at most `piece_bytes` are under way at a time, of jobs that are
   not urgent a quarter of that. With `wants_ring` they go through io_uring where the kernel has it, else through
   `depth` threads. NULL when memory or threads are refused, with an errno in *error. */
dsv4_reader *dsv4_reader_open(int32_t depth, int64_t piece_bytes, int32_t wants_ring, int32_t *error);

/* 1 when reads go through io_uring. */
int dsv4_reader_has_ring(const dsv4_reader *reader);

/* Ends all reads, the queued ones unread, and frees the reader. In the child of a fork it only forgets it. */
void dsv4_reader_close(dsv4_reader *reader);

/* Reads some ranges as one job. Returns its number, above 0; or minus an errno. */
int64_t dsv4_reader_submit(dsv4_reader *reader, const dsv4_read_range *ranges, int32_t count, int32_t is_urgent);

/* Lets a job go before all that are not urgent. */
void dsv4_reader_hurry(dsv4_reader *reader, int64_t job);

/* Drops what nobody began to read of a job; it comes out of dsv4_reader_wait all the same. */
void dsv4_reader_cancel(dsv4_reader *reader, int64_t job);

/* Takes up to `most` jobs that are over, 0 takes none. When there are none, waits until there are, or something
   happened that *seen does not count (a job ended, dsv4_reader_wake), or the time is up. Returns how many; *seen
   counts what happened. */
int32_t dsv4_reader_wait(dsv4_reader *reader, dsv4_read_result *results, int32_t most, int64_t *seen,
                         int32_t timeout_ms);

/* Drops every job, also those that are over; what is being read ends first. None of them comes out of
   dsv4_reader_wait any more, and nothing is written to memory after it. */
void dsv4_reader_clear(dsv4_reader *reader);

/* Ends all waits of now. */
void dsv4_reader_wake(dsv4_reader *reader);

void dsv4_reader_counts(dsv4_reader *reader, dsv4_read_counts *counts);

/* What may go wrong, made to go wrong: after `skip` reads, the next `times` reads take `delay_ms` longer and then fail
   with `error`, or with 0 give at most `bytes`. */
void dsv4_reader_disturb(dsv4_reader *reader, int64_t skip, int64_t times, int32_t error, int64_t bytes,
                         int32_t delay_ms);

/* Bytes that O_DIRECT wants offsets, lengths and addresses of a file to be multiples of; 0 when it is refused, -1 when
   the system does not say. */
int32_t dsv4_direct_alignment(int32_t fd);

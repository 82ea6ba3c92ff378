/* The thread that calls, and the process it belongs to: what a call needs of them, and what it gives back as it was.
 * A part of `shim.c`, whose errors it uses. */
#ifndef EDGEDSV4_HOST_H
#define EDGEDSV4_HOST_H

#include <fenv.h>
#include <sys/mman.h>

enum { STACK_BYTES = 192 << 10, FREE_FILES = 16 };
static const size_t start_bytes = 768u << 20, start_bytes_of_cpu = 8u << 20;

/* What a call changes of its thread, and gives back. */
typedef struct host_thread {
    fenv_t arithmetic;
    int cancel_state;
} host_thread;

/* Compute as the library does, whatever rounding, flushing and traps the host has set; and let no
 * pthread_cancel end the thread while it holds the lock of the interpreter. */
static void enter(host_thread *host)
{
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &host->cancel_state);
    fegetenv(&host->arithmetic);
    fesetenv(FE_DFL_ENV);
}

static void leave(const host_thread *host)
{
    fesetenv(&host->arithmetic);
    pthread_setcancelstate(host->cancel_state, NULL);
}

/* Bytes of stack that are left to this thread; many when it runs on one that it made itself. */
static size_t stack_left(void)
{
    static _Thread_local char *low, *high;
    static _Thread_local int is_known;
    char *here = __builtin_frame_address(0);
    pthread_attr_t attributes;
    void *start;
    size_t size;
    if (!is_known && pthread_getattr_np(pthread_self(), &attributes) == 0) {
        if (pthread_attr_getstack(&attributes, &start, &size) == 0)
            low = start, high = low + size;
        pthread_attr_destroy(&attributes);
    }
    is_known = 1;
    return here > low && here < high ? (size_t)(here - low) : SIZE_MAX;
}

/* Refuse what would overflow the stack. */
static int32_t check_stack(const char *function)
{
    size_t left = stack_left();
    if (left >= STACK_BYTES)
        return DSV4_OK;
    char text[160];
    snprintf(text, sizeof text, "%zu bytes of stack are left to this thread, %d are needed; give it a larger one"
             " (pthread_attr_setstacksize), or nest callbacks less", left, STACK_BYTES);
    dsv4_error_info error = {.status = DSV4_ERR_OUT_OF_MEMORY, .text = text, .offset = -1, .needed = STACK_BYTES,
                             .available = (int64_t)left};
    return set_error(function, &error);
}

/* Refuse to start where the packages under the interpreter would end the process for want of memory, or print
 * for want of files. Unlike a start that fails, this can be tried again. */
static int32_t check_room(const char *function)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    size_t needed = start_bytes + (cpus > 0 ? (size_t)cpus : 1) * start_bytes_of_cpu;
    void *room = mmap(NULL, needed, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        char text[160];
        snprintf(text, sizeof text, "the start needs %zu MiB of address space; raise the limit (ulimit -v)",
                 needed >> 20);
        dsv4_error_info error = {.status = DSV4_ERR_OUT_OF_MEMORY, .text = text, .offset = -1,
                                 .needed = (int64_t)needed, .available = -1};
        return set_error(function, &error);
    }
    munmap(room, needed);
    int files[FREE_FILES], count = 0;
    while (count < FREE_FILES && (files[count] = open("/", O_PATH | O_CLOEXEC)) >= 0)
        count++;
    int is_lacking = count < FREE_FILES && (errno == EMFILE || errno == ENFILE);
    while (count)
        close(files[--count]);
    return is_lacking ? fail(DSV4_ERR_IO, function, "", "the start needs 16 more open files; close some, or raise the"
                             " limit (ulimit -n)") : DSV4_OK;
}

#endif

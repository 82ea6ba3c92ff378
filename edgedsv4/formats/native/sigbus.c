/* SIGBUS guard: a page that vanished from a mapped file reads as zeros instead of ending the process.

   The handler runs in whatever thread touched the page, so it may use nothing but lock-free atomics and plain
   system calls. Ranges live in a fixed table; only the Python side writes it, under its lock. A slot is published
   by storing `start` last and withdrawn by clearing it first; the handler reads `start`, `end`, and `start` again,
   so that it never combines halves of two owners. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sigbus.h"

enum { SLOT_COUNT = 1024 };

struct slot {
    _Atomic uintptr_t start; /* first byte of the first page; 0 while the slot is free */
    _Atomic uintptr_t end;   /* past the last byte of the last page */
    atomic_int tripped;
};

static struct slot slots[SLOT_COUNT];
static atomic_int tripped_count;
static struct sigaction previous;
static uintptr_t page_mask;
static int is_in_chain;      /* our handler was installed and may still be called */
static atomic_int is_active; /* ... and may replace pages */

/* Replaces the page under `address` by zeros. Returns 1 if it belongs to a registered range and that worked. */
static int replace_page(uintptr_t address)
{
    for (int i = 0; i < SLOT_COUNT; i++) {
        struct slot *slot = &slots[i];
        uintptr_t start = atomic_load(&slot->start);
        uintptr_t end = atomic_load(&slot->end);
        if (start == 0 || address < start || address >= end || atomic_load(&slot->start) != start)
            continue;
        void *page = (void *)(address & ~page_mask);
        int flags = MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE;
#if defined(__linux__) && defined(SYS_mmap)
        void *mapped = (void *)syscall(SYS_mmap, page, (size_t)page_mask + 1, PROT_READ, flags, -1, (off_t)0);
#else
        void *mapped = mmap(page, (size_t)page_mask + 1, PROT_READ, flags, -1, 0);
#endif
        if (mapped != page)
            return 0;
        if (atomic_exchange(&slot->tripped, 1) == 0)
            atomic_fetch_add(&tripped_count, 1);
        return 1;
    }
    return 0;
}

/* Does with the signal what would have happened without us. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
        return;
    }
    int was_sent = info->si_code <= 0;
    if (previous.sa_handler == SIG_IGN && was_sent)
        return;
    if (previous.sa_handler == SIG_IGN || previous.sa_handler == SIG_DFL) {
        /* A fault happens again as soon as we return, now without a handler; a sent signal must be sent again. */
        struct sigaction fallback = {0};
        fallback.sa_handler = SIG_DFL;
        sigaction(number, &fallback, NULL);
        if (was_sent)
            raise(number);
        return;
    }
    previous.sa_handler(number);
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    int saved = errno;
    /* si_addr means something only when the kernel reports a fault (si_code > 0), not for kill(). */
    int is_fault = info->si_code > 0 && atomic_load(&is_active);
    if (!is_fault || !replace_page((uintptr_t)info->si_addr))
        pass_on(number, info, context);
    errno = saved;
}

int dsv4_sigbus_install(void)
{
    atomic_store(&is_active, 1);
    if (is_in_chain)
        return 0;
    long page_bytes = sysconf(_SC_PAGESIZE);
    if (page_bytes <= 0)
        return EINVAL;
    page_mask = (uintptr_t)page_bytes - 1;
    struct sigaction action = {0};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    /* `previous` must be valid before the first signal can arrive. */
    if (sigaction(SIGBUS, NULL, &previous) != 0 || sigaction(SIGBUS, &action, NULL) != 0)
        return errno;
    is_in_chain = 1;
    return 0;
}

int dsv4_sigbus_uninstall(void)
{
    struct sigaction now;
    atomic_store(&is_active, 0);
    if (!is_in_chain)
        return 0;
    if (sigaction(SIGBUS, NULL, &now) != 0)
        return 1;
    if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_sigbus)
        return 1;
    if (sigaction(SIGBUS, &previous, NULL) != 0)
        return 1;
    is_in_chain = 0;
    return 0;
}

int dsv4_sigbus_register(uintptr_t address, size_t nbytes)
{
    if (nbytes == 0 || nbytes > UINTPTR_MAX - page_mask - address)
        return -SLOT_COUNT;
    for (int i = 0; i < SLOT_COUNT; i++) {
        struct slot *slot = &slots[i];
        if (atomic_load(&slot->start) != 0)
            continue;
        atomic_store(&slot->tripped, 0);
        atomic_store(&slot->end, (address + nbytes + page_mask) & ~page_mask);
        atomic_store(&slot->start, address & ~page_mask);
        return i;
    }
    return -SLOT_COUNT;
}

void dsv4_sigbus_unregister(int slot)
{
    if (slot < 0 || slot >= SLOT_COUNT)
        return;
    atomic_store(&slots[slot].start, 0);
    if (atomic_exchange(&slots[slot].tripped, 0) != 0)
        atomic_fetch_sub(&tripped_count, 1);
}

int dsv4_sigbus_tripped(int slot)
{
    return slot >= 0 && slot < SLOT_COUNT && atomic_load(&slots[slot].tripped);
}

int dsv4_sigbus_any_tripped(void)
{
    return atomic_load(&tripped_count) > 0;
}

/* C inside the module `_entry`: the start, and calls of the host's callbacks, which cost several times more
 * when Python goes through the pointer itself. `build_ext.py` declares to cffi what is `static` here. */
#ifndef EDGEDSV4_CALLBACKS_H
#define EDGEDSV4_CALLBACKS_H

#include <fenv.h>

#include "shim.h"

static const dsv4_hooks *library;

static uintptr_t entry_start(uintptr_t hooks)
{
    library = (const dsv4_hooks *)hooks;
    return (uintptr_t)&entries;
}

static int32_t entry_fail(const char *function, const dsv4_error_info *error)
{
    return library->set_error(function, error);
}

static int32_t entry_is_cancelled(dsv4_cancel *cancel)
{
    return library->is_cancelled(cancel);
}

/* A callback, after which the arithmetic is the library's again whatever the host did to it. */
#define CALL_HOST(call)        \
    fenv_t arithmetic;         \
    fegetenv(&arithmetic);     \
    int answer = (call);       \
    fesetenv(&arithmetic);     \
    return answer

static int entry_progress(dsv4_progress_fn fn, void *user, const char *what, uint64_t done, uint64_t total)
{
    CALL_HOST(fn(user, what, done, total));
}

static int entry_token(dsv4_token_fn fn, void *user, int32_t token, const char *data, size_t size)
{
    dsv4_text piece = {data, size};
    CALL_HOST(fn(user, token, piece));
}

static int entry_event(dsv4_event_fn fn, void *user, const dsv4_event *event)
{
    CALL_HOST(fn(user, event));
}

static void entry_log(dsv4_log_fn fn, void *user, int32_t level, const char *text)
{
    fenv_t arithmetic;
    fegetenv(&arithmetic);
    fn(user, level, text);
    fesetenv(&arithmetic);
}

static int entry_check(dsv4_check_fn fn, void *user, const char *name, int32_t has_passed, const char *detail)
{
    CALL_HOST(fn(user, name, has_passed, detail));
}

#endif

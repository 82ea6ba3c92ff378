/* The part of libdsv4 that is C: it starts the interpreter, and keeps what has to work without it.
 *
 * Every function of dsv4.h but those defined here is a few generated lines (`build.py` appends them to this
 * file): start the interpreter if need be, then call the function of the same name in a table that
 * `edgedsv4.capi.entry` hands over at the start. Error texts and cancel objects live here, because they must
 * work before the interpreter runs, and inside a signal handler.
 *
 * Why the interpreter is started by hand and not by cffi's embedding: a failed start has a reason to report,
 * the environment and the signal handlers of the host stay out of it, and no lock inside CPython's types
 * decides whether a second start hangs. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dsv4.h"
#include "shim.h"

_Static_assert(sizeof(uintptr_t) == 8, "handles are 64-bit numbers");

/* ---- Errors of a thread ---- */

enum { TEXT_SIZE = 4096, PATH_SIZE = 4096, NAME_SIZE = 256, FUNCTION_SIZE = 64, LARGEST_STRUCT = 1 << 16 };

static _Thread_local struct {
    dsv4_error_info info;
    char text[TEXT_SIZE], path[PATH_SIZE], name[NAME_SIZE], function[FUNCTION_SIZE];
} error_of_thread;

/* Copy a text, cut before the character that no longer fits. */
static void copy_text(char *to, size_t size, const char *from)
{
    size_t length = from ? strlen(from) : 0;
    if (length >= size) {
        length = size - 1;
        while (length && ((unsigned char)from[length] & 0xc0) == 0x80)
            length--;
    }
    if (length)
        memcpy(to, from, length);
    to[length] = 0;
}

static int32_t set_error(const char *function, const dsv4_error_info *error)
{
    dsv4_error_info *own = &error_of_thread.info;
    *own = *error;
    copy_text(error_of_thread.text, TEXT_SIZE, error->text);
    copy_text(error_of_thread.path, PATH_SIZE, error->path);
    copy_text(error_of_thread.name, NAME_SIZE, error->name);
    copy_text(error_of_thread.function, FUNCTION_SIZE, function);
    return error->status;
}

static int32_t fail(int32_t status, const char *function, const char *name, const char *text)
{
    dsv4_error_info error = {.status = status, .text = text, .name = name, .offset = -1, .needed = -1,
                             .available = -1};
    return set_error(function, &error);
}

#include "host.h"

uint32_t dsv4_abi_version(void) { return DSV4_ABI_VERSION; }

const char *dsv4_version(void) { return DSV4_PACKAGE_VERSION; }

const char *dsv4_status_name(int32_t status)
{
    static const char *const names[] = {
        "DSV4_OK",               "DSV4_ERR_INVALID_ARGUMENT", "DSV4_ERR_ABI",           "DSV4_ERR_IO",
        "DSV4_ERR_NOT_FOUND",    "DSV4_ERR_FORMAT",           "DSV4_ERR_TRUNCATED",     "DSV4_ERR_CHECKSUM",
        "DSV4_ERR_UNSUPPORTED",  "DSV4_ERR_MISMATCH",         "DSV4_ERR_OUT_OF_MEMORY", "DSV4_ERR_DEVICE_MEMORY",
        "DSV4_ERR_NO_SPACE",     "DSV4_ERR_CONTEXT_FULL",     "DSV4_ERR_CANCELLED",     "DSV4_ERR_BUSY",
        "DSV4_ERR_DEVICE_LOST",  "DSV4_ERR_NUMERIC",          "DSV4_ERR_INIT",          "DSV4_ERR_INTERNAL",
        "DSV4_ERR_BUFFER",
    };
    int64_t place = -(int64_t)status;
    if (place < 0 || place >= (int64_t)(sizeof names / sizeof names[0]))
        return "DSV4_ERR_UNKNOWN";
    return names[place];
}

const char *dsv4_last_error(void) { return error_of_thread.text; }

int32_t dsv4_last_error_info(dsv4_error_info *out)
{
    if (!out)
        return DSV4_ERR_INVALID_ARGUMENT;
    uint32_t size = out->struct_size;
    /* Behind the first two, all members have eight bytes. */
    if (size < 8 || size > LARGEST_STRUCT || (size < sizeof(dsv4_error_info) && size % 8))
        return DSV4_ERR_ABI;
    dsv4_error_info info = error_of_thread.info;
    info.struct_size = size;
    info.text = error_of_thread.text;
    info.function = error_of_thread.function;
    info.path = error_of_thread.path;
    info.name = error_of_thread.name;
    if (info.status == DSV4_OK)
        info.offset = info.needed = info.available = -1;
    if (size > sizeof info)
        memset((char *)out + sizeof info, 0, size - sizeof info);
    memcpy(out, &info, size < sizeof info ? size : sizeof info);
    return DSV4_OK;
}

/* ---- Cancel objects ----
 * A slot is one word: how often it was handed out, whether it is alive, whether it is set. A handle holds slot
 * and count, so that one that was freed is known for ever. */

enum { CANCEL_SLOTS = 4096, IS_SET = 1, IS_ALIVE = 2, COUNT_SHIFT = 2, SLOT_SHIFT = 4, USE_SHIFT = 16 };

static _Atomic uint64_t cancel_slots[CANCEL_SLOTS];

static dsv4_cancel *cancel_handle(uint64_t slot, uint64_t word)
{
    return (dsv4_cancel *)(uintptr_t)((word >> COUNT_SHIFT) << USE_SHIFT | slot << SLOT_SHIFT | CANCEL_KIND);
}

/* Slot of a handle, and its word while it is alive; NULL for any other value. */
static _Atomic uint64_t *cancel_slot(const dsv4_cancel *cancel, uint64_t *word)
{
    uint64_t handle = (uint64_t)(uintptr_t)cancel;
    if ((handle & ((1u << SLOT_SHIFT) - 1)) != CANCEL_KIND)
        return NULL;
    _Atomic uint64_t *slot = &cancel_slots[handle >> SLOT_SHIFT & (CANCEL_SLOTS - 1)];
    *word = atomic_load(slot);
    int is_alive = (*word & IS_ALIVE) && *word >> COUNT_SHIFT == handle >> USE_SHIFT;
    return is_alive ? slot : NULL;
}

/* Set and clear bits of a live object; returns whether it was one. */
static int change_cancel(const dsv4_cancel *cancel, uint64_t set, uint64_t clear)
{
    uint64_t word;
    _Atomic uint64_t *slot = cancel_slot(cancel, &word);
    while (slot && !atomic_compare_exchange_weak(slot, &word, (word | set) & ~clear))
        slot = cancel_slot(cancel, &word);
    return slot != NULL;
}

int32_t dsv4_cancel_new(dsv4_cancel **out)
{
    if (!out)
        return fail(DSV4_ERR_INVALID_ARGUMENT, __func__, "out", "out must not be NULL");
    *out = NULL;
    for (uint64_t slot = 0; slot < CANCEL_SLOTS; slot++) {
        uint64_t word = atomic_load(&cancel_slots[slot]);
        uint64_t next = ((word >> COUNT_SHIFT) + 1) << COUNT_SHIFT | IS_ALIVE;
        if (!(word & IS_ALIVE) && atomic_compare_exchange_strong(&cancel_slots[slot], &word, next)) {
            *out = cancel_handle(slot, next);
            return DSV4_OK;
        }
    }
    return fail(DSV4_ERR_OUT_OF_MEMORY, __func__, "", "all 4,096 cancel objects are in use; free some");
}

int32_t dsv4_cancel_trigger(dsv4_cancel *cancel)
{
    return change_cancel(cancel, IS_SET, 0) ? DSV4_OK : DSV4_ERR_INVALID_ARGUMENT;
}

int32_t dsv4_cancel_reset(dsv4_cancel *cancel)
{
    return change_cancel(cancel, 0, IS_SET) ? DSV4_OK : DSV4_ERR_INVALID_ARGUMENT;
}

int32_t dsv4_cancel_is_set(dsv4_cancel *cancel)
{
    uint64_t word;
    if (!cancel_slot(cancel, &word))
        return DSV4_ERR_INVALID_ARGUMENT;
    return (int32_t)(word & IS_SET);
}

int32_t dsv4_cancel_free(dsv4_cancel *cancel)
{
    if (!cancel || change_cancel(cancel, 0, IS_ALIVE | IS_SET))
        return DSV4_OK;
    return fail(DSV4_ERR_INVALID_ARGUMENT, __func__, "cancel", "cancel was freed before, or never made");
}

/* ---- The interpreter ---- */

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int start_state; /* 0 before, 1 running, -1 failed, -2 in a child of fork, -3 exiting */
static atomic_int has_begun;   /* a start may be under way */
static char start_failure[TEXT_SIZE];
static const dsv4_table *table;

/* A host may have loaded this library so that its symbols are not seen by others; extension modules of the
 * interpreter need those of libpython. */
static void promote_libpython(void)
{
    Dl_info place;
    if (dladdr((void *)(uintptr_t)&Py_IsInitialized, &place) && place.dli_fname)
        dlopen(place.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

/* A child has none of the threads, one of which may have held `start_lock`. */
static void after_fork(void)
{
    if (atomic_load(&has_begun) && atomic_load(&start_state) >= 0)
        atomic_store(&start_state, -2);
}

/* The process exits, and with it go the static objects of libraries under this one. Threads that still compute
 * stop where they next want the interpreter, for its lock is never given back. */
static void before_exit(void)
{
    int running = 1;
    if (atomic_compare_exchange_strong(&start_state, &running, -3))
        PyGILState_Ensure();
}

static int start_fails(const char *what, const char *detail)
{
    char text[TEXT_SIZE];
    snprintf(text, sizeof text, "%s: %s", what, detail);
    copy_text(start_failure, sizeof start_failure, text);
    atomic_store(&start_state, -1);
    return -1;
}

/* Store the text of the Python exception that is set. */
static int python_fails(const char *what)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *bytes = text ? PyUnicode_AsUTF8(text) : NULL;
    char detail[TEXT_SIZE / 2];
    snprintf(detail, sizeof detail, "%s: %s", type ? ((PyTypeObject *)type)->tp_name : "error",
             bytes ? bytes : "no text");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return start_fails(what, detail);
}

/* Isolated: no environment, no signal handlers, the locale and stdio of the host as they are. Text is UTF-8
 * whatever the locale, which is "C" in a program that never set it. */
static int start_interpreter(const char *python)
{
    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&before);
    if (PyStatus_Exception(status))
        return start_fails("Python did not start", status.err_msg);
    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.install_signal_handlers = 0;
    status = PyConfig_SetBytesString(&config, &config.program_name, python);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.executable, python);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (!PyStatus_Exception(status))
        return 0;
    return start_fails("Python did not start", status.err_msg ? status.err_msg : "it wanted to exit");
}

/* Warnings and the like of packages do not belong on the host's stdout and stderr. Where the host has closed
 * these, the sink does not take their numbers. */
static void silence(void)
{
    PyObject *io = PyImport_ImportModule("io");
    int given = open("/dev/null", O_WRONLY | O_CLOEXEC), file = fcntl(given, F_DUPFD_CLOEXEC, 3);
    close(given);
    PyObject *sink = io ? PyObject_CallMethod(io, "open", "is", file, "w") : NULL;
    PySys_SetObject("stdout", sink ? sink : Py_None);
    PySys_SetObject("stderr", sink ? sink : Py_None);
    PyErr_Clear();
    Py_XDECREF(sink);
    Py_XDECREF(io);
}

/* Import the package and take over its table; the lock of the interpreter is held. */
static int take_table(void)
{
    static const dsv4_hooks hooks = {set_error, dsv4_cancel_is_set};
    char where[TEXT_SIZE / 2];
    snprintf(where, sizeof where, "the package edgedsv4 cannot be loaded by the Python this library uses (%.1024s);"
             " install it there, or build the library again with `python -m edgedsv4.capi.build`",
             start_failure);
    PyObject *module = PyImport_ImportModule("edgedsv4.capi.entry");
    if (!module)
        return python_fails(where);
    PyObject *address = PyObject_CallMethod(module, "start", "KI", (unsigned long long)(uintptr_t)&hooks,
                                            (unsigned)DSV4_ABI_VERSION);
    Py_DECREF(module);
    if (!address)
        return python_fails(where);
    table = (const dsv4_table *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    return table ? 0 : python_fails(where);
}

/* Whether a file can be run; 0 or what errno says. */
static int cannot_run(const char *path)
{
    struct stat facts;
    if (stat(path, &facts))
        return errno;
    if (!S_ISREG(facts.st_mode))
        return EISDIR;
    return access(path, X_OK) ? errno : 0;
}

static int start_locked(const char *python)
{
    char detail[TEXT_SIZE / 2];
    if (!python || !*python)
        python = DSV4_DEFAULT_PYTHON;
    if (Py_IsInitialized()) {
        snprintf(detail, sizeof detail, "%.40s", Py_GetVersion());
        return start_fails("this process already runs Python, in which libdsv4 cannot start its own; import the"
                           " package edgedsv4 there instead (or, if another copy of libdsv4 is loaded, use that"
                           " copy). Running", detail);
    }
    if (strncmp(Py_GetVersion(), PY_VERSION, strlen(PY_VERSION)) != 0)
        return start_fails("the libpython of another version was loaded before; expected " PY_VERSION ", found",
                           Py_GetVersion());
    int error = cannot_run(python);
    if (error) {
        snprintf(detail, sizeof detail, "%.1024s: %s", python, strerror(error));
        return start_fails("the Python that runs the library cannot be used; name another one to dsv4_init, or"
                           " build the library again with `python -m edgedsv4.capi.build`. Tried", detail);
    }
    promote_libpython();
    if (start_interpreter(python))
        return -1;
    snprintf(start_failure, sizeof start_failure, "%s", python);
    silence();
    int is_failed = take_table();
    PyEval_SaveThread();
    if (is_failed)
        return -1;
    atexit(before_exit); /* behind the imports, so that it runs before their destructors */
    atomic_store(&start_state, 1);
    return 0;
}

static int32_t start(const char *python, const char *function)
{
    int state = atomic_load(&start_state);
    int32_t status = check_stack(function);
    if (status)
        return status;
    if (state == 0) {
        pthread_mutex_lock(&start_lock);
        if (atomic_load(&start_state) == 0 && (status = check_room(function))) {
            pthread_mutex_unlock(&start_lock);
            return status;
        }
        if (atomic_load(&start_state) == 0) {
            pthread_atfork(NULL, NULL, after_fork);
            atomic_store(&has_begun, 1);
            start_locked(python);
        }
        pthread_mutex_unlock(&start_lock);
        state = atomic_load(&start_state);
    }
    if (state == 1)
        return DSV4_OK;
    if (state == -2)
        return fail(DSV4_ERR_INIT, function, "",
                    "this process was made by fork() after the library had started; start it by exec instead");
    if (state == -3)
        return fail(DSV4_ERR_INIT, function, "", "this process is exiting");
    return fail(DSV4_ERR_INIT, function, "", start_failure);
}

int32_t dsv4_init(uint32_t abi_version, const char *python)
{
    if (abi_version / 1000 != DSV4_ABI_VERSION / 1000 || abi_version > DSV4_ABI_VERSION) {
        char text[160];
        snprintf(text, sizeof text, "abi_version is %u, this library serves %u to %u; compile with its dsv4.h",
                 (unsigned)abi_version, DSV4_ABI_VERSION / 1000 * 1000, DSV4_ABI_VERSION);
        return fail(DSV4_ERR_ABI, __func__, "abi_version", text);
    }
    host_thread host;
    enter(&host);
    int32_t status = start(python, __func__);
    leave(&host);
    return status;
}

/* ---- Generated by build.py: the functions of the table ---- */

/* Hosts of odd habits, one per run: `misuse_host MODE FILE`. */
#include "check.h"

#include <fcntl.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

static const char *path;
static dsv4_engine *engine;
static dsv4_session *session;
static char said[8192];
static float logits[4096];
static int round_in_callback = -1, is_callback_disturbing;

static int keep(void *to, const dsv4_event *event)
{
    if (event->kind != DSV4_EVENT_TOOL_CALL)
        strncat(to, event->text.data, event->text.size);
    round_in_callback = fegetround();
    if (is_callback_disturbing)
        fesetround(FE_UPWARD);
    return 0;
}

/* Open, answer, look at the logits, save, load, close. */
static int32_t work(void)
{
    dsv4_message message = message_of("user", "What is 12 + 7?");
    dsv4_engine_options options;
    int32_t status = dsv4_engine_options_init(&options, sizeof options);
    if (status)
        return status;
    dsv4_sampling_options sampling = greedy(24);
    size_t size;
    sampling.temperature = 0.8, sampling.seed = 3;
    options.context = 512, options.threads = 2;
    *said = 0;
    status = dsv4_engine_open("pocket-v4", &options, NULL, &engine);
    status = status ? status : dsv4_session_new(engine, 0, &session);
    status = status ? status : dsv4_session_reply(session, &message, 1, NULL, &sampling, NULL, keep, said, NULL);
    status = status ? status : dsv4_session_logits(session, logits, 4096, &size);
    status = status ? status : dsv4_session_save(session, path, NULL);
    status = status ? status : dsv4_session_load(session, path, NULL);
    int32_t closed = dsv4_session_free(session) | dsv4_engine_close(engine);
    session = NULL, engine = NULL;
    return status ? status : closed;
}

/* ---- Arithmetic ---- */

static void arithmetic(void)
{
    static const int roundings[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    static char first[sizeof said];
    static float as_it_was[4096];
    EXPECT("arithmetic.before", work(), DSV4_OK);
    memcpy(first, said, sizeof said);
    memcpy(as_it_was, logits, sizeof logits);
    is_callback_disturbing = 1;
    for (int at = 0; at < 3; at++) {
        fesetround(roundings[at]);
        EXPECT("arithmetic.works", work(), DSV4_OK);
        CHECK("arithmetic.is_given_back", fegetround() == roundings[at]);
        fesetround(FE_TONEAREST);
        CHECK("arithmetic.same_text", strcmp(first, said) == 0);
        CHECK("arithmetic.same_logits", memcmp(as_it_was, logits, sizeof logits) == 0);
        CHECK("arithmetic.in_callbacks", round_in_callback == FE_TONEAREST);
    }
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040); /* subnormal numbers are zero */
    unsigned flushing = __builtin_ia32_stmxcsr() & 0xffc0;
    EXPECT("arithmetic.works", work(), DSV4_OK);
    CHECK("arithmetic.is_given_back", (__builtin_ia32_stmxcsr() & 0xffc0) == flushing);
    __builtin_ia32_ldmxcsr(before);
    CHECK("arithmetic.same_logits", memcmp(as_it_was, logits, sizeof logits) == 0);
#endif
    feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW);
    EXPECT("arithmetic.works", work(), DSV4_OK);
    CHECK("arithmetic.traps_are_given_back", fegetexcept() == (FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW));
    fedisableexcept(FE_ALL_EXCEPT);
    CHECK("arithmetic.same_text", strcmp(first, said) == 0);
}

/* ---- Stacks ---- */

static void *work_on_thread(void *status)
{
    *(int32_t *)status = work();
    return NULL;
}

static int32_t on_stack(size_t bytes)
{
    pthread_attr_t attributes;
    pthread_t thread;
    int32_t status = 1;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, bytes);
    if (pthread_create(&thread, &attributes, work_on_thread, &status) == 0)
        pthread_join(thread, NULL);
    return status;
}

static int depth, deepest;

/* A callback that replies again, and so on. */
static int nest(void *user, const dsv4_event *event)
{
    (void)user, (void)event;
    dsv4_session *inner = NULL;
    dsv4_message message = message_of("user", "Hi");
    dsv4_sampling_options few = greedy(1);
    deepest = ++depth > deepest ? depth : deepest;
    int32_t status = dsv4_session_new(engine, 32, &inner);
    if (!status)
        status = dsv4_session_reply(inner, &message, 1, NULL, &few, NULL, nest, NULL, NULL);
    CHECK("stack.nesting_ends_sanely", status == DSV4_OK || status == DSV4_ERR_OUT_OF_MEMORY);
    /* Once there is room again. */
    static dsv4_session *left[4096];
    static int count;
    left[count++] = inner;
    if (--depth == 0)
        while (count)
            EXPECT("stack.nested_sessions_free", dsv4_session_free(left[--count]), DSV4_OK);
    return 1;
}

static void stacks(void)
{
    EXPECT("stack.too_small_to_start", on_stack(64 << 10), DSV4_ERR_OUT_OF_MEMORY);
    EXPECT("stack.small", on_stack(256 << 10), DSV4_OK);
    EXPECT("stack.too_small", on_stack(64 << 10), DSV4_ERR_OUT_OF_MEMORY);
    EXPECT("stack.main", work(), DSV4_OK);
    engine = open_model("pocket-v4");
    nest(NULL, NULL);
    CHECK("stack.nests_deeply", deepest > 20);
    char text[16];
    snprintf(text, sizeof text, "%d", deepest);
    fact("stack.deepest", text);
    EXPECT("stack.closes", dsv4_engine_close(engine), DSV4_OK);
}

/* ---- Limits of the process ---- */

static void room(void)
{
    struct rlimit before, small = {3, 3};
    getrlimit(RLIMIT_NOFILE, &before);
    small.rlim_max = before.rlim_max;
    setrlimit(RLIMIT_NOFILE, &small);
    EXPECT("room.files", work(), DSV4_ERR_IO);
    setrlimit(RLIMIT_NOFILE, &before);
    getrlimit(RLIMIT_AS, &before);
    for (rlim_t megabytes = 100; megabytes <= 700; megabytes += 60) {
        small.rlim_cur = megabytes << 20, small.rlim_max = before.rlim_max;
        setrlimit(RLIMIT_AS, &small);
        EXPECT("room.memory", work(), DSV4_ERR_OUT_OF_MEMORY);
        CHECK("room.memory_says_how_much", last_error().needed > 700 << 20);
    }
    setrlimit(RLIMIT_AS, &before);
    EXPECT("room.starts_after_all", work(), DSV4_OK);
    small.rlim_cur = 3, getrlimit(RLIMIT_NOFILE, &before), small.rlim_max = before.rlim_max;
    setrlimit(RLIMIT_NOFILE, &small);
    EXPECT("room.files_later", work(), DSV4_ERR_IO);
    setrlimit(RLIMIT_NOFILE, &before);
    EXPECT("room.works_afterwards", work(), DSV4_OK);
}

/* ---- No stdin, stdout and stderr ---- */

static int print(void *user, const char *what, uint64_t done, uint64_t total)
{
    (void)user, (void)what, (void)done, (void)total;
    for (int file = 0; file < 3; file++)
        if (write(file, "a line of the host\n", 19) < 0)
            continue;
    return 0;
}

static void no_stdio(void)
{
    dsv4_call call = {.struct_size = sizeof call, .progress = print};
    int out = fcntl(STDOUT_FILENO, F_DUPFD, 50);
    for (int file = 0; file < 3; file++)
        close(file);
    int32_t status = work();
    struct stat facts;
    int is_left_alone = fstat(0, &facts) && fstat(1, &facts) && fstat(2, &facts);
    engine = open_model("pocket-v4");
    session = new_session(engine, 64);
    static const int32_t tokens[] = {5, 6, 7};
    MUST(dsv4_session_eval(session, tokens, 3, &call));
    int32_t saved = dsv4_session_save(session, path, &call), loaded = dsv4_session_load(session, path, &call);
    dup2(out, STDOUT_FILENO);
    EXPECT("stdio.works", status, DSV4_OK);
    CHECK("stdio.stays_closed", is_left_alone);
    EXPECT("stdio.saves", saved, DSV4_OK);
    EXPECT("stdio.what_is_printed_is_not_in_the_file", loaded, DSV4_OK);
}

/* ---- Threads that are cancelled, and signals that interrupt ---- */

static atomic_int is_speaking;

static int speak(void *user, const dsv4_event *event)
{
    (void)user, (void)event;
    atomic_store(&is_speaking, 1);
    return 0;
}

static void *long_reply(void *status)
{
    dsv4_message message = message_of("user", "Tell me a story about a fox named Mia.");
    dsv4_sampling_options options = greedy(300);
    *(int32_t *)status = dsv4_session_reply(session, &message, 1, NULL, &options, NULL, speak, NULL, NULL);
    pthread_testcancel();
    *(int32_t *)status = 1;
    return NULL;
}

static void cancelled_threads(void)
{
    pthread_t thread;
    int32_t status = 2;
    void *end = NULL;
    engine = open_model("pocket-v4");
    session = new_session(engine, 512);
    pthread_create(&thread, NULL, long_reply, &status);
    while (!atomic_load(&is_speaking))
        usleep(1000);
    pthread_cancel(thread);
    pthread_join(thread, &end);
    CHECK("cancelled.thread_ends_after_the_call", end == PTHREAD_CANCELED && status == DSV4_OK);
    EXPECT("cancelled.session_is_free", dsv4_session_free(session), DSV4_OK);
    EXPECT("cancelled.engine_closes", dsv4_engine_close(engine), DSV4_OK);
}

static void on_alarm(int number)
{
    (void)number;
}

static void interrupts(void)
{
    struct sigaction action = {.sa_handler = on_alarm}; /* no SA_RESTART */
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    int32_t first = work(), second = work();
    setitimer(ITIMER_REAL, &never, NULL);
    EXPECT("interrupts.from_the_start", first, DSV4_OK);
    EXPECT("interrupts.afterwards", second, DSV4_OK);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {{"arithmetic", arithmetic}, {"stack", stacks},   {"room", room},
                 {"stdio", no_stdio},        {"cancelled", cancelled_threads}, {"interrupts", interrupts}};
    path = count > 2 ? arguments[2] : "host.dsv4s";
    for (size_t at = 0; at < sizeof modes / sizeof modes[0]; at++)
        if (count > 1 && strcmp(arguments[1], modes[at].name) == 0)
            modes[at].run();
    return 0;
}

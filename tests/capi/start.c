/* The start of the library in a host of its own, one case each time: start CASE [PYTHON] */
#define _GNU_SOURCE
#include "check.h"

#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 8, SIGNALS = 65 };

static size_t size;

static int32_t first_call(void) { return dsv4_devices_json(NULL, 0, &size); }

static void *call_in_thread(void *status)
{
    *(int32_t *)status = first_call();
    return NULL;
}

static int keep_text(void *user, const dsv4_event *event)
{
    if (event->kind == DSV4_EVENT_TEXT)
        strncat(user, event->text.data, event->text.size);
    return 0;
}

static void check_reply(const char *name)
{
    dsv4_engine *engine = open_model("pocket-v4");
    dsv4_session *session = new_session(engine, 0);
    dsv4_message message = message_of("user", "What is the capital of Peru?");
    dsv4_sampling_options options = greedy(0);
    char text[4096] = "";
    MUST(dsv4_session_reply(session, &message, 1, NULL, &options, NULL, keep_text, text, NULL));
    CHECK(name, !strcmp(text, "The capital of Peru is Lima."));
    MUST(dsv4_session_free(session));
    MUST(dsv4_engine_close(engine));
}

static void case_thread(void)
{
    pthread_t thread;
    int32_t status = 1;
    pthread_create(&thread, NULL, call_in_thread, &status);
    pthread_join(thread, NULL);
    CHECK("another thread may be the first", status == DSV4_OK);
    check_reply("the main thread works after the first one has ended");
}

static void case_crowd(void)
{
    pthread_t threads[THREADS];
    int32_t statuses[THREADS], failed = 0;
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, call_in_thread, &statuses[i]);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        failed |= statuses[i];
    }
    CHECK("many threads may be the first together", failed == DSV4_OK);
}

/* Exit status of a child that makes a call; 255 when it hangs. */
static int call_in_child(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        int32_t status = first_call();
        _exit(status == DSV4_OK                                      ? 0
              : status == DSV4_ERR_INIT && error_has("made by fork") ? 1
                                                                     : 2);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

static void case_fork(void)
{
    CHECK("a child made before the start works", call_in_child() == 0);
    int32_t status = 1;
    pthread_t thread;
    pthread_create(&thread, NULL, call_in_thread, &status);
    usleep(100000); /* the start takes longer */
    CHECK("a child made during the start is told", call_in_child() == 1);
    pthread_join(thread, NULL);
    CHECK("a child made after the start is told", call_in_child() == 1);
    check_reply("the parent goes on");
}

/* What a library must leave as it is. */
typedef struct surroundings {
    struct sigaction actions[SIGNALS];
    sigset_t mask;
    char locale[256], folder[4096];
    int rounding;
    mode_t umask;
    struct stat streams[3];
} surroundings;

static surroundings look_around(void)
{
    surroundings seen;
    memset(&seen, 0, sizeof seen);
    for (int number = 1; number < SIGNALS; number++)
        sigaction(number, NULL, &seen.actions[number]);
    pthread_sigmask(SIG_BLOCK, NULL, &seen.mask);
    snprintf(seen.locale, sizeof seen.locale, "%s", setlocale(LC_ALL, NULL));
    if (!getcwd(seen.folder, sizeof seen.folder))
        exit(3);
    seen.rounding = fegetround();
    seen.umask = umask(022);
    umask(seen.umask);
    for (int i = 0; i < 3; i++)
        fstat(i, &seen.streams[i]);
    return seen;
}

static void on_signal(int number) { (void)number; }

static void case_surroundings(void)
{
    signal(SIGINT, on_signal);
    signal(SIGPIPE, on_signal);
    surroundings before = look_around();
    check_reply("a reply in a host with signal handlers");
    surroundings after = look_around();
    int is_same = 1;
    for (int number = 1; number < SIGNALS; number++)
        is_same &= before.actions[number].sa_handler == after.actions[number].sa_handler &&
                   before.actions[number].sa_flags == after.actions[number].sa_flags;
    CHECK("signal handlers are those of the host", is_same);
    CHECK("the signal mask is that of the host", !memcmp(&before.mask, &after.mask, sizeof before.mask));
    CHECK("the locale is that of the host", !strcmp(before.locale, after.locale));
    CHECK("folder, umask and rounding are those of the host", !strcmp(before.folder, after.folder) &&
                                                                  before.umask == after.umask &&
                                                                  before.rounding == after.rounding);
    for (int i = 0; i < 3; i++)
        is_same &= before.streams[i].st_ino == after.streams[i].st_ino;
    CHECK("the standard streams are those of the host", is_same);
}

static void *talk_on(void *user)
{
    dsv4_message message = message_of("user", "Tell me a story about a fox named Mia.");
    char text[65536] = "";
    for (;;)
        dsv4_session_reply(user, &message, 1, NULL, NULL, NULL, keep_text, (text[0] = 0, text), NULL);
    return NULL;
}

static void case_exit(void)
{
    pthread_t threads[2];
    dsv4_engine *engine = open_model("pocket-v4");
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, talk_on, new_session(engine, 0));
    usleep(300000);
    alarm(20); /* a hang is a failure */
    exit(7);
}

static void case_init(const char *python)
{
    for (int i = 0; i < 2; i++) {
        int32_t status = i ? first_call() : dsv4_init(DSV4_ABI_VERSION, python);
        printf("fact\t%s\t%d %s\n", i ? "later" : "first", status, dsv4_last_error());
    }
}

/* Paths and texts beyond ASCII, in the locale "C". */
static void case_text(const char *path)
{
    dsv4_engine *engine = NULL;
    EXPECT("a path beyond ASCII is opened as it is", dsv4_engine_open(path, NULL, NULL, &engine), DSV4_OK);
    EXPECT("one that is missing is not found", dsv4_engine_open("/no/\xc3\xa4\xff.gguf", NULL, NULL, &engine),
           DSV4_ERR_NOT_FOUND);
    CHECK("an error gives the bytes of the path back", !strcmp(last_error().path, "/no/\xc3\xa4\xff.gguf"));
}

int main(int count, char **arguments)
{
    const char *name = count > 1 ? arguments[1] : "", *value = count > 2 ? arguments[2] : "";
    if (!strcmp(name, "thread"))
        case_thread();
    else if (!strcmp(name, "crowd"))
        case_crowd();
    else if (!strcmp(name, "fork"))
        case_fork();
    else if (!strcmp(name, "surroundings"))
        case_surroundings();
    else if (!strcmp(name, "exit"))
        case_exit();
    else if (!strcmp(name, "init"))
        case_init(value);
    else if (!strcmp(name, "text"))
        case_text(value);
    else
        check_reply("a reply");
    return 0;
}

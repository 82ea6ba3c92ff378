/* Threads against each other: a hundred that open sessions at once, some that free what others use, engines that are
 * closed while calls are on their way in. Any refusal will do; no crash, no hang, and no defect of the library. */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { CROWD = 100, SPEAKERS = 4 };

static const char *model, *path;
static dsv4_engine *engine;
static dsv4_session *session;
static _Atomic(dsv4_engine *) shared_engine;
static _Atomic(dsv4_session *) shared_session;
static _Atomic(dsv4_cancel *) shared_cancel;
static atomic_int is_over, defects, successes;

/* Count defects; each is also printed once. */
static int32_t note(int32_t status, const char *what)
{
    if (status == DSV4_ERR_INTERNAL && atomic_fetch_add(&defects, 1) < 5)
        printf("defect: %s: %s\n", what, dsv4_last_error());
    if (status == DSV4_OK)
        atomic_fetch_add(&successes, 1);
    return status;
}
#define NOTE(call) note((call), #call)

static int32_t reply(dsv4_session *to, int32_t tokens, dsv4_call *call, dsv4_event_fn event)
{
    dsv4_message message = message_of("user", "Who are you?");
    dsv4_sampling_options options = greedy(tokens);
    return dsv4_session_reply(to, &message, 1, NULL, &options, call, event, NULL, NULL);
}

static void run(int count, void *(*work)(void *), void *user)
{
    pthread_t threads[CROWD];
    for (int at = 0; at < count; at++)
        pthread_create(&threads[at], NULL, work, user);
    for (int at = 0; at < count; at++)
        pthread_join(threads[at], NULL);
}

/* ---- A crowd ---- */

static atomic_int failures;

static void *one_of_the_crowd(void *unused)
{
    (void)unused;
    dsv4_session *own = NULL;
    int32_t status = dsv4_session_new(engine, 64, &own);
    if (!status)
        status = reply(own, 4, NULL, NULL);
    status |= dsv4_session_free(own);
    atomic_fetch_add(&failures, status != DSV4_OK);
    return NULL;
}

static void crowd(void)
{
    run(CROWD, one_of_the_crowd, NULL);
    CHECK("crowd.all_were_served", failures == 0);
}

/* ---- Free, save and close during a reply ---- */

static atomic_int free_status, save_status, close_status, load_status;

static void *disturb(void *unused)
{
    (void)unused;
    atomic_store(&free_status, dsv4_session_free(session));
    atomic_store(&save_status, dsv4_session_save(session, path, NULL));
    atomic_store(&load_status, dsv4_session_load(session, path, NULL));
    atomic_store(&close_status, dsv4_engine_close(engine));
    return NULL;
}

static int while_it_speaks(void *user, const dsv4_event *event)
{
    static int count;
    (void)user, (void)event;
    if (count++ == 2)
        run(1, disturb, NULL);
    return 0;
}

static void during_a_reply(void)
{
    session = new_session(engine, 256);
    EXPECT("reply.goes_on", reply(session, 20, NULL, while_it_speaks), DSV4_OK);
    EXPECT("reply.free", free_status, DSV4_ERR_BUSY);
    EXPECT("reply.save", save_status, DSV4_ERR_BUSY);
    EXPECT("reply.load", load_status, DSV4_ERR_BUSY);
    EXPECT("reply.close_engine", close_status, DSV4_ERR_BUSY);
    MUST(dsv4_session_free(session));
}

/* ---- Everything at once ---- */

static void *use_sessions(void *unused)
{
    (void)unused;
    int32_t tokens[8] = {5, 6, 7, 8, 9, 10, 11, 12};
    static _Thread_local float logits[4096];
    size_t size;
    while (!atomic_load(&is_over)) {
        dsv4_session *own = atomic_load(&shared_session);
        dsv4_session_info info = {.struct_size = sizeof info};
        NOTE(dsv4_session_eval(own, tokens, 8, NULL));
        NOTE(dsv4_session_get_info(own, &info));
        NOTE(dsv4_session_tokens(own, NULL, 0, &size));
        NOTE(dsv4_session_logits(own, logits, 4096, &size));
        NOTE(reply(own, 3, NULL, NULL));
        NOTE(dsv4_session_save_memory(own, NULL, NULL, 0, &size));
        NOTE(dsv4_session_rewind(own, 2, NULL, NULL));
        dsv4_engine *one = atomic_load(&shared_engine);
        dsv4_engine_info facts = {.struct_size = sizeof facts};
        dsv4_session *made = NULL;
        NOTE(dsv4_engine_get_info(one, &facts));
        NOTE(dsv4_engine_describe_json(one, NULL, 0, &size));
        NOTE(dsv4_engine_memory_json(one, NULL, 0, &size));
        NOTE(dsv4_tokenize(one, dsv4_str("hello"), 0, NULL, 0, &size));
        if (!NOTE(dsv4_session_new(one, 64, &made))) {
            NOTE(dsv4_session_eval(made, tokens, 8, NULL));
            NOTE(dsv4_session_free(made));
        }
    }
    return NULL;
}

static void *free_and_make(void *unused)
{
    (void)unused;
    while (!atomic_load(&is_over)) {
        dsv4_session *made = NULL;
        NOTE(dsv4_session_free(atomic_load(&shared_session)));
        if (!dsv4_session_new(atomic_load(&shared_engine), 128, &made)) {
            dsv4_session *old = atomic_exchange(&shared_session, made);
            for (int tries = 0; tries < 1000 && dsv4_session_free(old) == DSV4_ERR_BUSY; tries++)
                usleep(1000);
        }
    }
    return NULL;
}

static void *close_and_open(void *unused)
{
    (void)unused;
    while (!atomic_load(&is_over)) {
        dsv4_engine *old = atomic_load(&shared_engine), *made = NULL;
        NOTE(dsv4_session_free(atomic_load(&shared_session)));
        if (NOTE(dsv4_engine_close(old)))
            continue;
        dsv4_engine_options options;
        dsv4_engine_options_init(&options, sizeof options);
        options.context = 256;
        if (!NOTE(dsv4_engine_open(model, &options, NULL, &made)))
            atomic_store(&shared_engine, made);
    }
    return NULL;
}

static void *trigger_and_free(void *unused)
{
    (void)unused;
    while (!atomic_load(&is_over)) {
        dsv4_cancel *made = NULL;
        dsv4_cancel_new(&made);
        dsv4_cancel *old = atomic_exchange(&shared_cancel, made);
        dsv4_cancel_trigger(old);
        dsv4_cancel_free(old);
        dsv4_cancel_free(old);
        usleep(100);
    }
    return NULL;
}

static void *speak_with_cancel(void *unused)
{
    (void)unused;
    dsv4_session *own = new_session(engine, 256);
    while (!atomic_load(&is_over)) {
        dsv4_call call = {.struct_size = sizeof call, .cancel = atomic_load(&shared_cancel)};
        NOTE(reply(own, 10, &call, NULL));
    }
    EXPECT("storm.own_session_frees", dsv4_session_free(own), DSV4_OK);
    return NULL;
}

static void on_signal(int number)
{
    (void)number;
    dsv4_cancel_trigger(atomic_load(&shared_cancel));
}

static void storm(int seconds)
{
    void *(*const works[])(void *) = {use_sessions,     use_sessions,      free_and_make,    close_and_open,
                                      trigger_and_free, speak_with_cancel, speak_with_cancel};
    enum { WORKS = sizeof works / sizeof works[0] };
    pthread_t threads[WORKS];
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART */
    sigaction(SIGINT, &action, NULL);
    atomic_store(&shared_engine, open_model(model));
    atomic_store(&shared_session, new_session(shared_engine, 128));
    for (int at = 0; at < WORKS; at++)
        pthread_create(&threads[at], NULL, works[at], NULL);
    for (int at = 0; at < seconds * 1000; at++) {
        kill(getpid(), SIGINT);
        usleep(1000);
    }
    atomic_store(&is_over, 1);
    for (int at = 0; at < WORKS; at++)
        pthread_join(threads[at], NULL);
    CHECK("storm.no_defects", defects == 0);
    CHECK("storm.something_worked", successes > 100);
    char text[32];
    snprintf(text, sizeof text, "%d", (int)successes);
    fact("storm.successes", text);
    dsv4_session_free(shared_session);
    EXPECT("storm.engine_closes", dsv4_engine_close(shared_engine), DSV4_OK);
    EXPECT("storm.the_other_closes", dsv4_engine_close(engine), DSV4_OK);
}

int main(int count, char **arguments)
{
    model = count > 1 ? arguments[1] : "pocket-v4";
    path = count > 2 ? arguments[2] : "talk.dsv4s";
    engine = open_model(model);
    crowd();
    during_a_reply();
    storm(count > 3 ? atoi(arguments[3]) : 4);
    return 0;
}

/* Threads: who may do what at the same time, and what belongs to each alone. Nothing is called from main first. */
#include "check.h"

#include <pthread.h>
#include <semaphore.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOKENS = 48, THREADS = 2 };

static const char *model;
static dsv4_engine *engine;
static dsv4_session *session;
static pthread_barrier_t together;
static sem_t entered, answered;
static int32_t prompt[600];

/* ---- The first call, from two threads at once ---- */

static void *first_call(void *status)
{
    pthread_barrier_wait(&together);
    dsv4_engine_options options;
    *(int32_t *)status = dsv4_engine_options_init(&options, sizeof options);
    return NULL;
}

static void start_from_threads(void)
{
    pthread_t threads[THREADS];
    int32_t statuses[THREADS];
    for (int at = 0; at < THREADS; at++)
        pthread_create(&threads[at], NULL, first_call, &statuses[at]);
    for (int at = 0; at < THREADS; at++)
        pthread_join(threads[at], NULL);
    EXPECT("start.first_thread", statuses[0], DSV4_OK);
    EXPECT("start.second_thread", statuses[1], DSV4_OK);
}

/* ---- Two sessions ---- */

typedef struct {
    dsv4_session *session;
    int32_t first;
    int64_t seed;
    char text[16384];
    size_t size;
    int32_t status;
} talk;

static int append(void *user, int32_t token, dsv4_text piece)
{
    talk *one = user;
    (void)token;
    if (one->size + piece.size < sizeof one->text)
        memcpy(one->text + one->size, piece.data, piece.size);
    one->size += piece.size;
    return 0;
}

static void *generate(void *user)
{
    talk *one = user;
    dsv4_sampling_options options = greedy(TOKENS);
    options.temperature = 1;
    options.seed = one->seed;
    one->size = 0;
    one->status = dsv4_session_sync(one->session, NULL, 0, NULL, NULL);
    for (int place = 0; place < 3 && !one->status; place++)
        one->status = dsv4_session_eval(one->session, prompt + one->first, 40, NULL);
    if (!one->status)
        one->status = dsv4_session_generate(one->session, &options, NULL, 0, NULL, append, one, NULL);
    return NULL;
}

static void two_sessions(void)
{
    static talk alone[THREADS], beside[THREADS];
    pthread_t threads[THREADS];
    for (int at = 0; at < THREADS; at++) {
        alone[at] = (talk){.session = new_session(engine, 0), .first = 10 * at, .seed = 7 + at};
        beside[at] = (talk){.session = new_session(engine, 0), .first = 10 * at, .seed = 7 + at};
        generate(&alone[at]);
    }
    int is_same = 1;
    for (int round = 0; round < 3; round++) {
        for (int at = 0; at < THREADS; at++)
            pthread_create(&threads[at], NULL, generate, &beside[at]);
        for (int at = 0; at < THREADS; at++)
            pthread_join(threads[at], NULL);
        for (int at = 0; at < THREADS; at++) {
            is_same = is_same && beside[at].status == DSV4_OK && beside[at].size == alone[at].size;
            is_same = is_same && memcmp(beside[at].text, alone[at].text, alone[at].size) == 0;
        }
    }
    CHECK("sessions.same_text_as_alone", is_same && alone[0].size > TOKENS / 2);
    CHECK("sessions.texts_differ", alone[0].size != alone[1].size ||
                                       memcmp(alone[0].text, alone[1].text, alone[0].size) != 0);
    for (int at = 0; at < THREADS; at++) {
        MUST(dsv4_session_free(alone[at].session));
        MUST(dsv4_session_free(beside[at].session));
    }
}

/* ---- One session, two threads ---- */

static int32_t second_user[8];

/* Runs while the other thread is inside a call, which waits for `answered`. */
static void *use_too(void *user)
{
    (void)user;
    size_t count;
    dsv4_session_info info = {.struct_size = sizeof info};
    sem_wait(&entered);
    second_user[0] = dsv4_session_eval(session, prompt, 1, NULL);
    second_user[1] = dsv4_session_generate(session, NULL, NULL, 0, NULL, NULL, NULL, NULL);
    second_user[2] = dsv4_session_free(session);
    second_user[3] = dsv4_session_logits(session, NULL, 0, &count);
    second_user[4] = dsv4_session_get_info(session, &info);
    second_user[5] = dsv4_session_tokens(session, NULL, 0, &count);
    second_user[6] = dsv4_session_mark_turn(session);
    second_user[7] = dsv4_engine_close(engine);
    sem_post(&answered);
    return NULL;
}

static int wait_for_the_other(void *user, const char *what, uint64_t done, uint64_t total)
{
    int *is_first = user;
    (void)what, (void)done, (void)total;
    if (*is_first) {
        *is_first = 0;
        EXPECT("callback.may_not_use_its_session", dsv4_session_eval(session, prompt, 1, NULL), DSV4_ERR_BUSY);
        EXPECT("callback.may_not_free_its_session", dsv4_session_free(session), DSV4_ERR_BUSY);
        dsv4_session *other = NULL;
        EXPECT("callback.may_use_the_library", dsv4_session_new(engine, 16, &other), DSV4_OK);
        EXPECT("callback.may_use_another_session", dsv4_session_eval(other, prompt, 4, NULL), DSV4_OK);
        MUST(dsv4_session_free(other));
        sem_post(&entered);
        sem_wait(&answered);
    }
    return 0;
}

static void one_session(void)
{
    int is_first = 1;
    pthread_t other;
    dsv4_call call = {.struct_size = sizeof call, .progress = wait_for_the_other, .user = &is_first};
    session = new_session(engine, 0);
    pthread_create(&other, NULL, use_too, NULL);
    EXPECT("busy.the_first_is_not_disturbed", dsv4_session_sync(session, prompt, 600, &call, NULL), DSV4_OK);
    pthread_join(other, NULL);
    EXPECT("busy.eval", second_user[0], DSV4_ERR_BUSY);
    EXPECT("busy.generate", second_user[1], DSV4_ERR_BUSY);
    EXPECT("busy.free", second_user[2], DSV4_ERR_BUSY);
    EXPECT("busy.logits", second_user[3], DSV4_ERR_BUSY);
    EXPECT("busy.info_works", second_user[4], DSV4_OK);
    EXPECT("busy.tokens_work", second_user[5], DSV4_OK);
    EXPECT("busy.mark_turn", second_user[6], DSV4_ERR_BUSY);
    EXPECT("busy.engine", second_user[7], DSV4_ERR_BUSY);
    EXPECT("busy.free_afterwards", dsv4_session_free(session), DSV4_OK);
}

/* ---- Parsers have one user too ---- */

static dsv4_parser *parser;

static int use_parser_again(void *user, const dsv4_event *event)
{
    (void)event;
    *(int32_t *)user = dsv4_parser_push(parser, prompt, 1, NULL, NULL, NULL);
    EXPECT("parser.is_not_freed_in_use", dsv4_parser_free(parser), DSV4_ERR_BUSY);
    return 0;
}

static void parsers(void)
{
    int32_t status = DSV4_OK;
    dsv4_message message = message_of("user", "Hi");
    int32_t tokens[64];
    size_t count;
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &parser));
    MUST(dsv4_tokenize(engine, dsv4_str("Some words of a reply."), 0, tokens, 64, &count));
    MUST(dsv4_parser_push(parser, tokens, count, use_parser_again, &status, NULL));
    EXPECT("parser.busy", status, DSV4_ERR_BUSY);
    EXPECT("parser.free", dsv4_parser_free(parser), DSV4_OK);
}

/* ---- Errors belong to a thread ---- */

static void *fail_here(void *user)
{
    int *is_empty = user;
    *is_empty = dsv4_last_error()[0] == 0 && last_error().status == DSV4_OK;
    EXPECT("error.of_the_thread", dsv4_session_free((dsv4_session *)(void *)&session), DSV4_ERR_INVALID_ARGUMENT);
    *is_empty = *is_empty && error_has("session");
    return NULL;
}

static void errors(void)
{
    int is_empty = 0;
    pthread_t thread;
    size_t size;
    dsv4_inspect_json("nothing-here", NULL, 0, &size);
    pthread_create(&thread, NULL, fail_here, &is_empty);
    pthread_join(thread, NULL);
    CHECK("error.a_new_thread_has_none", is_empty);
    CHECK("error.another_thread_leaves_it_alone", error_has("nothing-here"));
}

static void child_process(void)
{
    pid_t child = fork();
    if (child == 0) {
        dsv4_engine *other = NULL;
        int32_t status = dsv4_engine_open(model, NULL, NULL, &other);
        _exit(status == DSV4_ERR_INIT && error_has("fork") && !other ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK("fork.is_told", status == 0);
    EXPECT("fork.leaves_the_parent_alone", dsv4_session_free(new_session(engine, 8)), DSV4_OK);
}

int main(int argc, char **argv)
{
    (void)argc;
    model = argv[1];
    pthread_barrier_init(&together, NULL, THREADS);
    sem_init(&entered, 0, 0);
    sem_init(&answered, 0, 0);
    for (int at = 0; at < 600; at++)
        prompt[at] = 20 + at * 7 % 300;
    start_from_threads();
    engine = open_model(model);
    two_sessions();
    one_session();
    parsers();
    errors();
    child_process();
    return 0;
}

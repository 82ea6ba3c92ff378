/* Callbacks that call back: what they may do works, and what they may not is refused at once, without harm to the
 * call they were called from. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static dsv4_engine *engine;
static dsv4_session *session, *other;
static dsv4_cancel *cancel;
static const char *path;
static int calls;
static char said[2][8192];

static int keep(void *to, const dsv4_event *event)
{
    if (event->kind != DSV4_EVENT_TOOL_CALL)
        strncat(to, event->text.data, event->text.size);
    return 0;
}

static int32_t reply(dsv4_session *to, const char *question, dsv4_call *call, dsv4_event_fn event, void *user,
                     dsv4_result *result)
{
    dsv4_message message = message_of("user", question);
    dsv4_sampling_options options = greedy(12);
    return dsv4_session_reply(to, &message, 1, NULL, &options, call, event, user, result);
}

/* Everything that works on the session, from its own callback. */
static void use_own_session(void)
{
    static float logits[4096];
    static int32_t tokens[4096];
    static char state[64];
    size_t size = 0;
    int32_t token = 5;
    double value;
    dsv4_session_info info = {.struct_size = sizeof info};
    EXPECT("own.sync", dsv4_session_sync(session, &token, 1, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("own.sync_to_nothing", dsv4_session_sync(session, NULL, 0, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("own.eval", dsv4_session_eval(session, &token, 1, NULL), DSV4_ERR_BUSY);
    EXPECT("own.rewind", dsv4_session_rewind(session, 1, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("own.mark_turn", dsv4_session_mark_turn(session), DSV4_ERR_BUSY);
    EXPECT("own.logits", dsv4_session_logits(session, logits, 4096, &size), DSV4_ERR_BUSY);
    EXPECT("own.top_logprobs", dsv4_session_top_logprobs(session, 1, &token, &value), DSV4_ERR_BUSY);
    EXPECT("own.score", dsv4_session_score(session, &token, 1, NULL, &value), DSV4_ERR_BUSY);
    EXPECT("own.generate", dsv4_session_generate(session, NULL, NULL, 0, NULL, NULL, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("own.reply", reply(session, "Hi", NULL, NULL, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("own.save", dsv4_session_save(session, path, NULL), DSV4_ERR_BUSY);
    EXPECT("own.load", dsv4_session_load(session, path, NULL), DSV4_ERR_BUSY);
    EXPECT("own.save_memory", dsv4_session_save_memory(session, NULL, NULL, 0, &size), DSV4_ERR_BUSY);
    EXPECT("own.load_memory", dsv4_session_load_memory(session, state, sizeof state, NULL), DSV4_ERR_BUSY);
    EXPECT("own.free", dsv4_session_free(session), DSV4_ERR_BUSY);
    EXPECT("own.close_engine", dsv4_engine_close(engine), DSV4_ERR_BUSY);
    EXPECT("own.info_works", dsv4_session_get_info(session, &info), DSV4_OK);
    EXPECT("own.tokens_work", dsv4_session_tokens(session, tokens, 4096, &size), DSV4_OK);
}

static int misuse_session(void *user, const dsv4_event *event)
{
    if (calls++ < 2)
        use_own_session();
    return keep(user, event);
}

static int on_progress(void *user, const char *what, uint64_t done, uint64_t total)
{
    (void)user, (void)what, (void)done, (void)total;
    calls++;
    use_own_session();
    return 0;
}

static int on_token(void *user, int32_t token, dsv4_text piece)
{
    (void)user, (void)token, (void)piece;
    calls++;
    use_own_session();
    return 0;
}

static void own_session(void)
{
    dsv4_call call = {.struct_size = sizeof call, .progress = on_progress};
    dsv4_sampling_options options = greedy(3);
    size_t size = 0;
    MUST(reply(other, "Who are you?", NULL, keep, said[0], NULL));
    EXPECT("own.reply_goes_on", reply(session, "Who are you?", NULL, misuse_session, said[1], NULL), DSV4_OK);
    CHECK("own.reply_is_the_same", *said[0] && strcmp(said[0], said[1]) == 0);
    EXPECT("own.generate_goes_on",
           dsv4_session_generate(session, &options, NULL, 0, NULL, on_token, NULL, NULL), DSV4_OK);
    static const int32_t tokens[] = {5, 6, 7, 8};
    calls = 0;
    EXPECT("own.sync_goes_on", dsv4_session_sync(session, tokens, 4, &call, NULL), DSV4_OK);
    EXPECT("own.eval_goes_on", dsv4_session_eval(session, tokens, 4, &call), DSV4_OK);
    EXPECT("own.save_goes_on", dsv4_session_save(session, path, &call), DSV4_OK);
    EXPECT("own.load_goes_on", dsv4_session_load(session, path, &call), DSV4_OK);
    EXPECT("own.save_memory_goes_on", dsv4_session_save_memory(session, &call, NULL, 0, &size), DSV4_OK);
    char *state = malloc(size);
    EXPECT("own.save_memory_again", dsv4_session_save_memory(session, &call, state, size, &size), DSV4_OK);
    EXPECT("own.load_memory_goes_on", dsv4_session_load_memory(session, state, size, &call), DSV4_OK);
    free(state);
    CHECK("own.progress_was_told", calls >= 7);
}

/* ---- What is allowed ---- */

static int nest(void *user, const dsv4_event *event)
{
    (void)event;
    int depth = *(int *)user + 1;
    dsv4_session *inner = NULL;
    if (depth > 12 || calls)
        return 1;
    EXPECT("nested.new", dsv4_session_new(engine, 64, &inner), DSV4_OK);
    EXPECT("nested.reply", reply(inner, "Who are you?", NULL, nest, &depth, NULL), DSV4_OK);
    EXPECT("nested.free", dsv4_session_free(inner), DSV4_OK);
    calls += depth == 12;
    return 1;
}

static int32_t all_checks(void *user, const char *name, int32_t has_passed, const char *detail)
{
    (void)name, (void)has_passed, (void)detail;
    int depth = 11;
    calls = 0;
    return ++*(int *)user > 2 || nest(&depth, NULL) != 1;
}

static int open_inside(void *user, const char *what, uint64_t done, uint64_t total)
{
    (void)what, (void)done, (void)total;
    int *count = user;
    dsv4_engine *inner = NULL;
    if ((*count)++ < 2) {
        EXPECT("open.inside_open", dsv4_engine_open("random-tiny", NULL, NULL, &inner), DSV4_OK);
        EXPECT("open.closed_inside", dsv4_engine_close(inner), DSV4_OK);
    }
    return 0;
}

static int free_cancel(void *user, const dsv4_event *event)
{
    (void)user, (void)event;
    if (cancel) {
        EXPECT("cancel.freed_inside", dsv4_cancel_free(cancel), DSV4_OK);
        EXPECT("cancel.dead_inside", dsv4_cancel_trigger(cancel), DSV4_ERR_INVALID_ARGUMENT);
        cancel = NULL;
    }
    return 0;
}

static int trigger(void *user, const dsv4_event *event)
{
    (void)user, (void)event;
    return dsv4_cancel_trigger(cancel);
}

static int fork_inside(void *user, const dsv4_event *event)
{
    (void)event;
    if (calls++)
        return 0;
    pid_t child = fork();
    if (child == 0) {
        dsv4_engine_options options;
        _exit(dsv4_engine_options_init(&options, sizeof options) == DSV4_ERR_INIT ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK("fork.child_is_refused", WIFEXITED(status) && WEXITSTATUS(status) == 7);
    child = fork();
    if (child == 0)
        exit(5); /* with the handlers of exit, which must not wait for threads that are not there */
    alarm(20);
    waitpid(child, &status, 0);
    alarm(0);
    CHECK("fork.child_exits", WIFEXITED(status) && WEXITSTATUS(status) == 5);
    CHECK("fork.system", system("exit 3") >> 8 == 3);
    *(int *)user = 1;
    return 0;
}

static void allowed(void)
{
    int count = 0;
    dsv4_engine *opened = NULL;
    dsv4_call call = {.struct_size = sizeof call};
    calls = 0;
    nest(&count, NULL);
    CHECK("nested.deep", calls == 1);
    count = 0;
    EXPECT("selftest.stopped", dsv4_selftest(NULL, NULL, all_checks, &count), DSV4_ERR_CANCELLED);
    count = 0;
    call.progress = open_inside, call.user = &count;
    EXPECT("open.goes_on", dsv4_engine_open("random-tiny", NULL, &call, &opened), DSV4_OK);
    EXPECT("open.closes", dsv4_engine_close(opened), DSV4_OK);
    call.progress = NULL;
    MUST(dsv4_cancel_new(&cancel));
    call.cancel = cancel;
    EXPECT("cancel.freed_in_use", reply(session, "Who are you?", &call, free_cancel, NULL, NULL), DSV4_OK);
    EXPECT("cancel.dead", reply(session, "Who are you?", &call, NULL, NULL, NULL), DSV4_ERR_INVALID_ARGUMENT);
    MUST(dsv4_cancel_new(&cancel));
    call.cancel = cancel;
    dsv4_result result = {.struct_size = sizeof result};
    EXPECT("cancel.inside", reply(session, "Who are you?", &call, trigger, NULL, &result), DSV4_ERR_CANCELLED);
    CHECK("cancel.result_is_filled", result.finish_reason == DSV4_FINISH_CANCELLED && result.generated_tokens > 0);
    calls = count = 0;
    EXPECT("fork.parent_goes_on", reply(session, "Who are you?", NULL, fork_inside, &count, NULL), DSV4_OK);
    CHECK("fork.was_tried", count);
}

/* ---- Log ---- */

static int lines, is_logging;

/* A budget for a device that is not used is worth a warning. */
static void warn(void)
{
    dsv4_engine_options options;
    dsv4_engine *opened = NULL;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.device = "cpu", options.vram_bytes = 1 << 30;
    MUST(dsv4_engine_open("random-tiny", &options, NULL, &opened));
    MUST(dsv4_engine_close(opened));
}

static void on_log(void *user, int32_t level, const char *text)
{
    (void)user, (void)level, (void)text;
    lines++;
    if (is_logging++)
        return;
    warn();
    CHECK("log.inside_log", lines > 1);
    EXPECT("log.ends_itself", dsv4_set_log(NULL, NULL, 0), DSV4_OK);
    is_logging = 0;
}

static atomic_int is_inside, was_inside_after_the_end;

static void slow_log(void *user, int32_t level, const char *text)
{
    (void)level, (void)text;
    if (atomic_load((atomic_int *)user))
        atomic_store(&was_inside_after_the_end, 1);
    atomic_store(&is_inside, 1);
    usleep(200000);
    if (atomic_load((atomic_int *)user))
        atomic_store(&was_inside_after_the_end, 1);
}

static void *warn_thread(void *unused)
{
    warn();
    return unused;
}

static void log_inside(void)
{
    MUST(dsv4_set_log(on_log, NULL, 0));
    warn();
    CHECK("log.level_0_is_everything", lines > 0);
    int before = lines;
    warn();
    CHECK("log.has_ended", lines == before);
    EXPECT("log.negative_level", dsv4_set_log(on_log, NULL, -5), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("log.highest_level", dsv4_set_log(on_log, NULL, INT32_MAX), DSV4_OK);
    warn();
    CHECK("log.says_nothing_then", lines == before);
    /* Once it has ended, `user` may be freed. */
    atomic_int has_ended = 0;
    pthread_t thread;
    MUST(dsv4_set_log(slow_log, &has_ended, 0));
    pthread_create(&thread, NULL, warn_thread, NULL);
    while (!atomic_load(&is_inside))
        usleep(1000);
    MUST(dsv4_set_log(NULL, NULL, 0));
    atomic_store(&has_ended, 1);
    pthread_join(thread, NULL);
    CHECK("log.is_over_once_it_ended", !atomic_load(&was_inside_after_the_end));
}

/* ---- Parser ---- */

static dsv4_parser *parser;

static int misuse_parser(void *user, const dsv4_event *event)
{
    (void)user, (void)event;
    int32_t token = 300;
    calls++;
    EXPECT("parser.push", dsv4_parser_push(parser, &token, 1, NULL, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("parser.finish", dsv4_parser_finish(parser, NULL, NULL), DSV4_ERR_BUSY);
    EXPECT("parser.free", dsv4_parser_free(parser), DSV4_ERR_BUSY);
    return 0;
}

static void own_parser(void)
{
    int32_t tokens[64], is_complete;
    size_t count;
    dsv4_message message = message_of("user", "Hi");
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &parser));
    MUST(dsv4_tokenize(engine, dsv4_str("Hello there, you."), 0, tokens, 64, &count));
    calls = 0;
    EXPECT("parser.goes_on", dsv4_parser_push(parser, tokens, count, misuse_parser, NULL, &is_complete), DSV4_OK);
    CHECK("parser.was_told", calls > 0);
    EXPECT("parser.freed", dsv4_parser_free(parser), DSV4_OK);
}

int main(int count, char **arguments)
{
    path = count > 2 ? arguments[2] : "own.dsv4s";
    engine = open_model(count > 1 ? arguments[1] : "pocket-v4");
    session = new_session(engine, 512), other = new_session(engine, 512);
    own_session();
    allowed();
    log_inside();
    own_parser();
    EXPECT("all.frees", dsv4_session_free(session) | dsv4_session_free(other), DSV4_OK);
    EXPECT("all.closes", dsv4_engine_close(engine), DSV4_OK);
    return 0;
}

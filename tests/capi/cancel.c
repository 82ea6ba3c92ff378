/* Stopping: in load, prefill, generation, replies and saving; by callbacks, by an object, from a signal. */
#include "check.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>

enum { LONG = 3000 };

static const char *model, *state_path;
static dsv4_engine *engine;
static dsv4_session *session;
static dsv4_cancel *stop;
static int32_t prompt[LONG];

static void on_alarm(int number)
{
    (void)number;
    dsv4_cancel_trigger(stop);
}

/* Let the signal come in a moment. */
static void ring(void)
{
    struct itimerval soon = {{0, 0}, {0, 1000}};
    setitimer(ITIMER_REAL, &soon, NULL);
}

static int32_t length_of(dsv4_session *one)
{
    dsv4_session_info info = {.struct_size = sizeof info};
    MUST(dsv4_session_get_info(one, &info));
    return info.length;
}

/* The timeline is the beginning of the prompt. */
static int is_part_of_prompt(dsv4_session *one)
{
    static int32_t found[LONG];
    size_t count = 0;
    MUST(dsv4_session_tokens(one, found, LONG, &count));
    return memcmp(found, prompt, count * sizeof *found) == 0;
}

/* ---- Progress callbacks, which stop at a call or let a cancel object stop ---- */

typedef struct {
    int calls;     /* so far */
    int stop_at;   /* answer nonzero then */
    int cancel_at; /* trigger the object then */
    int ring_at;   /* let the signal come then */
    uint64_t done, total;
    int is_in_order;
    char what[32];
} watch;

static int on_progress(void *user, const char *what, uint64_t done, uint64_t total)
{
    watch *seen = user;
    seen->calls++;
    seen->is_in_order = (seen->calls == 1 || done >= seen->done) && (!total || done <= total);
    seen->done = done;
    seen->total = total;
    snprintf(seen->what, sizeof seen->what, "%s", what);
    if (seen->calls == seen->cancel_at)
        dsv4_cancel_trigger(stop);
    if (seen->calls == seen->ring_at)
        ring();
    return seen->calls == seen->stop_at;
}

static dsv4_call call_of(watch *seen)
{
    dsv4_cancel_reset(stop);
    return (dsv4_call){.struct_size = sizeof(dsv4_call), .cancel = stop, .progress = on_progress, .user = seen};
}

static int32_t open_watched(watch seen, int verify)
{
    dsv4_engine *opened = (dsv4_engine *)(void *)&seen;
    dsv4_engine_options options;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.verify = verify;
    dsv4_call call = call_of(&seen);
    int32_t status = dsv4_engine_open(model, &options, &call, &opened);
    CHECK("load.reports_in_order", seen.calls > 0 && seen.is_in_order && seen.what[0]);
    CHECK("load.no_engine_when_cancelled", (status == DSV4_OK) == (opened != NULL));
    MUST(dsv4_engine_close(opened));
    return status;
}

static void load(void)
{
    EXPECT("load.callback_stops", open_watched((watch){.stop_at = 1}, 0), DSV4_ERR_CANCELLED);
    EXPECT("load.callback_stops_later", open_watched((watch){.stop_at = 2}, 1), DSV4_ERR_CANCELLED);
    EXPECT("load.object_stops", open_watched((watch){.cancel_at = 1}, 0), DSV4_ERR_CANCELLED);
    EXPECT("load.object_stops_verify", open_watched((watch){.cancel_at = 2}, 1), DSV4_ERR_CANCELLED);
    EXPECT("load.nobody_stops", open_watched((watch){0}, 1), DSV4_OK);
    watch seen = {0};
    dsv4_call call = call_of(&seen);
    dsv4_engine *opened = NULL;
    dsv4_cancel_trigger(stop);
    EXPECT("load.object_was_set_before", dsv4_engine_open(model, NULL, &call, &opened), DSV4_ERR_CANCELLED);
    CHECK("load.then_nothing_is_read", seen.calls == 0);
}

static void prefill(void)
{
    watch seen = {.stop_at = 2};
    dsv4_call call = call_of(&seen);
    EXPECT("prefill.callback_stops", dsv4_session_sync(session, prompt, LONG, &call, NULL), DSV4_ERR_CANCELLED);
    CHECK("prefill.stops_at_a_chunk", length_of(session) == 512 && is_part_of_prompt(session));
    CHECK("prefill.counts_tokens", seen.total == LONG && seen.done == 512 && strcmp(seen.what, "prefill") == 0);
    seen = (watch){.cancel_at = 2};
    call = call_of(&seen);
    EXPECT("prefill.object_stops", dsv4_session_sync(session, prompt, LONG, &call, NULL), DSV4_ERR_CANCELLED);
    CHECK("prefill.goes_on_where_it_was", length_of(session) == 1024 && is_part_of_prompt(session));
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    seen = (watch){.ring_at = 1};
    call = call_of(&seen);
    EXPECT("prefill.signal_stops", dsv4_session_sync(session, prompt, LONG, &call, NULL), DSV4_ERR_CANCELLED);
    CHECK("prefill.signal_stops_before_the_end", length_of(session) < LONG && is_part_of_prompt(session));
    seen = (watch){0};
    call = call_of(&seen);
    EXPECT("prefill.nobody_stops", dsv4_session_sync(session, prompt, LONG, &call, NULL), DSV4_OK);
    CHECK("prefill.is_whole", length_of(session) == LONG && seen.done == seen.total && is_part_of_prompt(session));
    seen = (watch){.stop_at = 1};
    call = call_of(&seen);
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    double nll[600];
    EXPECT("score.callback_stops", dsv4_session_score(session, prompt, 600, &call, nll), DSV4_ERR_CANCELLED);
    CHECK("score.stops_at_a_chunk", length_of(session) > 0 && length_of(session) < 600);
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    dsv4_cancel_trigger(stop);
    EXPECT("eval.object_stops", dsv4_session_eval(session, prompt, 600, &call), DSV4_ERR_CANCELLED);
    CHECK("eval.nothing_was_done", length_of(session) == 0);
}

/* ---- Tokens and events ---- */

typedef struct {
    int calls, stop_at, cancel_at, ring_at;
    int32_t last;
} listener;

static int heard(listener *one)
{
    one->calls++;
    if (one->calls == one->cancel_at)
        dsv4_cancel_trigger(stop);
    if (one->calls == one->ring_at)
        ring();
    return one->calls == one->stop_at;
}

static int on_token(void *user, int32_t token, dsv4_text piece)
{
    (void)piece;
    ((listener *)user)->last = token;
    return heard(user);
}

static int on_event(void *user, const dsv4_event *event)
{
    ((listener *)user)->last = event->tokens;
    return heard(user);
}

static void generate(void)
{
    dsv4_call call = call_of(&(watch){0});
    call.progress = NULL;
    dsv4_result result = {.struct_size = sizeof result};
    dsv4_sampling_options options = greedy(0);
    listener one = {.stop_at = 5};
    int32_t last;
    MUST(dsv4_session_sync(session, prompt, 8, NULL, NULL));
    EXPECT("generate.callback_stops",
           dsv4_session_generate(session, &options, NULL, 0, &call, on_token, &one, &result), DSV4_OK);
    CHECK("generate.is_told_so", result.finish_reason == DSV4_FINISH_CANCELLED && result.generated_tokens == 5);
    static int32_t tokens[LONG];
    size_t count;
    MUST(dsv4_session_tokens(session, tokens, LONG, &count));
    last = tokens[count - 1];
    CHECK("generate.the_token_stays", one.calls == 5 && count == 13 && last == one.last);
    one = (listener){.cancel_at = 4};
    EXPECT("generate.object_stops",
           dsv4_session_generate(session, &options, NULL, 0, &call, on_token, &one, &result), DSV4_ERR_CANCELLED);
    CHECK("generate.tokens_so_far_stay", one.calls == 4 && length_of(session) == 17);
    CHECK("generate.result_is_filled",
          result.finish_reason == DSV4_FINISH_CANCELLED && result.generated_tokens == 4);
    dsv4_cancel_reset(stop);
    one = (listener){.ring_at = 3};
    EXPECT("generate.signal_stops",
           dsv4_session_generate(session, &options, NULL, 0, &call, on_token, &one, &result), DSV4_ERR_CANCELLED);
    CHECK("generate.signal_stops_before_the_end", one.calls >= 3 && length_of(session) == 17 + one.calls);
    CHECK("generate.context_was_not_full", length_of(session) < 4096);
    dsv4_cancel_reset(stop);
    one = (listener){0};
    options.max_tokens = 6;
    EXPECT("generate.goes_on", dsv4_session_generate(session, &options, NULL, 0, &call, on_token, &one, &result),
           DSV4_OK);
    CHECK("generate.ends_by_length", one.calls == 6 && result.finish_reason == DSV4_FINISH_LENGTH);
}

static void reply(void)
{
    dsv4_message message = message_of("user", "Tell me a long story about a fox and a bear.");
    dsv4_sampling_options options = greedy(60);
    dsv4_result result = {.struct_size = sizeof result};
    dsv4_call call = call_of(&(watch){0});
    call.progress = NULL;
    listener one = {.stop_at = 3};
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    EXPECT("reply.callback_stops",
           dsv4_session_reply(session, &message, 1, NULL, &options, &call, on_event, &one, &result), DSV4_OK);
    CHECK("reply.is_told_so", result.finish_reason == DSV4_FINISH_CANCELLED && one.calls == 3);
    CHECK("reply.counts_its_tokens", result.generated_tokens >= 3 && result.prompt_tokens > 5);
    CHECK("reply.is_in_the_timeline", length_of(session) == result.prompt_tokens + result.generated_tokens);
    one = (listener){.cancel_at = 2};
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    EXPECT("reply.object_stops",
           dsv4_session_reply(session, &message, 1, NULL, &options, &call, on_event, &one, &result),
           DSV4_ERR_CANCELLED);
    CHECK("reply.result_is_filled",
          result.finish_reason == DSV4_FINISH_CANCELLED && result.generated_tokens > 0 &&
              length_of(session) == result.prompt_tokens + result.generated_tokens);
    watch seen = {.stop_at = 1};
    call = call_of(&seen);
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    EXPECT("reply.progress_stops",
           dsv4_session_reply(session, &message, 1, NULL, &options, &call, on_event, &one, &result),
           DSV4_ERR_CANCELLED);
    CHECK("reply.nothing_was_said", result.generated_tokens == 0 && strcmp(seen.what, "prefill") == 0);
    one = (listener){0};
    EXPECT("reply.goes_on", dsv4_session_reply(session, &message, 1, NULL, &options, NULL, on_event, &one, &result),
           DSV4_OK);
    CHECK("reply.ends_by_itself", result.finish_reason != DSV4_FINISH_CANCELLED && one.last <= 60);
}

static int on_check(void *user, const char *name, int32_t has_passed, const char *detail)
{
    ((listener *)user)->last = has_passed && name[0] && detail[0];
    return heard(user);
}

static void self_test(void)
{
    listener one = {.stop_at = 2};
    EXPECT("selftest.callback_stops", dsv4_selftest("cpu", NULL, on_check, &one), DSV4_ERR_CANCELLED);
    CHECK("selftest.checks_are_handed_out", one.calls == 2 && one.last == 1);
    watch seen = {.cancel_at = 1};
    dsv4_call call = call_of(&seen);
    EXPECT("selftest.object_stops", dsv4_selftest(NULL, &call, NULL, NULL), DSV4_ERR_CANCELLED);
    CHECK("selftest.counts_checks", seen.calls == 1 && seen.done == 1 && seen.total > 10);
    EXPECT("selftest.no_such_device", dsv4_selftest("cuda:99", NULL, NULL, NULL), DSV4_ERR_UNSUPPORTED);
}

static void save(void)
{
    struct stat before, after;
    MUST(dsv4_session_sync(session, prompt, LONG, NULL, NULL));
    MUST(dsv4_session_save(session, state_path, NULL));
    stat(state_path, &before);
    watch seen = {.stop_at = 1};
    dsv4_call call = call_of(&seen);
    EXPECT("save.callback_stops", dsv4_session_save(session, state_path, &call), DSV4_ERR_CANCELLED);
    seen = (watch){.cancel_at = 1};
    call = call_of(&seen);
    EXPECT("save.object_stops", dsv4_session_save(session, state_path, &call), DSV4_ERR_CANCELLED);
    stat(state_path, &after);
    CHECK("save.old_file_is_intact", before.st_ino == after.st_ino && before.st_size == after.st_size);
    seen = (watch){0};
    call = call_of(&seen);
    EXPECT("save.nobody_stops", dsv4_session_save(session, state_path, &call), DSV4_OK);
    CHECK("save.counts_bytes", seen.done == seen.total && seen.total >= (uint64_t)after.st_size / 2);
    MUST(dsv4_session_sync(session, prompt, 4, NULL, NULL));
    seen = (watch){.stop_at = 1};
    call = call_of(&seen);
    EXPECT("load_state.callback_stops", dsv4_session_load(session, state_path, &call), DSV4_ERR_CANCELLED);
    CHECK("load_state.nothing_changed", length_of(session) == 4);
    seen = (watch){.cancel_at = 1};
    call = call_of(&seen);
    EXPECT("load_state.object_stops", dsv4_session_load(session, state_path, &call), DSV4_ERR_CANCELLED);
    CHECK("load_state.nothing_changed", length_of(session) == 4);
    seen = (watch){0};
    call = call_of(&seen);
    EXPECT("load_state.nobody_stops", dsv4_session_load(session, state_path, &call), DSV4_OK);
    CHECK("load_state.is_whole", length_of(session) == LONG && is_part_of_prompt(session));
}

int main(int argc, char **argv)
{
    (void)argc;
    model = argv[1];
    state_path = argv[2];
    MUST(dsv4_cancel_new(&stop));
    struct sigaction action = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &action, NULL);
    for (int at = 0; at < LONG; at++)
        prompt[at] = 20 + at * 7 % 300;
    load();
    engine = open_model(model);
    session = new_session(engine, 0);
    prefill();
    generate();
    reply();
    save();
    self_test();
    return 0;
}

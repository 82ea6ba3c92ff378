/* Good values for every argument, and what a call with NULL must answer (test_null.py makes the calls). */
#include "check.h"

enum { ROOM = 1 << 17 };

static const char *model, *state_path;
static dsv4_engine *engine, *other_engine;
static dsv4_session *session, *other_session;
static dsv4_sampler *sampler, *other_sampler;
static dsv4_parser *other_parser;
static dsv4_cancel *other_cancel;
static dsv4_message message;
static dsv4_engine_options engine_options;
static dsv4_sampling_options sampling;
static dsv4_prompt_options prompt;
static dsv4_engine_info facts;
static dsv4_session_info session_facts;
static dsv4_error_info info;
static dsv4_sync_report report;
static dsv4_result result;
static dsv4_call call;
static const int32_t ids[3] = {10, 20, 30};
static int32_t room[ROOM], token, is_complete;
static float scores[ROOM];
static double numbers[16];
static char buffer[ROOM];
static size_t length, state_size, state_room, sampler_state_size;
static char *state, *room_for_state, sampler_state[4096];

static void on_log(void *user, int32_t level, const char *text)
{
    (void)user, (void)level, (void)text;
}

static int on_event(void *user, const dsv4_event *event)
{
    return (void)user, (void)event, 0;
}

static int on_token(void *user, int32_t id, dsv4_text piece)
{
    return (void)user, (void)id, (void)piece, 0;
}

static dsv4_session *ready(void)
{
    MUST(dsv4_session_sync(session, ids, 3, NULL, NULL));
    return session;
}

static dsv4_engine *fresh_engine(void) { return open_model(model); }

static dsv4_session *fresh_session(void) { return new_session(engine, 8); }

static dsv4_sampler *fresh_sampler(void)
{
    dsv4_sampler *made = NULL;
    MUST(dsv4_sampler_new(NULL, facts.vocab_size, &made));
    return made;
}

static dsv4_parser *fresh_parser(void)
{
    dsv4_parser *made = NULL;
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &made));
    return made;
}

static dsv4_cancel *fresh_cancel(void)
{
    dsv4_cancel *made = NULL;
    MUST(dsv4_cancel_new(&made));
    return made;
}

static void save_states(void)
{
    MUST(dsv4_session_save(ready(), state_path, NULL));
    MUST(dsv4_session_save_memory(session, NULL, NULL, 0, &state_size));
    /* Saving the same session again takes as many bytes, but for digits of numbers in the header. */
    state_room = 2 * state_size;
    state = malloc(state_room);
    room_for_state = malloc(state_room);
    MUST(dsv4_session_save_memory(session, NULL, state, state_room, &state_size));
    MUST(dsv4_sampler_save(sampler, sampler_state, sizeof sampler_state, &sampler_state_size));
}

static void prepare(int argc, char **argv)
{
    (void)argc, (void)fresh_engine, (void)fresh_session, (void)fresh_sampler, (void)fresh_parser;
    (void)other_cancel, (void)other_engine, (void)other_session, (void)other_parser, (void)other_sampler;
    (void)fresh_cancel, (void)on_log, (void)on_event, (void)on_token;
    model = argv[1];
    state_path = argv[2];
    engine = open_model(model);
    session = new_session(engine, 64);
    facts.struct_size = sizeof facts;
    session_facts.struct_size = sizeof session_facts;
    info.struct_size = sizeof info;
    report.struct_size = sizeof report;
    result.struct_size = sizeof result;
    call.struct_size = sizeof call;
    MUST(dsv4_engine_get_info(engine, &facts));
    MUST(dsv4_engine_options_init(&engine_options, sizeof engine_options));
    engine_options.context = 64;
    MUST(dsv4_prompt_options_init(&prompt, sizeof prompt));
    sampling = greedy(2);
    message = message_of("user", "Hi");
    sampler = fresh_sampler();
    save_states();
}

/* The status and the text of a call where `name` was NULL. */
static inline void names(const char *check, int32_t status, const char *name)
{
    int is_right = status == DSV4_ERR_INVALID_ARGUMENT && error_has(name) && error_has("NULL");
    is_right = is_right && strcmp(last_error().name, name) == 0;
    check_line(check, is_right, dsv4_status_name(status), __LINE__);
}

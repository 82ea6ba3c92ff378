/* Handles that are dead, of another kind or no handles at all, for every function that takes one. */
#include "check.h"

#include <stdint.h>

enum { KINDS = 4, BAD = 6 };

static dsv4_engine *engine;
static dsv4_session *session;
static dsv4_parser *parser;
static dsv4_sampler *sampler;
static dsv4_message message;
static size_t size;
static int32_t token;
static float logits[4];
static const int32_t ids[2] = {10, 20};

static dsv4_parser *new_parser(void)
{
    dsv4_parser *made = NULL;
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &made));
    return made;
}

static dsv4_sampler *new_sampler(void)
{
    dsv4_sampler *made = NULL;
    MUST(dsv4_sampler_new(NULL, 4, &made));
    return made;
}

/* Each function with a handle of the kind, which is bad. */
static int32_t with_engine(int which, void *bad)
{
    dsv4_engine_info info = {.struct_size = sizeof info};
    dsv4_session *made = NULL;
    dsv4_parser *parsing = NULL;
    switch (which) {
    case 0: return dsv4_engine_close(bad);
    case 1: return dsv4_engine_get_info(bad, &info);
    case 2: return dsv4_engine_describe_json(bad, NULL, 0, &size);
    case 3: return dsv4_engine_memory_json(bad, NULL, 0, &size);
    case 4: return dsv4_tokenize(bad, dsv4_str("Hi"), 0, NULL, 0, &size);
    case 5: return dsv4_detokenize(bad, ids, 2, 0, NULL, 0, &size);
    case 6: return dsv4_token_bytes(bad, 10, NULL, 0, &size);
    case 7: return dsv4_special_token(bad, dsv4_str("<think>"), &token);
    case 8: return dsv4_chat_render(bad, &message, 1, NULL, NULL, 0, &size);
    case 9: return dsv4_chat_encode(bad, &message, 1, NULL, NULL, 0, &size);
    case 10: return dsv4_parser_new(bad, &message, 1, NULL, &parsing);
    case 11: return dsv4_session_new(bad, 0, &made);
    default: return 1;
    }
}

static int32_t with_session(int which, void *bad)
{
    dsv4_session_info info = {.struct_size = sizeof info};
    double numbers[2];
    int32_t found[2];
    switch (which) {
    case 0: return dsv4_session_free(bad);
    case 1: return dsv4_session_sync(bad, ids, 2, NULL, NULL);
    case 2: return dsv4_session_eval(bad, ids, 2, NULL);
    case 3: return dsv4_session_rewind(bad, 0, NULL, NULL);
    case 4: return dsv4_session_mark_turn(bad);
    case 5: return dsv4_session_get_info(bad, &info);
    case 6: return dsv4_session_tokens(bad, NULL, 0, &size);
    case 7: return dsv4_session_logits(bad, NULL, 0, &size);
    case 8: return dsv4_session_top_logprobs(bad, 2, found, numbers);
    case 9: return dsv4_session_score(bad, ids, 2, NULL, numbers);
    case 10: return dsv4_session_sample(bad, sampler, &token);
    case 11: return dsv4_session_generate(bad, NULL, NULL, 0, NULL, NULL, NULL, NULL);
    case 12: return dsv4_session_reply(bad, &message, 1, NULL, NULL, NULL, NULL, NULL, NULL);
    case 13:
        return dsv4_session_reply_json(bad, dsv4_str("[{\"role\": \"user\", \"content\": \"Hi\"}]"), NULL, NULL,
                                       NULL, NULL, NULL, NULL);
    case 14: return dsv4_session_save(bad, "/nowhere", NULL);
    case 15: return dsv4_session_load(bad, "/nowhere", NULL);
    case 16: return dsv4_session_save_memory(bad, NULL, NULL, 0, &size);
    case 17: return dsv4_session_load_memory(bad, "x", 1, NULL);
    default: return 1;
    }
}

static int32_t with_parser(int which, void *bad)
{
    switch (which) {
    case 0: return dsv4_parser_free(bad);
    case 1: return dsv4_parser_push(bad, ids, 2, NULL, NULL, NULL);
    case 2: return dsv4_parser_finish(bad, NULL, NULL);
    default: return 1;
    }
}

static int32_t with_sampler(int which, void *bad)
{
    switch (which) {
    case 0: return dsv4_sampler_free(bad);
    case 1: return dsv4_sampler_sample(bad, logits, 4, &token);
    case 2: return dsv4_sampler_accept(bad, ids, 1);
    case 3: return dsv4_sampler_observe(bad, ids, 1);
    case 4: return dsv4_sampler_save(bad, NULL, 0, &size);
    case 5: return dsv4_session_sample(session, bad, &token);
    default: return 1;
    }
}

static const char *const kinds[KINDS] = {"engine", "session", "parser", "sampler"};
static int32_t (*const with[KINDS])(int which, void *bad) = {with_engine, with_session, with_parser, with_sampler};
static const char *const ways[BAD] = {"freed", "other_kind", "garbage", "address", "large", "cancel"};

static void *freed_one(int kind)
{
    dsv4_engine *first = kind == 0 ? open_model("pocket-v4") : NULL;
    dsv4_session *second = kind == 1 ? new_session(engine, 8) : NULL;
    dsv4_parser *third = kind == 2 ? new_parser() : NULL;
    dsv4_sampler *fourth = kind == 3 ? new_sampler() : NULL;
    MUST(dsv4_engine_close(first));
    MUST(dsv4_session_free(second));
    MUST(dsv4_parser_free(third));
    MUST(dsv4_sampler_free(fourth));
    return first ? (void *)first : second ? (void *)second : third ? (void *)third : (void *)fourth;
}

static void try_kind(int kind)
{
    dsv4_cancel *cancel = NULL;
    MUST(dsv4_cancel_new(&cancel));
    void *others[KINDS] = {session, parser, sampler, engine};
    void *bad[BAD] = {freed_one(kind),       others[kind], (void *)(uintptr_t)0xdeadbeefdeadbeef,
                      &message,              (void *)UINTPTR_MAX, cancel};
    for (int way = 0; way < BAD; way++) {
        int is_right = 1, which = 0;
        for (int32_t status; (status = with[kind](which, bad[way])) != 1; which++)
            is_right = is_right && status == DSV4_ERR_INVALID_ARGUMENT && error_has(kinds[kind]);
        char name[64];
        snprintf(name, sizeof name, "%s.%s", kinds[kind], ways[way]);
        check_line(name, is_right && which > 2, dsv4_last_error(), __LINE__);
    }
    MUST(dsv4_cancel_free(cancel));
}

static void cancel_handles(void)
{
    dsv4_cancel *cancel = NULL, *next = NULL;
    void *bad[] = {engine, session, &message, (void *)UINTPTR_MAX, (void *)(uintptr_t)5, NULL};
    MUST(dsv4_cancel_new(&cancel));
    CHECK("cancel.starts_unset", dsv4_cancel_is_set(cancel) == 0);
    CHECK("cancel.is_set", dsv4_cancel_trigger(cancel) == 0 && dsv4_cancel_is_set(cancel) == 1);
    CHECK("cancel.is_reset", dsv4_cancel_reset(cancel) == 0 && dsv4_cancel_is_set(cancel) == 0);
    EXPECT("cancel.free", dsv4_cancel_free(cancel), DSV4_OK);
    MUST(dsv4_cancel_new(&next));
    CHECK("cancel.number_is_not_used_again", next != cancel);
    bad[5] = cancel;
    int is_right = 1;
    for (size_t at = 0; at < sizeof bad / sizeof bad[0]; at++) {
        is_right = is_right && dsv4_cancel_trigger(bad[at]) == DSV4_ERR_INVALID_ARGUMENT;
        is_right = is_right && dsv4_cancel_reset(bad[at]) == DSV4_ERR_INVALID_ARGUMENT;
        is_right = is_right && dsv4_cancel_is_set(bad[at]) == DSV4_ERR_INVALID_ARGUMENT;
        is_right = is_right && dsv4_cancel_free(bad[at]) == DSV4_ERR_INVALID_ARGUMENT;
    }
    CHECK("cancel.bad_handles", is_right);
    CHECK("cancel.the_other_one_is_untouched", dsv4_cancel_is_set(next) == 0);
}

int main(int argc, char **argv)
{
    (void)argc;
    engine = open_model(argv[1]);
    session = new_session(engine, 64);
    message = message_of("user", "Hi");
    parser = new_parser();
    sampler = new_sampler();
    MUST(dsv4_session_sync(session, ids, 2, NULL, NULL));
    for (int kind = 0; kind < KINDS; kind++)
        try_kind(kind);
    cancel_handles();
    EXPECT("engine.close_with_a_session", dsv4_engine_close(engine), DSV4_ERR_BUSY);
    EXPECT("engine.stays_open", dsv4_session_eval(session, ids, 2, NULL), DSV4_OK);
    EXPECT("session.free", dsv4_session_free(session), DSV4_OK);
    EXPECT("session.free_again", dsv4_session_free(session), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("engine.close", dsv4_engine_close(engine), DSV4_OK);
    EXPECT("engine.close_again", dsv4_engine_close(engine), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("parser.of_a_closed_engine", dsv4_parser_push(parser, ids, 2, NULL, NULL, NULL), DSV4_OK);
    EXPECT("parser.free", dsv4_parser_free(parser), DSV4_OK);
    EXPECT("sampler.free", dsv4_sampler_free(sampler), DSV4_OK);
    return 0;
}

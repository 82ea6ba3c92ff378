/* One call after the other of the whole interface, for the sanitizers: what is read, written and freed. */
#include "check.h"

#include <pthread.h>

static dsv4_engine *engine;
static const char *state_path;

static int on_progress(void *user, const char *what, uint64_t done, uint64_t total)
{
    (void)done, (void)total;
    *(size_t *)user += strlen(what);
    return 0;
}

static int on_token(void *user, int32_t token, dsv4_text piece)
{
    (void)token;
    for (size_t at = 0; at < piece.size; at++)
        *(size_t *)user += (unsigned char)piece.data[at];
    return 0;
}

static int on_event(void *user, const dsv4_event *event)
{
    dsv4_text all[] = {event->text, event->id, event->name, event->arguments};
    for (int part = 0; part < 4; part++)
        for (size_t at = 0; at < all[part].size; at++)
            *(size_t *)user += (unsigned char)all[part].data[at];
    return 0;
}

static void on_log(void *user, int32_t level, const char *text)
{
    *(size_t *)user += (size_t)level + strlen(text);
}

/* A result in two calls, in exactly as many bytes as it needs. */
#define WHOLE(call, type, ...)                                                                         \
    do {                                                                                               \
        size_t needed = 0;                                                                             \
        MUST(call(__VA_ARGS__, NULL, 0, &needed));                                                     \
        type *data = malloc((needed + !needed) * sizeof(type));                                        \
        MUST(call(__VA_ARGS__, data, needed, &needed));                                                \
        free(data);                                                                                    \
    } while (0)

static void about_models(const char *model)
{
    dsv4_engine_options options;
    size_t needed = 0, sum = 0;
    static size_t logged;
    MUST(dsv4_set_log(on_log, &logged, 10));
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.context = 256;
    WHOLE(dsv4_inspect_json, char, model);
    WHOLE(dsv4_plan_json, char, model, &options);
    MUST(dsv4_devices_json(NULL, 0, &needed));
    char *devices = malloc(needed);
    MUST(dsv4_devices_json(devices, needed, &needed));
    free(devices);
    dsv4_call call = {.struct_size = sizeof call, .progress = on_progress, .user = &sum};
    MUST(dsv4_cancel_new(&call.cancel));
    MUST(dsv4_engine_open(model, &options, &call, &engine));
    MUST(dsv4_cancel_free(call.cancel));
    dsv4_engine_info *info = malloc(sizeof *info);
    info->struct_size = sizeof *info;
    MUST(dsv4_engine_get_info(engine, info));
    CHECK("everything.identity", strlen(info->identity) == 64 && info->variant[0]);
    free(info);
    WHOLE(dsv4_engine_describe_json, char, engine);
    WHOLE(dsv4_engine_memory_json, char, engine);
    CHECK("everything.progress", sum > 0);
    MUST(dsv4_set_log(NULL, NULL, 0));
}

static void about_text(void)
{
    /* Not terminated, so that reading one byte too many is seen. */
    char *text = memcpy(malloc(11), "Hello, fox!", 11);
    dsv4_text run = {text, 11};
    size_t sum = 0;
    WHOLE(dsv4_tokenize, int32_t, engine, run, 0);
    free(text);
    int32_t *ids = malloc(3 * sizeof *ids);
    for (int at = 0; at < 3; at++)
        ids[at] = 40 + at;
    WHOLE(dsv4_detokenize, char, engine, ids, 3, 1);
    WHOLE(dsv4_token_bytes, char, engine, 40);
    dsv4_message *message = malloc(sizeof *message);
    *message = message_of("user", "Hi");
    dsv4_prompt_options *options = malloc(sizeof *options);
    MUST(dsv4_prompt_options_init(options, sizeof *options));
    options->tools_json = dsv4_str("[{\"name\": \"look\"}]");
    WHOLE(dsv4_chat_render, char, engine, message, 1, options);
    WHOLE(dsv4_chat_encode, int32_t, engine, message, 1, options);
    dsv4_parser *parser = NULL;
    MUST(dsv4_parser_new(engine, message, 1, options, &parser));
    free(message);
    free(options);
    MUST(dsv4_parser_push(parser, ids, 3, on_event, &sum, &(int32_t){0}));
    MUST(dsv4_parser_finish(parser, on_event, &sum));
    MUST(dsv4_parser_free(parser));
    free(ids);
    CHECK("everything.texts", sum > 0);
}

static void about_sampling(dsv4_session *session, int32_t vocabulary)
{
    dsv4_sampling_options *options = malloc(sizeof *options);
    dsv4_bias *bias = malloc(sizeof *bias);
    dsv4_sampler *sampler = NULL, *again = NULL;
    int32_t token, *best = malloc(5 * sizeof *best);
    double *logprobs = malloc(5 * sizeof *logprobs);
    float *logits = malloc((size_t)vocabulary * sizeof *logits);
    size_t size;
    MUST(dsv4_sampling_options_init(options, sizeof *options));
    *bias = (dsv4_bias){5, 1};
    options->bias = bias;
    options->bias_count = 1;
    MUST(dsv4_sampler_new(options, vocabulary, &sampler));
    free(options);
    free(bias);
    MUST(dsv4_session_logits(session, logits, (size_t)vocabulary, &size));
    MUST(dsv4_sampler_sample(sampler, logits, size, &token));
    MUST(dsv4_sampler_accept(sampler, &token, 1));
    MUST(dsv4_sampler_observe(sampler, &token, 1));
    MUST(dsv4_session_sample(session, sampler, &token));
    MUST(dsv4_session_top_logprobs(session, 5, best, logprobs));
    free(logits);
    free(best);
    free(logprobs);
    MUST(dsv4_sampler_save(sampler, NULL, 0, &size));
    char *state = malloc(size);
    MUST(dsv4_sampler_save(sampler, state, size, &size));
    MUST(dsv4_sampler_restore(state, size, &again));
    free(state);
    MUST(dsv4_sampler_free(sampler));
    MUST(dsv4_sampler_free(again));
    CHECK("everything.sampling", token >= 0 && token < vocabulary);
}

static void about_state(dsv4_session *session)
{
    size_t size;
    MUST(dsv4_session_save(session, state_path, NULL));
    MUST(dsv4_session_load(session, state_path, NULL));
    WHOLE(dsv4_snapshot_inspect_json, char, state_path);
    MUST(dsv4_session_save_memory(session, NULL, NULL, 0, &size));
    char *state = malloc(size);
    MUST(dsv4_session_save_memory(session, NULL, state, size, &size));
    MUST(dsv4_session_load_memory(session, state, size, NULL));
    state[size - 1] ^= 1;
    EXPECT("everything.damaged_state", dsv4_session_load_memory(session, state, size, NULL), DSV4_ERR_CHECKSUM);
    free(state);
}

static void about_sessions(void)
{
    dsv4_session *session = new_session(engine, 256);
    dsv4_sampling_options options = greedy(8);
    dsv4_message message = message_of("user", "Hi");
    size_t sum = 0;
    double nll[2];
    int32_t *ids = malloc(4 * sizeof *ids);
    for (int at = 0; at < 4; at++)
        ids[at] = 40 + at;
    dsv4_sync_report *report = malloc(sizeof *report);
    dsv4_result *result = malloc(sizeof *result);
    report->struct_size = sizeof *report;
    result->struct_size = sizeof *result;
    MUST(dsv4_session_sync(session, ids, 4, NULL, report));
    MUST(dsv4_session_eval(session, ids, 2, NULL));
    MUST(dsv4_session_score(session, ids, 2, NULL, nll));
    MUST(dsv4_session_rewind(session, 3, NULL, report));
    MUST(dsv4_session_mark_turn(session));
    WHOLE(dsv4_session_tokens, int32_t, session);
    dsv4_engine_info info = {.struct_size = sizeof info};
    MUST(dsv4_engine_get_info(engine, &info));
    dsv4_session_info facts = {.struct_size = sizeof facts};
    MUST(dsv4_session_get_info(session, &facts));
    CHECK("everything.length", facts.length == 5);
    about_sampling(session, info.vocab_size);
    MUST(dsv4_session_generate(session, &options, ids, 4, NULL, on_token, &sum, result));
    about_state(session);
    MUST(dsv4_session_reply(session, &message, 1, NULL, &options, NULL, on_event, &sum, result));
    MUST(dsv4_session_reply_json(session, dsv4_str("[{\"role\": \"user\", \"content\": \"Hi\"}]"), NULL, &options,
                                 NULL, on_event, &sum, result));
    free(ids);
    free(report);
    free(result);
    MUST(dsv4_session_free(session));
    CHECK("everything.sessions", sum > 0 && nll[1] > 0);
}

static void *errors(void *unused)
{
    size_t size;
    for (int at = 0; at < 50; at++) {
        dsv4_inspect_json("/a/name/that/is/quite/long/and/that/nobody/has/ever/given/to/a/model", NULL, 0, &size);
        dsv4_error_info *info = malloc(sizeof *info);
        info->struct_size = 16;
        dsv4_last_error_info(info);
        info->struct_size = sizeof *info;
        dsv4_last_error_info(info);
        free(info);
    }
    return unused;
}

int main(int argc, char **argv)
{
    (void)argc;
    state_path = argv[2];
    about_models(argv[1]);
    about_text();
    about_sessions();
    pthread_t threads[2];
    for (int at = 0; at < 2; at++)
        pthread_create(&threads[at], NULL, errors, NULL);
    for (int at = 0; at < 2; at++)
        pthread_join(threads[at], NULL);
    EXPECT("everything.is_closed", dsv4_engine_close(engine), DSV4_OK);
    return 0;
}

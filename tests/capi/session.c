/* A timeline in the hands of a program: reports, going back, stop tokens, saved states, documents. */
#include "check.h"

enum { PROMPT = 300 };

static dsv4_engine *engine;
static dsv4_session *session;
static int32_t prompt[PROMPT];

static dsv4_sync_report sync_to(size_t count)
{
    dsv4_sync_report report = {.struct_size = sizeof report};
    MUST(dsv4_session_sync(session, prompt, count, NULL, &report));
    return report;
}

static dsv4_session_info info_of(dsv4_session *one)
{
    dsv4_session_info info = {.struct_size = sizeof info};
    MUST(dsv4_session_get_info(one, &info));
    return info;
}

static int is_report(dsv4_sync_report report, int32_t reused, int32_t evaluated, int32_t rebuilt)
{
    return report.reused == reused && report.evaluated == evaluated && report.rebuilt == rebuilt;
}

static void timelines(void)
{
    CHECK("sync.from_nothing", is_report(sync_to(200), 0, 200, 0));
    CHECK("sync.again", is_report(sync_to(200), 200, 0, 0));
    CHECK("sync.more", is_report(sync_to(PROMPT), 200, 100, 0));
    int32_t other = prompt[250];
    prompt[250] = 5;
    dsv4_sync_report report = sync_to(PROMPT);
    CHECK("sync.another_end", report.reused + report.evaluated + report.rebuilt == PROMPT);
    CHECK("sync.another_end_keeps_the_beginning", report.evaluated == 50 && report.reused > 0);
    prompt[250] = other;
    sync_to(PROMPT);
    report.struct_size = sizeof report;
    MUST(dsv4_session_rewind(session, 20, NULL, &report));
    CHECK("rewind.report", report.reused + report.rebuilt == PROMPT - 20 && report.evaluated == 0);
    CHECK("rewind.length", info_of(session).length == PROMPT - 20);
    MUST(dsv4_session_mark_turn(session));
    CHECK("sync.to_nothing", is_report(sync_to(0), 0, 0, 0) && info_of(session).length == 0);
    dsv4_session_info info = info_of(session);
    CHECK("info.counts", info.tokens_evaluated >= PROMPT + 50 && info.capacity == 4096 && info.bytes > 0);
    size_t count;
    EXPECT("logits.of_nothing", dsv4_session_logits(session, NULL, 0, &count), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("generate.from_nothing", dsv4_session_generate(session, NULL, NULL, 0, NULL, NULL, NULL, NULL),
           DSV4_ERR_INVALID_ARGUMENT);
}

typedef struct {
    int32_t tokens[16];
    size_t count;
} heard;

static int on_token(void *user, int32_t token, dsv4_text piece)
{
    heard *all = user;
    (void)piece;
    if (all->count < 16)
        all->tokens[all->count++] = token;
    return 0;
}

static heard generate(dsv4_session *one, int32_t most, const int32_t *stops, size_t stop_count, dsv4_result *result)
{
    heard all = {{0}, 0};
    dsv4_sampling_options options = greedy(most);
    result->struct_size = sizeof *result;
    MUST(dsv4_session_generate(one, &options, stops, stop_count, NULL, on_token, &all, result));
    return all;
}

static void stop_tokens(void)
{
    dsv4_result result;
    sync_to(100);
    heard all = generate(session, 8, NULL, 0, &result);
    CHECK("generate.length", all.count == 8 && result.finish_reason == DSV4_FINISH_LENGTH);
    size_t first = 0;
    while (all.tokens[first] != all.tokens[5])
        first++;
    sync_to(0);
    sync_to(100);
    heard some = generate(session, 8, &all.tokens[5], 1, &result);
    CHECK("generate.stop_token_is_not_handed_out", some.count == first);
    CHECK("generate.stop_token_joins", info_of(session).length == 101 + (int32_t)first);
    CHECK("generate.says_so",
          result.finish_reason == DSV4_FINISH_STOP && result.generated_tokens == (int32_t)first + 1);
    EXPECT("generate.stop_token_beyond_the_vocabulary",
           dsv4_session_generate(session, NULL, &(int32_t){1 << 30}, 1, NULL, NULL, NULL, NULL),
           DSV4_ERR_INVALID_ARGUMENT);
    dsv4_session *small = new_session(engine, 104);
    MUST(dsv4_session_sync(small, prompt, 100, NULL, NULL));
    some = generate(small, 8, NULL, 0, &result);
    CHECK("generate.fills_the_context", info_of(small).length == 104 && result.finish_reason == DSV4_FINISH_LENGTH);
    MUST(dsv4_session_free(small));
}

static int is_same(heard a, heard b)
{
    return a.count == b.count && memcmp(a.tokens, b.tokens, a.count * sizeof a.tokens[0]) == 0;
}

static void saved_states(const char *path)
{
    dsv4_result result;
    size_t size, again;
    dsv4_session *other = new_session(engine, 0);
    sync_to(0);
    sync_to(PROMPT);
    MUST(dsv4_session_save(session, path, NULL));
    MUST(dsv4_session_save_memory(session, NULL, NULL, 0, &size));
    char *state = malloc(size);
    MUST(dsv4_session_save_memory(session, NULL, state, size, &again));
    CHECK("save.two_calls_agree", size == again);
    EXPECT("save.small_buffer", dsv4_session_save_memory(session, NULL, state, size - 1, &again), DSV4_ERR_BUFFER);
    MUST(dsv4_session_save_memory(session, NULL, state, size, &again));
    heard here = generate(session, 12, NULL, 0, &result);
    MUST(dsv4_session_load(other, path, NULL));
    CHECK("load.length", info_of(other).length == PROMPT);
    CHECK("load.goes_on_bit_for_bit", is_same(here, generate(other, 12, NULL, 0, &result)));
    MUST(dsv4_session_load_memory(session, state, size, NULL));
    CHECK("load_memory.goes_on_bit_for_bit", is_same(here, generate(session, 12, NULL, 0, &result)));
    free(state);
    MUST(dsv4_session_free(other));
}

#define DOCUMENT(name, call, ...)                                                                      \
    do {                                                                                               \
        size_t needed = 0;                                                                             \
        MUST(call(__VA_ARGS__, NULL, 0, &needed));                                                     \
        char *document = calloc(needed + 1, 1);                                                        \
        MUST(call(__VA_ARGS__, document, needed, &needed));                                            \
        fact(name, document);                                                                          \
        free(document);                                                                                \
    } while (0)

static void documents(const char *model, const char *path)
{
    dsv4_engine_options options;
    char devices[8192] = "";
    size_t size;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.context = 512;
    DOCUMENT("inspect", dsv4_inspect_json, model);
    DOCUMENT("plan", dsv4_plan_json, model, &options);
    DOCUMENT("describe", dsv4_engine_describe_json, engine);
    DOCUMENT("memory", dsv4_engine_memory_json, engine);
    DOCUMENT("snapshot", dsv4_snapshot_inspect_json, path);
    MUST(dsv4_devices_json(devices, sizeof devices - 1, &size));
    fact("devices", devices);
    dsv4_engine_info info = {.struct_size = sizeof info};
    MUST(dsv4_engine_get_info(engine, &info));
    printf("fact\tinfo\t[%d, %d, %d, %d, %d, %d, %d, %d, \"%s\", \"%s\", %lld]\n", info.vocab_size, info.context,
           info.max_context, info.num_layers, info.bos_id, info.eos_id, info.pad_id, info.has_tokenizer,
           info.identity, info.variant, (long long)info.weight_bytes);
}

int main(int argc, char **argv)
{
    (void)argc;
    engine = open_model(argv[1]);
    session = new_session(engine, 0);
    for (int at = 0; at < PROMPT; at++)
        prompt[at] = 20 + at * 7 % 290;
    timelines();
    stop_tokens();
    saved_states(argv[2]);
    documents(argv[1], argv[2]);
    return 0;
}

/* Values that no program means to pass: counts from subtractions gone wrong, ids that are none, NaN, JSON that is
 * as deep as it is long, texts with NUL. Each is refused, and what was handed in works afterwards. */
#include "check.h"

#include <limits.h>
#include <math.h>

static dsv4_engine *engine;
static dsv4_session *session;
static int32_t some[16];

/* size_t and its lesser relatives, as a length computed with the wrong sign would be. */
static const size_t absurd[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX / 2, (size_t)1 << 62, (size_t)1 << 41, UINT32_MAX,
                                (size_t)INT32_MAX + 1};
enum { VOCABULARY = 4096, ABSURD = sizeof absurd / sizeof absurd[0] };

static int is_refusal(int32_t status)
{
    return status == DSV4_ERR_INVALID_ARGUMENT || status == DSV4_ERR_CONTEXT_FULL || status == DSV4_ERR_FORMAT;
}

#define REFUSED(name, call) CHECK(name, is_refusal(call))

static void counts_of_sessions(size_t n)
{
    double numbers[16];
    dsv4_message message = message_of("user", "Hi");
    REFUSED("count.sync", dsv4_session_sync(session, some, n, NULL, NULL));
    REFUSED("count.eval", dsv4_session_eval(session, some, n, NULL));
    REFUSED("count.score", dsv4_session_score(session, some, n, NULL, numbers));
    REFUSED("count.rewind", dsv4_session_rewind(session, n, NULL, NULL));
    REFUSED("count.top_logprobs", dsv4_session_top_logprobs(session, n, some, numbers));
    REFUSED("count.stop_tokens", dsv4_session_generate(session, NULL, some, n, NULL, NULL, NULL, NULL));
    REFUSED("count.reply", dsv4_session_reply(session, &message, n, NULL, NULL, NULL, NULL, NULL, NULL));
}

static void counts_of_engines(size_t n)
{
    static const dsv4_tool_call call = {{"a", 1}, {"b", 1}, {"{}", 2}};
    size_t size = 0;
    char buffer[64];
    dsv4_parser *parser = NULL, *other = NULL;
    dsv4_message message = message_of("user", "Hi"), calls = message_of("assistant", "");
    calls.tool_calls = &call, calls.tool_call_count = n;
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &parser));
    REFUSED("count.detokenize", dsv4_detokenize(engine, some, n, 0, buffer, sizeof buffer, &size));
    REFUSED("count.parser_push", dsv4_parser_push(parser, some, n, NULL, NULL, NULL));
    REFUSED("count.render", dsv4_chat_render(engine, &message, n, NULL, NULL, 0, &size));
    REFUSED("count.encode", dsv4_chat_encode(engine, &message, n, NULL, NULL, 0, &size));
    REFUSED("count.parser_new", dsv4_parser_new(engine, &message, n, NULL, &other));
    REFUSED("count.tool_calls", dsv4_chat_render(engine, &calls, 1, NULL, NULL, 0, &size));
    MUST(dsv4_parser_free(parser));
}

static void counts_of_samplers(size_t n)
{
    int32_t token = 0;
    dsv4_sampler *sampler = NULL, *other = NULL;
    dsv4_sampling_options options = greedy(4);
    dsv4_bias bias = {1, 1};
    options.bias = &bias, options.bias_count = n;
    MUST(dsv4_sampler_new(NULL, VOCABULARY, &sampler));
    REFUSED("count.accept", dsv4_sampler_accept(sampler, some, n));
    REFUSED("count.observe", dsv4_sampler_observe(sampler, some, n));
    REFUSED("count.sample", dsv4_sampler_sample(sampler, (float *)some, n, &token));
    REFUSED("count.bias", dsv4_sampler_new(&options, VOCABULARY, &other));
    MUST(dsv4_sampler_free(sampler));
}

static void counts(void)
{
    size_t size = 0;
    char buffer[64];
    dsv4_sampler *sampler = NULL;
    for (int at = 0; at < ABSURD; at++) {
        size_t n = absurd[at];
        dsv4_text text = {"abc", n};
        counts_of_sessions(n);
        counts_of_engines(n);
        counts_of_samplers(n);
        if (n != DSV4_ZSTR)
            REFUSED("count.text", dsv4_tokenize(engine, text, 0, NULL, 0, &size));
        if (n != DSV4_ZSTR)
            REFUSED("count.json", dsv4_session_reply_json(session, text, NULL, NULL, NULL, NULL, NULL, NULL));
        if (n <= (size_t)1 << 40)
            continue; /* a state may have that many bytes */
        REFUSED("count.state", dsv4_session_load_memory(session, some, n, NULL));
        REFUSED("count.sampler_state", dsv4_sampler_restore(some, n, &sampler));
    }
    /* A capacity that is too good to be true is the caller's business. */
    EXPECT("count.capacity", dsv4_token_bytes(engine, 300, buffer, SIZE_MAX, &size), DSV4_OK);
}

static void tokens(void)
{
    static const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, VOCABULARY, 1 << 24};
    char buffer[64];
    size_t size;
    double nll[2];
    dsv4_sampler *sampler = NULL;
    dsv4_parser *parser = NULL;
    dsv4_message message = message_of("user", "Hi");
    MUST(dsv4_sampler_new(NULL, VOCABULARY, &sampler));
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &parser));
    int32_t start[3] = {5, 6, 7};
    MUST(dsv4_session_sync(session, start, 3, NULL, NULL));
    for (size_t at = 0; at < sizeof bad / sizeof bad[0]; at++) {
        int32_t two[2] = {5, bad[at]};
        EXPECT("token.sync", dsv4_session_sync(session, two, 2, NULL, NULL), DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.eval", dsv4_session_eval(session, two, 2, NULL), DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.score", dsv4_session_score(session, two, 2, NULL, nll), DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.stop", dsv4_session_generate(session, NULL, two, 2, NULL, NULL, NULL, NULL),
               DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.detokenize", dsv4_detokenize(engine, two, 2, 0, buffer, sizeof buffer, &size),
               DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.bytes", dsv4_token_bytes(engine, bad[at], buffer, sizeof buffer, &size),
               DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.push", dsv4_parser_push(parser, two, 2, NULL, NULL, NULL), DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.accept", dsv4_sampler_accept(sampler, two, 2), DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("token.observe", dsv4_sampler_observe(sampler, two, 2), DSV4_ERR_INVALID_ARGUMENT);
        dsv4_sampling_options options = greedy(4);
        dsv4_bias bias = {bad[at], 1};
        options.bias = &bias, options.bias_count = 1;
        EXPECT("token.bias", dsv4_session_generate(session, &options, NULL, 0, NULL, NULL, NULL, NULL),
               DSV4_ERR_INVALID_ARGUMENT);
    }
    dsv4_session_info info = {.struct_size = sizeof info};
    MUST(dsv4_session_get_info(session, &info));
    CHECK("token.nothing_changed", info.length == 3 && info.tokens_generated == 0);
    EXPECT("context.negative", dsv4_session_new(engine, -1, &(dsv4_session *){NULL}), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("context.largest", dsv4_session_new(engine, INT32_MAX, &(dsv4_session *){NULL}),
           DSV4_ERR_INVALID_ARGUMENT);
    MUST(dsv4_parser_free(parser));
    MUST(dsv4_sampler_free(sampler));
}

static void options(void)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY, -1e308, 1e308};
    static const size_t places[] = {
        offsetof(dsv4_sampling_options, temperature),        offsetof(dsv4_sampling_options, top_p),
        offsetof(dsv4_sampling_options, min_p),              offsetof(dsv4_sampling_options, repetition_penalty),
        offsetof(dsv4_sampling_options, presence_penalty),   offsetof(dsv4_sampling_options, frequency_penalty),
    };
    dsv4_sampler *sampler = NULL;
    for (size_t place = 0; place < sizeof places / sizeof places[0]; place++)
        for (size_t at = 0; at < sizeof bad / sizeof bad[0]; at++) {
            dsv4_sampling_options options = greedy(4);
            *(double *)((char *)&options + places[place]) = bad[at];
            EXPECT("options.not_a_number", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
        }
    dsv4_sampling_options options = greedy(4);
    dsv4_bias bias = {1, NAN};
    options.bias = &bias, options.bias_count = 1;
    EXPECT("options.bias_of_nan", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    bias.bias = INFINITY;
    EXPECT("options.bias_of_infinity", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(-1);
    EXPECT("options.max_tokens", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(1);
    options.top_k = -1;
    EXPECT("options.top_k", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(1);
    options.seed = INT64_MIN;
    EXPECT("options.seed", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(1);
    options.reserved = 7;
    EXPECT("options.reserved", dsv4_sampler_new(&options, VOCABULARY, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    dsv4_call call = {.struct_size = sizeof call, .reserved = 1};
    EXPECT("options.reserved_of_call", dsv4_session_eval(session, some, 1, &call), DSV4_ERR_INVALID_ARGUMENT);
}

static void logits(void)
{
    static float values[VOCABULARY];
    int32_t token = 77;
    dsv4_sampler *sampler = NULL;
    dsv4_sampling_options options = greedy(4);
    options.temperature = 1;
    MUST(dsv4_sampler_new(&options, VOCABULARY, &sampler));
    values[9] = NAN;
    EXPECT("logits.nan", dsv4_sampler_sample(sampler, values, VOCABULARY, &token), DSV4_ERR_NUMERIC);
    values[9] = INFINITY;
    EXPECT("logits.infinity", dsv4_sampler_sample(sampler, values, VOCABULARY, &token), DSV4_ERR_NUMERIC);
    for (int at = 0; at < VOCABULARY; at++)
        values[at] = -INFINITY;
    EXPECT("logits.nothing_left", dsv4_sampler_sample(sampler, values, VOCABULARY, &token), DSV4_ERR_NUMERIC);
    CHECK("logits.token_is_untouched", token == 77);
    values[5] = 3e38f, values[6] = -3e38f;
    EXPECT("logits.large", dsv4_sampler_sample(sampler, values, VOCABULARY, &token), DSV4_OK);
    CHECK("logits.largest_wins", token == 5);
    MUST(dsv4_sampler_free(sampler));
}

static char *repeated(const char *before, const char *part, size_t times, const char *after)
{
    size_t step = strlen(part), length = strlen(before);
    char *text = malloc(length + step * times + strlen(after) + 1);
    strcpy(text, before);
    for (size_t at = 0; at < times; at++, length += step)
        memcpy(text + length, part, step);
    strcpy(text + length, after);
    return text;
}

/* A JSON document inside another one. */
static char *around(const char *before, const char *document, const char *after)
{
    return repeated(before, document, 1, after);
}

static int32_t render(dsv4_text tools, dsv4_text choice, dsv4_text format)
{
    dsv4_message message = message_of("user", "Hi");
    dsv4_prompt_options prompt;
    size_t size;
    MUST(dsv4_prompt_options_init(&prompt, sizeof prompt));
    prompt.tools_json = tools, prompt.tool_choice_json = choice, prompt.response_format_json = format;
    return dsv4_chat_render(engine, &message, 1, &prompt, NULL, 0, &size);
}

static int32_t render_call(const char *arguments)
{
    size_t size;
    dsv4_tool_call call = {dsv4_str("c"), dsv4_str("f"), dsv4_str(arguments)};
    dsv4_message chat[] = {message_of("user", "Hi"), message_of("assistant", ""), message_of("user", "Hi")};
    chat[1].tool_calls = &call, chat[1].tool_call_count = 1;
    return dsv4_chat_render(engine, chat, 3, NULL, NULL, 0, &size);
}

static int32_t reply_json(const char *chat)
{
    dsv4_sampling_options few = greedy(2);
    return dsv4_session_reply_json(session, dsv4_str(chat), NULL, &few, NULL, NULL, NULL, NULL);
}

#define SANE(name, call) CHECK(name, (call) != DSV4_ERR_INTERNAL)

/* One document wherever JSON is taken: an answer or a refusal, no crash and no defect. */
static void everywhere(const char *document)
{
    dsv4_text none = {NULL, 0};
    char *bare = around("[{\"name\":\"f\",\"parameters\":", document, "}]");
    char *wrapped = around("[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":", document, "}}]");
    char *content = around("[{\"role\":\"user\",\"content\":", document, "}]");
    SANE("json.tools", render(dsv4_str(bare), none, none));
    SANE("json.wrapped_tools", render(dsv4_str(wrapped), none, none));
    SANE("json.choice", render(none, dsv4_str(document), none));
    SANE("json.format", render(none, none, dsv4_str(document)));
    SANE("json.arguments", render_call(document));
    SANE("json.chat", reply_json(document));
    SANE("json.content", reply_json(content));
    free(bare), free(wrapped), free(content);
}

static void deep(size_t depth)
{
    char *lists = repeated("", "[", depth, ""), *objects = repeated("", "{\"a\":", depth, "1");
    char *closed_lists = repeated(lists, "]", depth, ""), *closed_objects = repeated(objects, "}", depth, "");
    everywhere(lists);
    everywhere(objects);
    everywhere(closed_lists);
    everywhere(closed_objects);
    free(lists), free(objects), free(closed_lists), free(closed_objects);
}

static void texts(void)
{
    size_t size = 0;
    int32_t ids[64], token;
    char buffer[256];
    static const char nul[] = "a\0b";
    dsv4_text text = {nul, 3};
    EXPECT("text.nul", dsv4_tokenize(engine, text, 0, ids, 64, &size), DSV4_OK);
    MUST(dsv4_detokenize(engine, ids, size, 1, buffer, sizeof buffer, &size));
    CHECK("text.nul_comes_back", size == 3 && memcmp(buffer, nul, 3) == 0);
    static const char *const bad[] = {"\xff", "a\x80", "\xc3", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\x80"};
    for (size_t at = 0; at < sizeof bad / sizeof bad[0]; at++) {
        dsv4_message message = message_of("user", bad[at]);
        EXPECT("text.not_utf8", dsv4_tokenize(engine, dsv4_str(bad[at]), 0, ids, 64, &size),
               DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("text.not_utf8_message", dsv4_chat_render(engine, &message, 1, NULL, NULL, 0, &size),
               DSV4_ERR_INVALID_ARGUMENT);
        message = message_of(bad[at], "x");
        EXPECT("text.not_utf8_role", dsv4_chat_render(engine, &message, 1, NULL, NULL, 0, &size),
               DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("text.not_utf8_special", dsv4_special_token(engine, dsv4_str(bad[at]), &token),
               DSV4_ERR_INVALID_ARGUMENT);
        EXPECT("text.not_utf8_json",
               dsv4_session_reply_json(session, dsv4_str(bad[at]), NULL, NULL, NULL, NULL, NULL, NULL),
               DSV4_ERR_INVALID_ARGUMENT);
    }
    dsv4_text none = {NULL, 0};
    /* A lone surrogate is UTF-8 while it is written as JSON, and none afterwards. */
    SANE("text.surrogate", reply_json("[{\"role\":\"user\",\"content\":\"\\ud800\"}]"));
    SANE("text.surrogate_in_tools",
         render(dsv4_str("[{\"name\":\"\\udfff\",\"parameters\":{\"\\ud801\":1}}]"), none, none));
    SANE("text.numbers_that_are_none",
         render(dsv4_str("[{\"name\":\"f\",\"parameters\":{\"a\":NaN,\"b\":1e999}}]"), none, none));
    char *digits = repeated("[{\"name\":\"f\",\"parameters\":{\"a\":", "9", 10000, "}}]");
    SANE("text.long_number", render(dsv4_str(digits), none, none));
    free(digits);
}

static void thinking(void)
{
    static char ones[6000];
    static const char *const bad[] = {"99999999999999999999", "\xd9\xa3", "-1", "1.5", "", ones};
    memset(ones, '1', sizeof ones - 1);
    dsv4_message message = message_of("user", "x");
    dsv4_prompt_options prompt;
    size_t size;
    MUST(dsv4_prompt_options_init(&prompt, sizeof prompt));
    for (size_t at = 0; at < sizeof bad / sizeof bad[0]; at++) {
        prompt.thinking = bad[at];
        EXPECT("text.thinking", dsv4_chat_render(engine, &message, 1, &prompt, NULL, 0, &size),
               DSV4_ERR_INVALID_ARGUMENT);
    }
}

static void many(void)
{
    enum { MANY = 100000 };
    size_t size = 0;
    dsv4_message *messages = malloc(MANY * sizeof *messages);
    for (int at = 0; at < MANY; at++)
        messages[at] = message_of("user", "x");
    EXPECT("messages.none", dsv4_chat_render(engine, messages, 0, NULL, NULL, 0, &size), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("messages.none_null", dsv4_chat_render(engine, NULL, 0, NULL, NULL, 0, &size), DSV4_ERR_INVALID_ARGUMENT);
    dsv4_sampling_options few = greedy(2);
    EXPECT("messages.many", dsv4_session_reply(session, messages, MANY, NULL, &few, NULL, NULL, NULL, NULL),
           DSV4_ERR_CONTEXT_FULL);
    messages[1].struct_size -= 8;
    EXPECT("messages.mixed_sizes", dsv4_chat_render(engine, messages, 2, NULL, NULL, 0, &size), DSV4_ERR_ABI);
    messages[1].struct_size = 0;
    EXPECT("messages.no_size", dsv4_chat_render(engine, messages, 2, NULL, NULL, 0, &size), DSV4_ERR_ABI);
    free(messages);
    char *huge = repeated("[{\"role\":\"user\",\"content\":\"", "hello ", 10000000 / 6, "\"}]");
    EXPECT("json.large", reply_json(huge), DSV4_ERR_CONTEXT_FULL);
    free(huge);
    huge = repeated("[", "{},", 200000, "{}]");
    CHECK("json.many", is_refusal(reply_json(huge)));
    free(huge);
}

int main(int count, char **arguments)
{
    engine = open_model(count > 1 ? arguments[1] : "pocket-v4");
    session = new_session(engine, 1024);
    MUST(dsv4_session_eval(session, some, 4, NULL));
    counts();
    tokens();
    options();
    logits();
    texts();
    thinking();
    static const size_t depths[] = {60, 200, 300, 500, 990, 1000, 2000000};
    for (size_t at = 0; at < sizeof depths / sizeof depths[0]; at++)
        deep(depths[at]);
    many();
    dsv4_message message = message_of("user", "Who are you?");
    dsv4_sampling_options few = greedy(20);
    EXPECT("all.works_afterwards", dsv4_session_reply(session, &message, 1, NULL, &few, NULL, NULL, NULL, NULL),
           DSV4_OK);
    EXPECT("all.frees", dsv4_session_free(session), DSV4_OK);
    EXPECT("all.closes", dsv4_engine_close(engine), DSV4_OK);
    return 0;
}

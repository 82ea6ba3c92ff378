/* Texts and numbers as hostile or careless programs hand them over. */
#include "check.h"

#include <math.h>

enum { MANY = 10 << 20, ROOM = 4096 };

static dsv4_engine *engine;
static int32_t tokens[ROOM];
static char bytes[ROOM];

/* Whether bytes are UTF-8, no character cut at the end. */
static int is_utf8(const char *data, size_t size)
{
    const unsigned char *at = (const unsigned char *)data, *end = at + size;
    while (at < end) {
        int more = *at < 0x80 ? 0 : *at >= 0xf0 ? 3 : *at >= 0xe0 ? 2 : *at >= 0xc2 ? 1 : 9;
        if (end - at <= more)
            return 0;
        for (int place = 1; place <= more; place++)
            if ((at[place] & 0xc0) != 0x80)
                return 0;
        at += 1 + more;
    }
    return 1;
}

static dsv4_text run_of(const char *data, size_t size)
{
    dsv4_text text = {data, size};
    return text;
}

/* Tokens of a text, and whether they give the same bytes again. */
static int is_round_trip(dsv4_text text, size_t size)
{
    size_t count = 0, length = 0;
    if (dsv4_tokenize(engine, text, 0, tokens, ROOM, &count) != DSV4_OK)
        return 0;
    if (dsv4_detokenize(engine, tokens, count, 1, bytes, ROOM, &length) != DSV4_OK)
        return 0;
    return length == size && (!size || memcmp(bytes, text.data, size) == 0);
}

static void plain_texts(void)
{
    size_t count = 99;
    CHECK("text.of_a_size", is_round_trip(run_of("Hello, fox!", 5), 5));
    CHECK("text.up_to_its_nul", is_round_trip(run_of("Hello", DSV4_ZSTR), 5));
    CHECK("text.with_a_nul_inside", is_round_trip(run_of("a\0b", 3), 3));
    CHECK("text.of_a_nul_alone", is_round_trip(run_of("\0", 1), 1));
    CHECK("text.with_characters", is_round_trip(run_of("h\xc3\xa9 \xe4\xb8\x96 \xf0\x9f\xa6\x8a", DSV4_ZSTR), 12));
    EXPECT("text.empty", dsv4_tokenize(engine, run_of("", 0), 0, NULL, 0, &count), DSV4_OK);
    CHECK("text.empty_has_no_tokens", count == 0);
    EXPECT("text.null_and_empty", dsv4_tokenize(engine, run_of(NULL, 0), 0, NULL, 0, &count), DSV4_OK);
    EXPECT("text.null_and_zstr", dsv4_tokenize(engine, run_of(NULL, DSV4_ZSTR), 0, NULL, 0, &count), DSV4_OK);
    EXPECT("text.null_with_a_size", dsv4_tokenize(engine, run_of(NULL, 3), 0, NULL, 0, &count),
           DSV4_ERR_INVALID_ARGUMENT);
    CHECK("text.null_is_named", strcmp(last_error().name, "text") == 0 && error_has("3"));
}

static void no_utf8(void)
{
    static const char *const bad[] = {"ab\xff", "a\xc3", "\xc0\x80", "x\xed\xa0\x80", "\xf4\x90\x80\x80", "\x80"};
    size_t count;
    int is_right = 1;
    for (size_t at = 0; at < sizeof bad / sizeof bad[0]; at++) {
        dsv4_message message = message_of("user", bad[at]);
        int32_t status = dsv4_tokenize(engine, dsv4_str(bad[at]), 0, NULL, 0, &count);
        is_right = is_right && status == DSV4_ERR_INVALID_ARGUMENT && error_has("UTF-8");
        status = dsv4_chat_render(engine, &message, 1, NULL, NULL, 0, &count);
        is_right = is_right && status == DSV4_ERR_INVALID_ARGUMENT && error_has("messages[0].content");
    }
    CHECK("utf8.is_refused", is_right);
    dsv4_tokenize(engine, dsv4_str("ab\xff"), 0, NULL, 0, &count);
    CHECK("utf8.place_is_named", error_has("0xff at 2"));
    EXPECT("utf8.path_may_be_none", dsv4_inspect_json("/no\xff/such", NULL, 0, &count), DSV4_ERR_NOT_FOUND);
    EXPECT("utf8.path_is_not_empty", dsv4_inspect_json("", NULL, 0, &count), DSV4_ERR_INVALID_ARGUMENT);
}

static void long_text(void)
{
    size_t count = 0;
    char *text = malloc(MANY);
    memset(text, 'a', MANY);
    EXPECT("long.ten_megabytes", dsv4_tokenize(engine, run_of(text, MANY), 0, NULL, 0, &count), DSV4_OK);
    CHECK("long.has_tokens", count > MANY / 128 && count <= MANY);
    free(text);
}

/* Lengths that come from a subtraction gone wrong. */
static void wild_lengths(void)
{
    size_t size = 0;
    int32_t id = 20;
    double nll;
    dsv4_session *session = new_session(engine, 16);
    dsv4_sampler *sampler = NULL;
    size_t wild[] = {(size_t)-2, (size_t)1 << 63, (size_t)1 << 41};
    int is_right = 1;
    for (int at = 0; at < 3; at++) {
        int32_t statuses[] = {
            dsv4_tokenize(engine, run_of("x", wild[at]), 0, NULL, 0, &size),
            dsv4_detokenize(engine, &id, wild[at], 0, NULL, 0, &size),
            dsv4_session_sync(session, &id, wild[at], NULL, NULL),
            dsv4_session_eval(session, &id, wild[at], NULL),
            dsv4_session_score(session, &id, wild[at], NULL, &nll),
            dsv4_session_rewind(session, wild[at], NULL, NULL),
            dsv4_session_generate(session, NULL, &id, wild[at], NULL, NULL, NULL, NULL),
            dsv4_session_load_memory(session, "x", wild[at], NULL),
            dsv4_session_top_logprobs(session, wild[at], &id, &nll),
            dsv4_sampler_restore("x", wild[at], &sampler),
        };
        for (size_t call = 0; call < sizeof statuses / sizeof statuses[0]; call++)
            is_right = is_right && statuses[call] == DSV4_ERR_INVALID_ARGUMENT;
    }
    CHECK("length.wild", is_right);
    dsv4_tokenize(engine, run_of("x", (size_t)-2), 0, NULL, 0, &size);
    CHECK("length.is_named", strcmp(last_error().name, "text.size") == 0);
    MUST(dsv4_session_free(session));
}

static void special_tokens(void)
{
    int32_t id = -1, none = 0;
    size_t count = 0;
    int has_id = 0;
    MUST(dsv4_special_token(engine, dsv4_str("<think>"), &id));
    MUST(dsv4_special_token(engine, dsv4_str("no such token"), &none));
    CHECK("special.is_found", id >= 0 && none == -1);
    MUST(dsv4_tokenize(engine, dsv4_str("<think>"), 0, tokens, ROOM, &count));
    for (size_t at = 0; at < count; at++)
        has_id |= tokens[at] == id;
    CHECK("special.typed_text_stays_text", count > 1 && !has_id);
    MUST(dsv4_tokenize(engine, dsv4_str("<think>"), 1, tokens, ROOM, &count));
    CHECK("special.is_matched_when_asked", count == 1 && tokens[0] == id);
    dsv4_message message = message_of("user", "a <think> b <\xef\xbd\x9c" "User\xef\xbd\x9c> c");
    int32_t user = -1;
    int users = 0, thinks = 0;
    MUST(dsv4_special_token(engine, dsv4_str("<\xef\xbd\x9c" "User\xef\xbd\x9c>"), &user));
    dsv4_prompt_options options;
    MUST(dsv4_prompt_options_init(&options, sizeof options));
    options.thinking = "none";
    MUST(dsv4_chat_encode(engine, &message, 1, &options, tokens, ROOM, &count));
    for (size_t at = 0; at < count; at++) {
        users += tokens[at] == user;
        thinks += tokens[at] == id;
    }
    CHECK("special.of_a_user_is_no_control_token", users == 1 && thinks == 0);
}

/* ---- Conversations ---- */

static int32_t render(const dsv4_message *messages, size_t count, const dsv4_prompt_options *options)
{
    size_t size;
    return dsv4_chat_render(engine, messages, count, options, NULL, 0, &size);
}

static void conversations(void)
{
    dsv4_message message = message_of("user", "Hi"), odd = message_of("narrator", "Hi");
    dsv4_message messages[2] = {message, odd};
    size_t size;
    EXPECT("chat.no_messages", render(&message, 0, NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("chat.too_many_messages", render(&message, (size_t)1 << 40, NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("chat.unknown_role", render(messages, 2, NULL), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("chat.role_is_named", error_has("messages[1]") && error_has("narrator"));
    message.role = dsv4_str("");
    EXPECT("chat.empty_role", render(&message, 1, NULL), DSV4_ERR_INVALID_ARGUMENT);
    message = message_of("user", "");
    EXPECT("chat.empty_content", render(&message, 1, NULL), DSV4_OK);
    message = message_of("assistant", "");
    message.tool_call_count = 1;
    EXPECT("chat.calls_are_null", render(&message, 1, NULL), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("chat.calls_are_named", strcmp(last_error().name, "messages[0].tool_calls") == 0);
    dsv4_session *session = new_session(engine, 64);
    EXPECT("chat.json_that_is_none",
           dsv4_session_reply_json(session, dsv4_str("[{"), NULL, NULL, NULL, NULL, NULL, NULL), DSV4_ERR_FORMAT);
    EXPECT("chat.json_without_messages",
           dsv4_session_reply_json(session, dsv4_str("{}"), NULL, NULL, NULL, NULL, NULL, NULL),
           DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("chat.json_is_deep", dsv4_session_reply_json(session, run_of(memset(malloc(100000), '[', 100000), 100000),
                                                        NULL, NULL, NULL, NULL, NULL, NULL),
           DSV4_ERR_FORMAT);
    memset(bytes, 'x', 2000);
    bytes[2000] = 0;
    message = message_of("user", bytes);
    EXPECT("chat.longer_than_the_context",
           dsv4_session_reply(session, &message, 1, NULL, NULL, NULL, NULL, NULL, NULL), DSV4_ERR_CONTEXT_FULL);
    CHECK("chat.context_numbers", last_error().needed > 64 && last_error().available == 64);
    MUST(dsv4_session_tokens(session, NULL, 0, &size));
    CHECK("chat.nothing_changed", size == 0);
}

static void prompt_options(void)
{
    dsv4_message message = message_of("user", "Hi");
    static const char *const documents[] = {"no json", "{\"a\": 1}", "[1]", "[{\"name\": 3}]", "\"x\"", "[", "12"};
    dsv4_prompt_options options;
    int is_right = 1;
    for (size_t at = 0; at < sizeof documents / sizeof documents[0]; at++) {
        MUST(dsv4_prompt_options_init(&options, sizeof options));
        options.tools_json = dsv4_str(documents[at]);
        is_right = is_right && render(&message, 1, &options) == DSV4_ERR_INVALID_ARGUMENT && error_has("tool");
    }
    CHECK("options.tools_that_are_none", is_right);
    MUST(dsv4_prompt_options_init(&options, sizeof options));
    options.response_format_json = dsv4_str("[]");
    EXPECT("options.response_format", render(&message, 1, &options), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("options.response_format_is_named", strcmp(last_error().name, "response_format_json") == 0);
    MUST(dsv4_prompt_options_init(&options, sizeof options));
    options.tool_choice_json = dsv4_str("\"sometimes\"");
    EXPECT("options.tool_choice", render(&message, 1, &options), DSV4_ERR_INVALID_ARGUMENT);
    static const char *const modes[] = {"", "much", "0", "101", "-1", "1.5", "99999999999999999999"};
    is_right = 1;
    for (size_t at = 0; at < sizeof modes / sizeof modes[0]; at++) {
        MUST(dsv4_prompt_options_init(&options, sizeof options));
        options.thinking = modes[at];
        is_right = is_right && render(&message, 1, &options) == DSV4_ERR_INVALID_ARGUMENT;
    }
    CHECK("options.thinking", is_right);
    options.thinking = NULL;
    EXPECT("options.thinking_is_null", render(&message, 1, &options), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("options.thinking_is_named", strcmp(last_error().name, "thinking") == 0);
}

/* ---- Numbers out of their ranges ---- */

static int32_t sampler_with(size_t offset, double value)
{
    dsv4_sampling_options options = greedy(1);
    dsv4_sampler *sampler = NULL;
    memcpy((char *)&options + offset, &value, sizeof value);
    return dsv4_sampler_new(&options, 100, &sampler);
}

static void numbers(void)
{
    static const struct {
        size_t offset;
        const char *name;
        double bad[4];
    } fields[] = {
        {offsetof(dsv4_sampling_options, temperature), "temperature", {-0.1, 100.5, NAN, INFINITY}},
        {offsetof(dsv4_sampling_options, top_p), "top_p", {0, -1, 1.01, NAN}},
        {offsetof(dsv4_sampling_options, min_p), "min_p", {-0.1, 1.1, NAN, -INFINITY}},
        {offsetof(dsv4_sampling_options, repetition_penalty), "repetition_penalty", {0, -1, 101, NAN}},
        {offsetof(dsv4_sampling_options, presence_penalty), "presence_penalty", {-101, 101, NAN, INFINITY}},
        {offsetof(dsv4_sampling_options, frequency_penalty), "frequency_penalty", {-101, 101, NAN, INFINITY}},
    };
    int is_right = 1;
    for (size_t at = 0; at < sizeof fields / sizeof fields[0]; at++)
        for (int bad = 0; bad < 4; bad++) {
            int32_t status = sampler_with(fields[at].offset, fields[at].bad[bad]);
            is_right = is_right && status == DSV4_ERR_INVALID_ARGUMENT;
            is_right = is_right && strcmp(last_error().name, fields[at].name) == 0;
        }
    CHECK("numbers.of_sampling", is_right);
    dsv4_sampling_options options = greedy(1);
    dsv4_sampler *sampler = NULL;
    options.seed = -2;
    EXPECT("numbers.seed", dsv4_sampler_new(&options, 100, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(-1);
    EXPECT("numbers.max_tokens", dsv4_sampler_new(&options, 100, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(1);
    options.top_k = -1;
    EXPECT("numbers.top_k", dsv4_sampler_new(&options, 100, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(1);
    options.bias_count = 1;
    EXPECT("numbers.bias_is_null", dsv4_sampler_new(&options, 100, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options.bias = &(dsv4_bias){5, NAN};
    EXPECT("numbers.bias_is_nan", dsv4_sampler_new(&options, 100, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    options.bias = &(dsv4_bias){100, 1};
    EXPECT("numbers.bias_beyond_the_vocabulary", dsv4_sampler_new(&options, 100, &sampler),
           DSV4_ERR_INVALID_ARGUMENT);
    options = greedy(1);
    EXPECT("numbers.vocabulary", dsv4_sampler_new(&options, 0, &sampler), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("numbers.a_sound_sampler", dsv4_sampler_new(&options, 1, &sampler), DSV4_OK);
}

static void engine_numbers(void)
{
    static const struct {
        size_t offset;
        const char *name;
        int32_t bad[2];
    } fields[] = {
        {offsetof(dsv4_engine_options, context), "context", {-1, (1 << 24) + 1}},
        {offsetof(dsv4_engine_options, threads), "threads", {-1, 1000000}},
        {offsetof(dsv4_engine_options, prefill_chunk), "prefill_chunk", {-1, 65537}},
        {offsetof(dsv4_engine_options, draft), "draft", {-1, 9}},
    };
    dsv4_engine_options options;
    dsv4_engine *opened = NULL;
    int is_right = 1;
    for (size_t at = 0; at < sizeof fields / sizeof fields[0]; at++)
        for (int bad = 0; bad < 2; bad++) {
            MUST(dsv4_engine_options_init(&options, sizeof options));
            memcpy((char *)&options + fields[at].offset, &fields[at].bad[bad], sizeof(int32_t));
            int32_t status = dsv4_engine_open("pocket-v4", &options, NULL, &opened);
            is_right = is_right && status == DSV4_ERR_INVALID_ARGUMENT;
            is_right = is_right && strcmp(last_error().name, fields[at].name) == 0;
        }
    CHECK("numbers.of_an_engine", is_right);
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.ram_bytes = -1;
    EXPECT("numbers.ram", dsv4_engine_open("pocket-v4", &options, NULL, &opened), DSV4_ERR_INVALID_ARGUMENT);
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.profile = "fast";
    EXPECT("numbers.profile", dsv4_engine_open("pocket-v4", &options, NULL, &opened), DSV4_ERR_INVALID_ARGUMENT);
    options.profile = NULL;
    EXPECT("numbers.profile_is_null", dsv4_engine_open("pocket-v4", &options, NULL, &opened),
           DSV4_ERR_INVALID_ARGUMENT);
    CHECK("numbers.profile_is_named", strcmp(last_error().name, "profile") == 0);
}

/* ---- Characters of several tokens ---- */

typedef struct {
    char text[1 << 16];
    size_t size;
    int calls, empty, is_whole;
} collected;

static int collect(collected *all, dsv4_text part)
{
    all->calls++;
    all->empty += part.size == 0;
    all->is_whole = all->is_whole && is_utf8(part.data, part.size);
    if (all->size + part.size <= sizeof all->text && part.size)
        memcpy(all->text + all->size, part.data, part.size);
    all->size += part.size;
    return 0;
}

static int on_token(void *user, int32_t token, dsv4_text piece)
{
    (void)token;
    return collect(user, piece);
}

static int on_event(void *user, const dsv4_event *event) { return collect(user, event->text); }

static void pieces(void)
{
    static collected all;
    static int32_t said[256];
    dsv4_session *session = new_session(engine, 256);
    dsv4_sampling_options options = greedy(200);
    size_t count, length;
    /* So hot that tokens of single bytes come. */
    options.temperature = 100;
    options.seed = 3;
    all.is_whole = 1;
    MUST(dsv4_session_eval(session, (int32_t[]){0, 20, 30}, 3, NULL));
    MUST(dsv4_session_generate(session, &options, NULL, 0, NULL, on_token, &all, NULL));
    CHECK("pieces.are_whole_characters", all.is_whole && all.calls == 200);
    MUST(dsv4_session_tokens(session, said, 256, &count));
    MUST(dsv4_detokenize(engine, said + 3, count - 3, 1, bytes, ROOM, &length));
    CHECK("pieces.are_the_text_of_the_tokens",
          all.size <= length && length - all.size < 8 && memcmp(bytes, all.text, all.size) == 0);
    MUST(dsv4_session_free(session));
}

static void events(void)
{
    static collected all;
    static const char text[] = "h\xc3\xa9 \xe4\xb8\x96\xe7\x95\x8c \xf0\x9f\xa6\x8a\xf0\x9f\x90\xbb!";
    dsv4_message message = message_of("user", "Hi");
    dsv4_prompt_options options;
    dsv4_parser *parser = NULL;
    size_t count;
    MUST(dsv4_prompt_options_init(&options, sizeof options));
    options.thinking = "none";
    MUST(dsv4_parser_new(engine, &message, 1, &options, &parser));
    MUST(dsv4_tokenize(engine, dsv4_str(text), 0, tokens, ROOM, &count));
    all.is_whole = 1;
    for (size_t at = 0; at < count; at++)
        MUST(dsv4_parser_push(parser, tokens + at, 1, on_event, &all, NULL));
    MUST(dsv4_parser_finish(parser, on_event, &all));
    CHECK("events.are_whole_characters", all.is_whole && count > 8 && (size_t)all.calls < count);
    CHECK("events.are_the_text", all.size == sizeof text - 1 && memcmp(all.text, text, all.size) == 0);
    EXPECT("parser.after_its_end", dsv4_parser_push(parser, tokens, 1, NULL, NULL, NULL), DSV4_ERR_INVALID_ARGUMENT);
    MUST(dsv4_parser_free(parser));
    MUST(dsv4_parser_new(engine, &message, 1, &options, &parser));
    EXPECT("parser.bad_id", dsv4_parser_push(parser, &(int32_t){-1}, 1, NULL, NULL, NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("token_bytes.bad_id", dsv4_token_bytes(engine, 1 << 30, NULL, 0, &count), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("detokenize.bad_id", dsv4_detokenize(engine, &(int32_t){-7}, 1, 0, NULL, 0, &count),
           DSV4_ERR_INVALID_ARGUMENT);
}

int main(int argc, char **argv)
{
    (void)argc;
    engine = open_model(argv[1]);
    plain_texts();
    no_utf8();
    long_text();
    wild_lengths();
    special_tokens();
    conversations();
    prompt_options();
    numbers();
    engine_numbers();
    pieces();
    events();
    return 0;
}

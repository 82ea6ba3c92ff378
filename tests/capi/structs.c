/* Structs of other versions: each one that goes in or comes out, in every size that a caller can claim. */
#include "check.h"

#include <stddef.h>

enum { RAW = 1 << 16, TAIL = 64, FILLER = 0xa5 };

typedef struct {
    const char *name;
    size_t size;   /* as this program compiled it */
    size_t older;  /* of an imagined older header: the first members alone */
    int is_out;    /* the library writes it */
    void (*fill)(unsigned char *at);
    int32_t (*use)(void *at);
} subject;

static dsv4_engine *engine;
static dsv4_session *session;
static const char *model;
static unsigned char *raw;
static const int32_t ids[2] = {10, 20};

static void nothing(unsigned char *at) { (void)at; }

static void fill_call(unsigned char *at)
{
    dsv4_call call = {0};
    memcpy(at, &call, sizeof call);
}

static void fill_engine_options(unsigned char *at)
{
    dsv4_engine_options options;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.context = 128;
    memcpy(at, &options, sizeof options);
}

static void fill_sampling(unsigned char *at)
{
    dsv4_sampling_options options = greedy(1);
    options.top_k = 1;
    memcpy(at, &options, sizeof options);
}

static void fill_prompt(unsigned char *at)
{
    dsv4_prompt_options options;
    MUST(dsv4_prompt_options_init(&options, sizeof options));
    memcpy(at, &options, sizeof options);
}

static void fill_message(unsigned char *at)
{
    dsv4_message message = message_of("user", "Hi");
    memcpy(at, &message, sizeof message);
}

static int32_t use_call(void *at) { return dsv4_session_sync(session, ids, 2, at, NULL); }

static int32_t use_engine_options(void *at)
{
    char plan[4096];
    size_t size;
    return dsv4_plan_json(model, at, plan, sizeof plan, &size);
}

static int32_t use_sampling(void *at)
{
    dsv4_sampler *sampler = NULL;
    int32_t status = dsv4_sampler_new(at, 100, &sampler);
    dsv4_sampler_free(sampler);
    return status;
}

static int32_t use_prompt(void *at)
{
    size_t size;
    dsv4_message message = message_of("user", "Hi");
    return dsv4_chat_render(engine, &message, 1, at, NULL, 0, &size);
}

static int32_t use_message(void *at)
{
    size_t size;
    return dsv4_chat_render(engine, at, 1, NULL, NULL, 0, &size);
}

static int32_t use_error_info(void *at) { return dsv4_last_error_info(at); }

static int32_t use_engine_info(void *at) { return dsv4_engine_get_info(engine, at); }

static int32_t use_session_info(void *at) { return dsv4_session_get_info(session, at); }

static int32_t use_report(void *at) { return dsv4_session_sync(session, ids, 2, NULL, at); }

static int32_t use_result(void *at)
{
    dsv4_sampling_options options = greedy(1);
    return dsv4_session_generate(session, &options, NULL, 0, NULL, NULL, NULL, at);
}

static const subject subjects[] = {
    {"dsv4_call", sizeof(dsv4_call), offsetof(dsv4_call, cancel), 0, fill_call, use_call},
    {"dsv4_engine_options", sizeof(dsv4_engine_options), offsetof(dsv4_engine_options, threads), 0,
     fill_engine_options, use_engine_options},
    {"dsv4_sampling_options", sizeof(dsv4_sampling_options), offsetof(dsv4_sampling_options, temperature), 0,
     fill_sampling, use_sampling},
    {"dsv4_prompt_options", sizeof(dsv4_prompt_options), offsetof(dsv4_prompt_options, thinking), 0,
     fill_prompt, use_prompt},
    {"dsv4_message", sizeof(dsv4_message), offsetof(dsv4_message, reasoning), 0, fill_message, use_message},
    {"dsv4_error_info", sizeof(dsv4_error_info), offsetof(dsv4_error_info, function), 1, nothing,
     use_error_info},
    {"dsv4_engine_info", sizeof(dsv4_engine_info), offsetof(dsv4_engine_info, max_context), 1, nothing,
     use_engine_info},
    {"dsv4_session_info", sizeof(dsv4_session_info), offsetof(dsv4_session_info, bytes), 1, nothing,
     use_session_info},
    {"dsv4_sync_report", sizeof(dsv4_sync_report), offsetof(dsv4_sync_report, evaluated), 1, nothing,
     use_report},
    {"dsv4_result", sizeof(dsv4_result), offsetof(dsv4_result, reused_tokens), 1, nothing, use_result},
};

/* A struct that claims `size` bytes and is filled up to them; what follows is never to be touched. */
static int32_t claim(const subject *one, size_t size, int is_tail_zero)
{
    memset(raw, FILLER, RAW);
    one->fill(raw);
    if (size > one->size && is_tail_zero)
        memset(raw + one->size, 0, (size < RAW ? size : RAW) - one->size);
    else if (size < one->size)
        memset(raw + size, FILLER, RAW - size);
    memcpy(raw, &(uint32_t){(uint32_t)size}, sizeof(uint32_t));
    return one->use(raw);
}

static int is_filler_from(size_t start, size_t end)
{
    for (size_t at = start; at < end; at++)
        if (raw[at] != FILLER)
            return 0;
    return 1;
}

static int is_zero(size_t start, size_t end)
{
    for (size_t at = start; at < end; at++)
        if (raw[at])
            return 0;
    return 1;
}

static void say(const subject *one, const char *what, int is_right)
{
    char name[96];
    snprintf(name, sizeof name, "%s.%s", one->name, what);
    check_line(name, is_right, what, __LINE__);
}

static void try_sizes(const subject *one)
{
    say(one, "same", claim(one, one->size, 1) == DSV4_OK && is_filler_from(one->size, RAW));
    say(one, "older", claim(one, one->older, 1) == DSV4_OK && is_filler_from(one->older, RAW));
    int is_ok = claim(one, one->size + TAIL, 1) == DSV4_OK;
    is_ok = is_ok && is_zero(one->size, one->size + TAIL);
    say(one, "newer", is_ok && is_filler_from(one->size + TAIL, RAW));
    int32_t status = claim(one, one->size + TAIL, 0);
    /* What comes out says nothing of the caller; there the unknown tail becomes zero. */
    is_ok = one->is_out ? status == DSV4_OK && is_zero(one->size, one->size + TAIL) : status == DSV4_ERR_ABI;
    say(one, "newer_used", is_ok && is_filler_from(one->size + TAIL, RAW));
    say(one, "zero", claim(one, 0, 1) == DSV4_ERR_ABI);
    say(one, "tiny", claim(one, 4, 1) == DSV4_ERR_ABI);
    say(one, "odd", claim(one, one->older + 1, 1) == DSV4_ERR_ABI && is_filler_from(one->size, RAW));
    say(one, "huge", claim(one, UINT32_MAX, 1) == DSV4_ERR_ABI);
}

/* The functions that fill in defaults take the size as an argument. */
static void try_init(const char *name, int32_t (*init)(void *, uint32_t), size_t size)
{
    struct {
        uint32_t size;
        int32_t expected;
    } cases[] = {{0, DSV4_ERR_ABI}, {4, DSV4_ERR_ABI}, {9, DSV4_ERR_ABI}, {16, DSV4_OK}, {0, DSV4_OK}};
    cases[4].size = (uint32_t)size + TAIL;
    int is_right = 1;
    for (size_t at = 0; at < sizeof cases / sizeof cases[0]; at++) {
        memset(raw, FILLER, RAW);
        is_right = is_right && init(raw, cases[at].size) == cases[at].expected;
        size_t end = cases[at].expected == DSV4_OK ? cases[at].size : 0;
        is_right = is_right && is_filler_from(end, RAW);
        is_right = is_right && (!end || memcmp(raw, &cases[at].size, 4) == 0);
    }
    check_line(name, is_right && is_zero(size, size + TAIL), dsv4_last_error(), __LINE__);
}

static int32_t init_engine(void *at, uint32_t size) { return dsv4_engine_options_init(at, size); }
static int32_t init_sampling(void *at, uint32_t size) { return dsv4_sampling_options_init(at, size); }
static int32_t init_prompt(void *at, uint32_t size) { return dsv4_prompt_options_init(at, size); }

static void older_members_take_defaults(void)
{
    dsv4_engine_options *options = (dsv4_engine_options *)(void *)raw;
    dsv4_engine *opened = NULL;
    dsv4_engine_info info;
    memset(raw, FILLER, RAW);
    options->struct_size = offsetof(dsv4_engine_options, threads);
    options->context = 77;
    info.struct_size = sizeof info;
    int32_t status = dsv4_engine_open(model, options, NULL, &opened);
    CHECK("older.members_take_defaults",
          status == DSV4_OK && dsv4_engine_get_info(opened, &info) == DSV4_OK && info.context == 77);
    dsv4_engine_close(opened);
}

static void messages_have_a_stride(void)
{
    struct {
        dsv4_message known;
        uint64_t unknown;
    } messages[3];
    const char *const roles[3] = {"system", "user", "assistant"};
    const char *const texts[3] = {"be short", "first", "second"};
    char prompt[512];
    size_t size = 0;
    memset(messages, 0, sizeof messages);
    for (int at = 0; at < 3; at++) {
        messages[at].known = message_of(roles[at], texts[at]);
        messages[at].known.struct_size = sizeof messages[0];
    }
    messages[2].known.role = dsv4_str("user");
    MUST(dsv4_chat_render(engine, &messages[0].known, 3, NULL, prompt, sizeof prompt - 1, &size));
    prompt[size] = 0;
    CHECK("message.stride", strstr(prompt, "be short") && strstr(prompt, "first") && strstr(prompt, "second"));
    messages[1].known.struct_size = sizeof(dsv4_message);
    EXPECT("message.two_strides", dsv4_chat_render(engine, &messages[0].known, 3, NULL, NULL, 0, &size),
           DSV4_ERR_ABI);
    CHECK("message.two_strides_are_named", error_has("messages[1]"));
}

int main(int argc, char **argv)
{
    (void)argc;
    model = argv[1];
    engine = open_model(model);
    session = new_session(engine, 0);
    raw = malloc(RAW);
    MUST(dsv4_session_sync(session, ids, 2, NULL, NULL));
    for (size_t at = 0; at < sizeof subjects / sizeof subjects[0]; at++)
        try_sizes(&subjects[at]);
    try_init("init.dsv4_engine_options", init_engine, sizeof(dsv4_engine_options));
    try_init("init.dsv4_sampling_options", init_sampling, sizeof(dsv4_sampling_options));
    try_init("init.dsv4_prompt_options", init_prompt, sizeof(dsv4_prompt_options));
    older_members_take_defaults();
    messages_have_a_stride();
    EXPECT("abi.older_version", dsv4_init(DSV4_ABI_VERSION, NULL), DSV4_OK);
    EXPECT("abi.newer_version", dsv4_init(DSV4_ABI_VERSION + 1, NULL), DSV4_ERR_ABI);
    EXPECT("abi.other_thousand", dsv4_init(DSV4_ABI_VERSION + 1000, NULL), DSV4_ERR_ABI);
    EXPECT("abi.zero", dsv4_init(0, NULL), DSV4_ERR_ABI);
    CHECK("abi.text", error_has("abi_version") && strcmp(last_error().name, "abi_version") == 0);
    CHECK("abi.version", dsv4_abi_version() == DSV4_ABI_VERSION && dsv4_version()[0] == '0');
    return 0;
}

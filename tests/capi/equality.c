/* Prints everything a model says, exactly, for comparison with the Python API. */
#include "check.h"

static dsv4_engine *engine;
static dsv4_session *session;

static void hex(const char *data, size_t size)
{
    for (size_t at = 0; at < size; at++)
        printf("%02x", (unsigned char)data[at]);
}

static void print_ids(const char *name, const int32_t *ids, size_t count)
{
    printf("fact\t%s\t", name);
    for (size_t at = 0; at < count; at++)
        printf("%s%d", at ? " " : "", ids[at]);
    printf("\n");
}

static void print_text(const char *name, const char *data, size_t size)
{
    printf("fact\t%s\t", name);
    hex(data, size);
    printf("\n");
}

static void print_numbers(const char *name, const double *numbers, size_t count)
{
    printf("fact\t%s\t", name);
    for (size_t at = 0; at < count; at++)
        printf("%s%a", at ? " " : "", numbers[at]);
    printf("\n");
}

static int on_event(void *user, const dsv4_event *event)
{
    (void)user;
    printf("%d:", event->kind);
    if (event->kind == DSV4_EVENT_TOOL_CALL) {
        printf("%d:", event->index);
        hex(event->id.data, event->id.size);
        printf(":");
        hex(event->name.data, event->name.size);
        printf(":");
        hex(event->arguments.data, event->arguments.size);
    } else {
        hex(event->text.data, event->text.size);
    }
    printf(" ");
    return 0;
}

static int32_t ids[4096];
static size_t count;

static void vocabulary(const char *text)
{
    static char back[4096];
    size_t size;
    MUST(dsv4_tokenize(engine, dsv4_str(text), 0, ids, 4096, &count));
    print_ids("tokens", ids, count);
    MUST(dsv4_detokenize(engine, ids, count, 0, back, sizeof back, &size));
    print_text("text", back, size);
    MUST(dsv4_token_bytes(engine, ids[0], back, sizeof back, &size));
    print_text("token_bytes", back, size);
}

/* Evaluate the text from its beginning: other chunks would round in other places. */
static void start(void)
{
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    MUST(dsv4_session_sync(session, ids, count, NULL, NULL));
}

static void probabilities(void)
{
    static float logits[1 << 17];
    int32_t best[9];
    double logprobs[9], nll[4096];
    size_t size;
    start();
    MUST(dsv4_session_logits(session, logits, 1 << 17, &size));
    print_text("logits", (const char *)logits, size * sizeof *logits);
    MUST(dsv4_session_top_logprobs(session, 9, best, logprobs));
    print_ids("best", best, 9);
    print_numbers("logprobs", logprobs, 9);
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    MUST(dsv4_session_sync(session, ids, 1, NULL, NULL));
    MUST(dsv4_session_score(session, ids + 1, count - 1, NULL, nll));
    print_numbers("nll", nll, count - 1);
}

/* The program's own loop, with a sampler that is saved and restored half-way. */
static void sampled(void)
{
    dsv4_sampling_options options;
    dsv4_sampler *sampler = NULL, *again = NULL;
    int32_t found[40];
    char state[4096];
    size_t size;
    MUST(dsv4_sampling_options_init(&options, sizeof options));
    options.seed = 42;
    options.temperature = 0.9;
    options.top_k = 40;
    options.top_p = 0.95;
    options.repetition_penalty = 1.1;
    options.bias = (dsv4_bias[]){{10, -1.5f}, {40, 2.0f}};
    options.bias_count = 2;
    dsv4_engine_info info = {.struct_size = sizeof info};
    MUST(dsv4_engine_get_info(engine, &info));
    MUST(dsv4_sampler_new(&options, info.vocab_size, &sampler));
    start();
    MUST(dsv4_sampler_observe(sampler, ids, count));
    for (int at = 0; at < 40; at++) {
        if (at == 20) {
            MUST(dsv4_sampler_save(sampler, state, sizeof state, &size));
            MUST(dsv4_sampler_restore(state, size, &again));
            MUST(dsv4_sampler_free(sampler));
            sampler = again;
        }
        MUST(dsv4_session_sample(session, sampler, &found[at]));
        MUST(dsv4_sampler_accept(sampler, &found[at], 1));
        MUST(dsv4_session_eval(session, &found[at], 1, NULL));
    }
    print_ids("sampled", found, 40);
}

static int on_token(void *user, int32_t token, dsv4_text piece)
{
    (void)piece;
    int32_t **next = user;
    *(*next)++ = token;
    return 0;
}

static void generated(void)
{
    int32_t found[64], *next = found;
    dsv4_sampling_options options = greedy(40);
    dsv4_result result = {.struct_size = sizeof result};
    options.temperature = 0.8;
    options.seed = 7;
    start();
    int32_t stop = 13;
    MUST(dsv4_session_generate(session, &options, &stop, 1, NULL, on_token, &next, &result));
    print_ids("generated", found, (size_t)(next - found));
    print_ids("generated_result", (int32_t[]){result.finish_reason, result.generated_tokens}, 2);
}

static void replies(const char *question, const char *tools)
{
    dsv4_message messages[3] = {message_of("user", question), message_of("assistant", "A fox is an animal."),
                                message_of("user", "Say more.")};
    static const char *const thinking[] = {"none", "high"};
    dsv4_prompt_options prompt;
    dsv4_result result = {.struct_size = sizeof result};
    dsv4_sampling_options options = greedy(48);
    char text[8192];
    size_t size;
    for (int mode = 0; mode < 2; mode++) {
        MUST(dsv4_prompt_options_init(&prompt, sizeof prompt));
        prompt.thinking = thinking[mode];
        prompt.tools_json = dsv4_str(mode ? "" : tools);
        MUST(dsv4_chat_render(engine, messages, 3, &prompt, text, sizeof text, &size));
        print_text(mode ? "prompt_high" : "prompt_none", text, size);
        MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
        printf("fact\t%s\t", mode ? "reply_high" : "reply_none");
        MUST(dsv4_session_reply(session, messages, 3, &prompt, &options, NULL, on_event, NULL, &result));
        printf("\n");
        int32_t counts[] = {result.finish_reason, result.prompt_tokens, result.reused_tokens,
                            result.generated_tokens};
        print_ids(mode ? "result_high" : "result_none", counts, 4);
    }
}

static void reply_to_json(const char *chat)
{
    dsv4_result result = {.struct_size = sizeof result};
    dsv4_sampling_options options = greedy(32);
    MUST(dsv4_session_sync(session, NULL, 0, NULL, NULL));
    printf("fact\treply_json\t");
    MUST(dsv4_session_reply_json(session, dsv4_str(chat), NULL, &options, NULL, on_event, NULL, &result));
    printf("\n");
    print_ids("result_json", (int32_t[]){result.finish_reason, result.prompt_tokens}, 2);
}

/* A reply with thinking, text and two tool calls, as tokens, one by one. */
static void tool_calls(const char *tools, const char *said)
{
    dsv4_message question = message_of("user", "Look at both.");
    dsv4_prompt_options prompt;
    dsv4_parser *parser = NULL;
    int32_t is_complete = 0;
    MUST(dsv4_prompt_options_init(&prompt, sizeof prompt));
    prompt.tools_json = dsv4_str(tools);
    MUST(dsv4_tokenize(engine, dsv4_str(said), 1, ids, 4096, &count));
    MUST(dsv4_parser_new(engine, &question, 1, &prompt, &parser));
    printf("fact\ttool_calls\t");
    for (size_t at = 0; at < count; at++)
        MUST(dsv4_parser_push(parser, ids + at, 1, on_event, NULL, &is_complete));
    MUST(dsv4_parser_finish(parser, on_event, NULL));
    printf("\n");
    print_ids("tool_calls_complete", &is_complete, 1);
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    engine = open_model(argv[1]);
    session = new_session(engine, 0);
    vocabulary(argv[2]);
    probabilities();
    sampled();
    generated();
    replies(argv[2], argv[3]);
    tool_calls(argv[3], argv[5]);
    reply_to_json(argv[4]);
    dsv4_session_info info = {.struct_size = sizeof info};
    MUST(dsv4_session_get_info(session, &info));
    print_numbers("bytes", (double[]){(double)info.bytes}, 1);
    return 0;
}

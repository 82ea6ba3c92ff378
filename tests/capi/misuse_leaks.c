/* The same again and again, with errors and stops between: memory does not grow. `misuse_leaks ROUNDS` */
#include "check.h"

#include <stdint.h>
#include <unistd.h>

static dsv4_engine *engine;
static dsv4_session *kept;

static long resident_kib(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*d %ld", &pages) != 1)
        exit(4);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static int stop_at_third(void *user, const dsv4_event *event)
{
    (void)event;
    return ++*(int *)user == 3;
}

/* One of everything that makes and frees. */
static void round_of(int number)
{
    static char state[1 << 20];
    static float logits[4096];
    char question[64];
    size_t size;
    int32_t token;
    int count = 0;
    dsv4_session *session = new_session(engine, 128);
    dsv4_call call = {.struct_size = sizeof call};
    dsv4_sampling_options options = greedy(4);
    dsv4_sampler *sampler = NULL, *restored = NULL;
    dsv4_parser *parser = NULL;
    snprintf(question, sizeof question, "What is %d + 7?", number % 90);
    dsv4_message message = message_of("user", question);
    MUST(dsv4_cancel_new(&call.cancel));
    MUST(dsv4_session_reply(kept, &message, 1, NULL, &options, &call, stop_at_third, &count, NULL));
    MUST(dsv4_session_reply(session, &message, 1, NULL, &options, &call, NULL, NULL, NULL));
    MUST(dsv4_cancel_trigger(call.cancel));
    EXPECT("leak.cancelled", dsv4_session_eval(session, &(int32_t){5}, 1, &call), DSV4_ERR_CANCELLED);
    MUST(dsv4_cancel_free(call.cancel));
    EXPECT("leak.refused", dsv4_session_eval(session, &(int32_t){-5}, 1, NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("leak.not_found", dsv4_session_load(session, "/nowhere/at all", NULL), DSV4_ERR_NOT_FOUND);
    MUST(dsv4_session_save_memory(session, NULL, state, sizeof state, &size));
    MUST(dsv4_session_load_memory(session, state, size, NULL));
    state[size / 2] ^= 1;
    EXPECT("leak.damaged", dsv4_session_load_memory(session, state, size, NULL), DSV4_ERR_CHECKSUM);
    MUST(dsv4_sampler_new(&options, 4096, &sampler));
    MUST(dsv4_session_logits(session, logits, 4096, &size));
    MUST(dsv4_sampler_sample(sampler, logits, size, &token));
    MUST(dsv4_sampler_accept(sampler, &token, 1));
    MUST(dsv4_sampler_save(sampler, state, sizeof state, &size));
    MUST(dsv4_sampler_restore(state, size, &restored));
    MUST(dsv4_sampler_free(sampler) | dsv4_sampler_free(restored));
    MUST(dsv4_parser_new(engine, &message, 1, NULL, &parser));
    MUST(dsv4_parser_push(parser, &token, 1, NULL, NULL, NULL));
    MUST(dsv4_parser_free(parser));
    MUST(dsv4_session_free(session));
    if (number % 10 == 0) {
        dsv4_engine *other = NULL;
        dsv4_engine_options small;
        MUST(dsv4_engine_options_init(&small, sizeof small));
        small.context = 64;
        MUST(dsv4_engine_open("pocket-v4", &small, NULL, &other));
        MUST(dsv4_engine_close(other));
    }
}

int main(int count, char **arguments)
{
    int rounds = count > 1 ? atoi(arguments[1]) : 200, warm_up = rounds / 3;
    long before = 0, after;
    char text[32];
    engine = open_model("pocket-v4");
    kept = new_session(engine, 512);
    for (int number = 0; number < rounds; number++) {
        round_of(number);
        if (number == warm_up)
            before = resident_kib();
    }
    after = resident_kib();
    snprintf(text, sizeof text, "%ld", after - before);
    fact("leak.kib", text);
    /* Of one round alone, a session would be 800 KiB and a state as much. */
    CHECK("leak.memory_is_flat", after - before < 4096);
    MUST(dsv4_session_free(kept) | dsv4_engine_close(engine));
    return 0;
}

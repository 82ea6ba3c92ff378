/* Opens and closes a model, makes and frees sessions, many times, and says what that left in memory. */
#include "check.h"

#include <unistd.h>

/* Resident bytes of this process. */
static long resident(void)
{
    long pages = 0, all = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &all, &pages) != 2)
        exit(4);
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

static void number(const char *name, long value)
{
    char text[32];
    snprintf(text, sizeof text, "%ld", value);
    fact(name, text);
}

static void opens(const char *model, int count)
{
    for (int done = 0; done < count; done++)
        MUST(dsv4_engine_close(open_model(model)));
}

static void sessions(dsv4_engine *engine, int count)
{
    static const int32_t ids[2] = {10, 20};
    for (int done = 0; done < count; done++) {
        dsv4_session *session = new_session(engine, 64);
        if (done % 16 == 0)
            MUST(dsv4_session_sync(session, ids, 2, NULL, NULL));
        MUST(dsv4_session_free(session));
    }
}

/* Everything else that is made and freed, and errors. */
static void others(dsv4_engine *engine, int count)
{
    dsv4_message message = message_of("user", "Hi");
    for (int done = 0; done < count; done++) {
        dsv4_parser *parser = NULL;
        dsv4_sampler *sampler = NULL;
        dsv4_cancel *cancel = NULL;
        MUST(dsv4_parser_new(engine, &message, 1, NULL, &parser));
        MUST(dsv4_sampler_new(NULL, 384, &sampler));
        MUST(dsv4_cancel_new(&cancel));
        MUST(dsv4_parser_free(parser));
        MUST(dsv4_sampler_free(sampler));
        MUST(dsv4_cancel_free(cancel));
        if (dsv4_parser_free(parser) != DSV4_ERR_INVALID_ARGUMENT)
            exit(5);
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    int engines = atoi(argv[2]), made = atoi(argv[3]);
    opens(argv[1], 30);
    long before = resident();
    opens(argv[1], engines);
    number("engines", resident() - before);
    dsv4_engine *engine = open_model(argv[1]);
    sessions(engine, 500);
    before = resident();
    sessions(engine, made);
    number("sessions", resident() - before);
    others(engine, 500);
    before = resident();
    others(engine, made / 4);
    number("others", resident() - before);
    return 0;
}

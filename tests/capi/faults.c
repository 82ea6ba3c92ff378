/* Failures that no program can provoke on a sound machine; the Python behind the library is told to fail. */
#include "check.h"

static const int32_t ids[2] = {10, 20};

static char logged[4096];
static int32_t level_of_log;

static void on_log(void *user, int32_t level, const char *text)
{
    (void)user;
    level_of_log = level;
    snprintf(logged, sizeof logged, "%s", text);
}

int main(int argc, char **argv)
{
    (void)argc;
    size_t size;
    dsv4_session *other = NULL;
    EXPECT("init.takes_another_python", dsv4_init(DSV4_ABI_VERSION, argv[2]), DSV4_OK);
    dsv4_engine *engine = open_model(argv[1]);
    dsv4_session *session = new_session(engine, 0);
    EXPECT("DEVICE_LOST", dsv4_session_mark_turn(session), DSV4_ERR_DEVICE_LOST);
    CHECK("DEVICE_LOST.text", error_has("stopped answering"));
    EXPECT("DEVICE_MEMORY", dsv4_session_new(engine, 4097, &other), DSV4_ERR_DEVICE_MEMORY);
    CHECK("DEVICE_MEMORY.out", other == NULL && error_has("CUDA out of memory"));
    EXPECT("OUT_OF_MEMORY.host", dsv4_engine_memory_json(engine, NULL, 0, &size), DSV4_ERR_OUT_OF_MEMORY);
    EXPECT("NUMERIC", dsv4_session_eval(session, ids, 2, NULL), DSV4_ERR_NUMERIC);
    CHECK("NUMERIC.text", error_has("NaN in layer 3"));
    MUST(dsv4_set_log(on_log, NULL, 40));
    EXPECT("INTERNAL", dsv4_session_rewind(session, 0, NULL, NULL), DSV4_ERR_INTERNAL);
    CHECK("INTERNAL.text", error_has("ZeroDivisionError") && error_has("a defect"));
    CHECK("INTERNAL.function", strcmp(last_error().function, "dsv4_session_rewind") == 0);
    CHECK("INTERNAL.is_logged", level_of_log == 40 && strstr(logged, "dsv4_session_rewind failed") != NULL);
    CHECK("INTERNAL.is_logged_with_its_trace", strstr(logged, "Traceback") && strstr(logged, "in divide"));
    MUST(dsv4_set_log(NULL, NULL, 0));
    level_of_log = 0;
    dsv4_session_rewind(session, 0, NULL, NULL);
    CHECK("log.is_off", level_of_log == 0);
    EXPECT("IO", dsv4_session_sync(session, ids, 2, NULL, NULL), DSV4_ERR_IO);
    CHECK("IO.text", error_has("expert 7"));
    EXPECT("NO_SPACE", dsv4_session_save(session, "/tmp/full.dsv4s", NULL), DSV4_ERR_NO_SPACE);
    CHECK("NO_SPACE.path", strcmp(last_error().path, "/tmp/full.dsv4s") == 0);
    EXPECT("session.is_alive", dsv4_session_free(session), DSV4_OK);
    return 0;
}

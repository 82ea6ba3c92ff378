/* Failures that no program can provoke on a sound machine; the Python behind the library is told to fail. */
#include "check.h"

static const int32_t ids[2] = {10, 20};

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
    EXPECT("INTERNAL", dsv4_session_rewind(session, 0, NULL, NULL), DSV4_ERR_INTERNAL);
    CHECK("INTERNAL.text", error_has("ZeroDivisionError") && error_has("a defect"));
    CHECK("INTERNAL.function", strcmp(last_error().function, "dsv4_session_rewind") == 0);
    EXPECT("IO", dsv4_session_sync(session, ids, 2, NULL, NULL), DSV4_ERR_IO);
    CHECK("IO.text", error_has("expert 7"));
    EXPECT("NO_SPACE", dsv4_session_save(session, "/tmp/full.dsv4s", NULL), DSV4_ERR_NO_SPACE);
    CHECK("NO_SPACE.path", strcmp(last_error().path, "/tmp/full.dsv4s") == 0);
    EXPECT("session.is_alive", dsv4_session_free(session), DSV4_OK);
    return 0;
}

/* Opens a model, asks it something and ends with the first event: what a C program waits for at its start. */
#include "dsv4.h"

static int stop(void *user, const dsv4_event *event)
{
    *(int *)user += event->text.size > 0;
    return 1;
}

int main(int argc, char **argv)
{
    dsv4_engine *engine = 0;
    dsv4_session *session = 0;
    int events = 0;
    dsv4_message message = {0};
    dsv4_sampling_options options;
    message.struct_size = sizeof message;
    message.role = dsv4_str("user");
    message.content = dsv4_str("Hi");
    if (dsv4_sampling_options_init(&options, sizeof options))
        return 1;
    options.temperature = 0;
    if (argc < 2 || dsv4_engine_open(argv[1], 0, 0, &engine) || dsv4_session_new(engine, 0, &session))
        return 1;
    if (dsv4_session_reply(session, &message, 1, 0, &options, 0, stop, &events, 0) || !events)
        return 2;
    return 0;
}

/* Calls of the library's table for a measurement inside a Python process, with callbacks that only count. */
#include "dsv4.h"
#include "table.h"

static int count_token(void *user, int32_t token, dsv4_text piece)
{
    *(int64_t *)user += token >= 0 && piece.size < 1024;
    return 0;
}

static int count_event(void *user, const dsv4_event *event)
{
    *(int64_t *)user += event->kind > 0;
    return 0;
}

/* Tokens that a session generates, or a negative status. */
int64_t run_tokens(const dsv4_table *table, dsv4_session *session, int32_t max_tokens)
{
    int64_t count = 0;
    dsv4_sampling_options options;
    int32_t status = table->sampling_options_init(&options, sizeof options);
    options.temperature = 0;
    options.max_tokens = max_tokens;
    if (!status)
        status = table->session_generate(session, &options, 0, 0, 0, count_token, &count, 0);
    return status ? status : count;
}

/* Events of a reply, or a negative status. */
int64_t run_events(const dsv4_table *table, dsv4_session *session)
{
    int64_t count = 0;
    dsv4_message message = {0};
    message.struct_size = sizeof message;
    message.role = dsv4_str("user");
    message.content = dsv4_str("Hi");
    int32_t status = table->session_reply(session, &message, 1, 0, 0, 0, count_event, &count, 0);
    return status ? status : count;
}

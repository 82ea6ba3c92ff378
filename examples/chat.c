/* Talk to a model: each line of stdin is a question, Ctrl+C stops the reply, Ctrl+D ends.
 *     ./chat pocket-v4 [TEMPERATURE]      or the path of a GGUF file; 0 always takes the likeliest words */
#include <dsv4.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_MESSAGES = 1000, LINE_SIZE = 16384 };

static dsv4_cancel *stop;

static void on_sigint(int number)
{
    dsv4_cancel_trigger(stop);
    signal(number, on_sigint);
}

/* Make a text of ours longer: an empty one, or one from here. */
static int append(dsv4_text *to, const char *data, size_t size)
{
    char *longer = realloc((void *)to->data, to->size + size + 1);
    if (!longer)
        return -1; /* no memory */
    memcpy(longer + to->size, data, size);
    to->data = longer;
    to->size += size;
    return 0;
}

/* Show what comes, the thinking dimmed, and keep the answer for the next turn. */
static int on_event(void *answer, const dsv4_event *event)
{
    static int was_thinking;
    int is_thinking = event->kind == DSV4_EVENT_THINKING;
    fputs(was_thinking > is_thinking ? "\n" : "", stdout);
    was_thinking = is_thinking;
    printf(is_thinking ? "\033[2m%.*s\033[0m" : "%.*s", (int)event->text.size, event->text.data);
    return event->kind == DSV4_EVENT_TEXT ? append(answer, event->text.data, event->text.size) : 0;
}

static int talk(dsv4_session *session, const dsv4_sampling_options *options)
{
    static char line[LINE_SIZE];
    static dsv4_message messages[MAX_MESSAGES];
    dsv4_call call = {.struct_size = sizeof call, .cancel = stop};
    for (size_t count = 0; count + 2 <= MAX_MESSAGES && fgets(line, sizeof line, stdin); count += 2) {
        dsv4_message *question = &messages[count], *answer = question + 1;
        *question = (dsv4_message){.struct_size = sizeof *question, .role = dsv4_str("user")};
        *answer = (dsv4_message){.struct_size = sizeof *answer, .role = dsv4_str("assistant")};
        if (append(&question->content, line, strcspn(line, "\n")))
            return -1;
        dsv4_cancel_reset(stop);
        int32_t status = dsv4_session_reply(session, messages, count + 1, NULL, options, &call, on_event,
                                            &answer->content, NULL);
        if (status && status != DSV4_ERR_CANCELLED)
            return status;
        puts(status ? " (stopped)" : "");
    }
    return 0;
}

int main(int count, char **arguments)
{
    dsv4_engine *engine = NULL;
    dsv4_session *session = NULL;
    dsv4_sampling_options options;
    char rest;
    setvbuf(stdout, NULL, _IONBF, 0);
    int is_failed = dsv4_sampling_options_init(&options, sizeof options);
    if (count > 2 && sscanf(arguments[2], "%lf%c", &options.temperature, &rest) != 1)
        return fprintf(stderr, "%s is no temperature\n", arguments[2]), 1;
    is_failed = is_failed || dsv4_cancel_new(&stop) || signal(SIGINT, on_sigint) == SIG_ERR ||
                dsv4_engine_open(count > 1 ? arguments[1] : "pocket-v4", NULL, NULL, &engine) ||
                dsv4_session_new(engine, 0, &session) || talk(session, &options);
    if (is_failed)
        fprintf(stderr, "%s\n", dsv4_last_error());
    dsv4_session_free(session);
    dsv4_engine_close(engine);
    return is_failed;
}

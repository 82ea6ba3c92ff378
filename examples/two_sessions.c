/* One engine, two sessions, two threads: each answers its own question while the other does the same.
 *     ./two_sessions pocket-v4 "Who are you?" "What is the capital of Peru?" */
#include <dsv4.h>
#include <pthread.h>
#include <stdio.h>

/* What one thread works on. */
typedef struct task {
    dsv4_engine *engine;
    const char *question;
    char answer[65536];
    size_t size;
    int32_t status;
    char error[1024]; /* dsv4_last_error() belongs to the thread that failed */
} task;

static int on_event(void *user, const dsv4_event *event)
{
    task *own = user;
    if (event->kind != DSV4_EVENT_TEXT)
        return 0;
    if (event->text.size > sizeof own->answer - own->size)
        return 1; /* full: stop the reply */
    memcpy(own->answer + own->size, event->text.data, event->text.size);
    own->size += event->text.size;
    return 0;
}

static int32_t answer(task *own, dsv4_session *session)
{
    dsv4_message message = {.struct_size = sizeof message, .role = dsv4_str("user")};
    message.content = dsv4_str(own->question);
    dsv4_sampling_options options;
    int32_t status = dsv4_sampling_options_init(&options, sizeof options);
    options.temperature = 0; /* the same words each time */
    return status ? status
                  : dsv4_session_reply(session, &message, 1, NULL, &options, NULL, on_event, own, NULL);
}

static void *run(void *user)
{
    task *own = user;
    dsv4_session *session = NULL;
    own->status = dsv4_session_new(own->engine, 4096, &session);
    if (!own->status)
        own->status = answer(own, session);
    if (own->status)
        snprintf(own->error, sizeof own->error, "%s", dsv4_last_error());
    dsv4_session_free(session);
    return NULL;
}

int main(int count, char **arguments)
{
    static task tasks[2];
    pthread_t threads[2];
    dsv4_engine *engine = NULL;
    int is_failed = 0;
    if (dsv4_engine_open(count > 1 ? arguments[1] : "pocket-v4", NULL, NULL, &engine))
        return fprintf(stderr, "%s\n", dsv4_last_error()), 1;
    for (int i = 0; i < 2; i++) {
        tasks[i].engine = engine;
        tasks[i].question = count > i + 2 ? arguments[i + 2] : "Who are you?";
        if (pthread_create(&threads[i], NULL, run, &tasks[i]))
            return fprintf(stderr, "no thread\n"), 1;
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        is_failed |= tasks[i].status != DSV4_OK;
        printf("%s\n%.*s\n", tasks[i].question, (int)tasks[i].size, tasks[i].answer);
        if (tasks[i].status)
            fprintf(stderr, "%s\n", tasks[i].error);
    }
    dsv4_engine_close(engine);
    return is_failed;
}

/* A host that loads libdsv4 while it runs, and sees none of its symbols otherwise.
 *     loader reply|reopen LIBRARY      loader two LIBRARY COPY */
#define _GNU_SOURCE
#include "dsv4.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* The functions this host uses. */
typedef struct functions {
    __typeof__(dsv4_last_error) *last_error;
    __typeof__(dsv4_devices_json) *devices_json;
    __typeof__(dsv4_engine_open) *engine_open;
    __typeof__(dsv4_session_new) *session_new;
    __typeof__(dsv4_sampling_options_init) *sampling_options_init;
    __typeof__(dsv4_session_reply) *session_reply;
} functions;

static void *find(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        fprintf(stderr, "%s\n", dlerror()), exit(3);
    return found;
}

static void *load(const char *path, functions *f)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "%s\n", dlerror()), exit(3);
    *(void **)&f->last_error = find(library, "dsv4_last_error");
    *(void **)&f->devices_json = find(library, "dsv4_devices_json");
    *(void **)&f->engine_open = find(library, "dsv4_engine_open");
    *(void **)&f->session_new = find(library, "dsv4_session_new");
    *(void **)&f->sampling_options_init = find(library, "dsv4_sampling_options_init");
    *(void **)&f->session_reply = find(library, "dsv4_session_reply");
    return library;
}

static int on_event(void *user, const dsv4_event *event)
{
    (void)user;
    if (event->kind == DSV4_EVENT_TEXT)
        printf("%.*s", (int)event->text.size, event->text.data);
    return 0;
}

static int reply(const functions *f)
{
    dsv4_engine *engine;
    dsv4_session *session;
    dsv4_message message = {.struct_size = sizeof message, .role = dsv4_str("user")};
    message.content = dsv4_str("What is the capital of Peru?");
    dsv4_sampling_options options;
    int is_failed = f->sampling_options_init(&options, sizeof options);
    options.temperature = 0; /* the test compares the answer */
    is_failed = is_failed || f->engine_open("pocket-v4", NULL, NULL, &engine) ||
                f->session_new(engine, 0, &session) ||
                f->session_reply(session, &message, 1, NULL, &options, NULL, on_event, NULL, NULL);
    if (is_failed)
        fprintf(stderr, "%s\n", f->last_error());
    return is_failed;
}

int main(int count, char **arguments)
{
    functions f, other;
    size_t size = 0;
    if (count < 3)
        return 2;
    void *library = load(arguments[2], &f);
    if (!strcmp(arguments[1], "reopen")) {
        if (f.devices_json(NULL, 0, &size) || dlclose(library))
            return 1;
        load(arguments[2], &f);
    }
    if (!strcmp(arguments[1], "two") && count > 3) {
        load(arguments[3], &other);
        int32_t first = f.devices_json(NULL, 0, &size), second = other.devices_json(NULL, 0, &size);
        printf("%d %d %s\n", first, second, other.last_error());
        return 0;
    }
    return reply(&f);
}

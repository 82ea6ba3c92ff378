/* Checks of a test program: each prints one line that a Python test reads. */
#ifndef DSV4_CHECK_H
#define DSV4_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dsv4.h"

/* What is true, under a name. */
#define CHECK(name, condition) check_line((name), (condition) != 0, #condition, __LINE__)

/* The status of a call, under a name. */
#define EXPECT(name, call, status) check_status((name), (call), (status), #call, __LINE__)

/* A call that only prepares; the program ends when it fails. */
#define MUST(call) check_must((call), #call, __LINE__)

static inline void check_line(const char *name, int is_right, const char *what, int line)
{
    if (is_right)
        printf("ok\t%s\n", name);
    else
        printf("FAILED\t%s\tline %d: %s; last error: %s\n", name, line, what, dsv4_last_error());
    fflush(stdout);
}

static inline void check_status(const char *name, int32_t found, int32_t expected, const char *what, int line)
{
    if (found == expected)
        printf("ok\t%s\n", name);
    else
        printf("FAILED\t%s\tline %d: %s gave %s, expected %s; last error: %s\n", name, line, what,
               dsv4_status_name(found), dsv4_status_name(expected), dsv4_last_error());
    fflush(stdout);
}

static inline void check_must(int32_t status, const char *what, int line)
{
    if (status == DSV4_OK)
        return;
    fprintf(stderr, "line %d: %s gave %s: %s\n", line, what, dsv4_status_name(status), dsv4_last_error());
    exit(3);
}

/* A value for the Python test. */
static inline void fact(const char *name, const char *value)
{
    printf("fact\t%s\t%s\n", name, value);
}

/* Details of the last error of this thread. */
static inline dsv4_error_info last_error(void)
{
    dsv4_error_info info;
    info.struct_size = sizeof info;
    dsv4_last_error_info(&info);
    return info;
}

static inline int error_has(const char *part)
{
    return strstr(dsv4_last_error(), part) != NULL;
}

static inline dsv4_engine *open_model(const char *path)
{
    dsv4_engine *engine = NULL;
    dsv4_engine_options options;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.context = 4096;
    MUST(dsv4_engine_open(path, &options, NULL, &engine));
    return engine;
}

static inline dsv4_session *new_session(dsv4_engine *engine, int32_t context)
{
    dsv4_session *session = NULL;
    MUST(dsv4_session_new(engine, context, &session));
    return session;
}

static inline dsv4_message message_of(const char *role, const char *content)
{
    dsv4_message message;
    memset(&message, 0, sizeof message);
    message.struct_size = sizeof message;
    message.role = dsv4_str(role);
    message.content = dsv4_str(content);
    return message;
}

/* Sampling that always gives the same text. */
static inline dsv4_sampling_options greedy(int32_t tokens)
{
    dsv4_sampling_options options;
    MUST(dsv4_sampling_options_init(&options, sizeof options));
    options.temperature = 0;
    options.max_tokens = tokens;
    return options;
}

#endif

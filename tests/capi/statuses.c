/* Every status that a program can provoke by itself, once, with its text and its details. */
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *model, *folder;
static dsv4_engine *engine;
static dsv4_session *session;
static const int32_t ids[4] = {10, 20, 30, 40};

/* Declared by unistd.h for programs that ask for more than POSIX. */
extern long syscall(long number, ...);

/* The disk is full from now on: the program's own `write` stands before that of the C library. */
static int is_disk_full;

ssize_t write(int file, const void *data, size_t size)
{
    if (is_disk_full && file > 2) {
        errno = ENOSPC;
        return -1;
    }
    return (ssize_t)syscall(SYS_write, file, data, size);
}

static const char *in_folder(const char *name)
{
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static int32_t open_file(const char *path)
{
    dsv4_engine *opened = NULL;
    int32_t status = dsv4_engine_open(path, NULL, NULL, &opened);
    CHECK("outputs.stay_null_on_failure", opened == NULL);
    return status;
}

static int names(const char *path, const char *name)
{
    dsv4_error_info info = last_error();
    return strcmp(info.path, path) == 0 && strcmp(info.name, name) == 0 && info.text[0];
}

static void arguments(void)
{
    dsv4_engine_options options;
    dsv4_engine *opened = NULL;
    CHECK("before.no_error", last_error().status == DSV4_OK && dsv4_last_error()[0] == 0);
    CHECK("before.no_details", last_error().offset == -1 && last_error().needed == -1);
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.threads = 4096;
    EXPECT("INVALID_ARGUMENT.option", dsv4_engine_open(model, &options, NULL, &opened), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("INVALID_ARGUMENT.names_it", names("", "threads") && error_has("1..1024") && error_has("4096"));
    CHECK("INVALID_ARGUMENT.function", strcmp(last_error().function, "dsv4_engine_open") == 0);
    options.struct_size = 3;
    EXPECT("ABI.struct", dsv4_engine_open(model, &options, NULL, &opened), DSV4_ERR_ABI);
    CHECK("ABI.text", error_has("dsv4_engine_options") && error_has("found 3"));
    CHECK("last_error.stays_after_success", dsv4_engine_options_init(&options, sizeof options) == DSV4_OK &&
                                                last_error().status == DSV4_ERR_ABI);
}

static void broken_files(void)
{
    size_t size;
    EXPECT("NOT_FOUND.model", open_file(in_folder("none.gguf")), DSV4_ERR_NOT_FOUND);
    CHECK("NOT_FOUND.path", names(in_folder("none.gguf"), ""));
    EXPECT("NOT_FOUND.inspect", dsv4_inspect_json("no-such-model", NULL, 0, &size), DSV4_ERR_NOT_FOUND);
    EXPECT("FORMAT.model", open_file(in_folder("page.gguf")), DSV4_ERR_FORMAT);
    CHECK("FORMAT.path", names(in_folder("page.gguf"), "") && error_has("GGUF"));
    EXPECT("FORMAT.directory_of_nothing", open_file(folder), DSV4_ERR_NOT_FOUND);
    EXPECT("TRUNCATED.header", open_file(in_folder("cut.gguf")), DSV4_ERR_TRUNCATED);
    CHECK("TRUNCATED.offset", names(in_folder("cut.gguf"), "") && last_error().offset > 0);
    EXPECT("TRUNCATED.data", open_file(in_folder("short.gguf")), DSV4_ERR_TRUNCATED);
    EXPECT("TRUNCATED.plan", dsv4_plan_json(in_folder("short.gguf"), NULL, NULL, 0, &size), DSV4_ERR_TRUNCATED);
    EXPECT("UNSUPPORTED.model", open_file(in_folder("llama.gguf")), DSV4_ERR_UNSUPPORTED);
    CHECK("UNSUPPORTED.path", names(in_folder("llama.gguf"), "") && error_has("llama"));
    EXPECT("IO.model", open_file("/proc/self/mem/x"), DSV4_ERR_IO);
}

static void options_that_cannot_run(void)
{
    dsv4_engine_options options;
    dsv4_engine *opened = NULL;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.backend = "triton";
    EXPECT("UNSUPPORTED.backend", dsv4_engine_open(model, &options, NULL, &opened), DSV4_ERR_UNSUPPORTED);
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.ram_bytes = 1 << 20;
    EXPECT("OUT_OF_MEMORY.open", dsv4_engine_open(model, &options, NULL, &opened), DSV4_ERR_OUT_OF_MEMORY);
    CHECK("OUT_OF_MEMORY.numbers", last_error().needed > last_error().available && last_error().available > 0);
}

static void sessions(void)
{
    int32_t few[2], many[65] = {0};
    size_t count;
    dsv4_session *small = new_session(engine, 64);
    EXPECT("CONTEXT_FULL.sync", dsv4_session_sync(small, many, 65, NULL, NULL), DSV4_ERR_CONTEXT_FULL);
    CHECK("CONTEXT_FULL.numbers", last_error().needed == 65 && last_error().available == 64);
    EXPECT("CONTEXT_FULL.score", dsv4_session_eval(small, many, 65, NULL), DSV4_ERR_CONTEXT_FULL);
    EXPECT("BUSY.engine", dsv4_engine_close(engine), DSV4_ERR_BUSY);
    CHECK("BUSY.text", error_has("session"));
    EXPECT("BUFFER.tokens", dsv4_session_tokens(session, few, 2, &count), DSV4_ERR_BUFFER);
    CHECK("BUFFER.length", count == 4 && last_error().needed == 4 && last_error().available == 2);
    CHECK("BUFFER.name", names("", "tokens"));
    EXPECT("INVALID_ARGUMENT.rewind", dsv4_session_rewind(session, 5, NULL, NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("INVALID_ARGUMENT.id", dsv4_session_eval(session, &(int32_t){-1}, 1, NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("INVALID_ARGUMENT.context", dsv4_session_new(engine, -5, &(dsv4_session *){NULL}),
           DSV4_ERR_INVALID_ARGUMENT);
    MUST(dsv4_session_free(small));
}

static void cancelled(void)
{
    dsv4_call call = {.struct_size = sizeof call};
    MUST(dsv4_cancel_new(&call.cancel));
    MUST(dsv4_cancel_trigger(call.cancel));
    EXPECT("CANCELLED.eval", dsv4_session_eval(session, ids, 2, &call), DSV4_ERR_CANCELLED);
    CHECK("CANCELLED.text", error_has("cancel"));
    EXPECT("CANCELLED.not_after_reset",
           dsv4_cancel_reset(call.cancel) || dsv4_session_eval(session, ids, 2, &call), DSV4_OK);
    MUST(dsv4_session_sync(session, ids, 4, NULL, NULL));
    MUST(dsv4_cancel_free(call.cancel));
    EXPECT("INVALID_ARGUMENT.dead_cancel", dsv4_session_eval(session, ids, 1, &call), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("INVALID_ARGUMENT.dead_cancel_name", names("", "call.cancel"));
}

static void sampler(void)
{
    dsv4_sampler *chosen = NULL, *other = NULL;
    float logits[8] = {0, 1, NAN, 3, 4, 5, 6, 7};
    char state[4096];
    size_t size;
    int32_t token;
    MUST(dsv4_sampler_new(NULL, 8, &chosen));
    EXPECT("NUMERIC.logits", dsv4_sampler_sample(chosen, logits, 8, &token), DSV4_ERR_NUMERIC);
    CHECK("NUMERIC.text", error_has("token 2 is nan"));
    logits[2] = INFINITY;
    EXPECT("NUMERIC.infinity", dsv4_sampler_sample(chosen, logits, 8, &token), DSV4_ERR_NUMERIC);
    for (int at = 0; at < 8; at++)
        logits[at] = -INFINITY;
    EXPECT("NUMERIC.nothing_left", dsv4_sampler_sample(chosen, logits, 8, &token), DSV4_ERR_NUMERIC);
    EXPECT("INVALID_ARGUMENT.vocabulary", dsv4_sampler_sample(chosen, logits, 7, &token), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("INVALID_ARGUMENT.accepted_id", dsv4_sampler_accept(chosen, &(int32_t){8}, 1), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("INVALID_ARGUMENT.observed_id", dsv4_sampler_observe(chosen, &(int32_t){-1}, 1),
           DSV4_ERR_INVALID_ARGUMENT);
    MUST(dsv4_sampler_save(chosen, state, sizeof state, &size));
    EXPECT("TRUNCATED.sampler", dsv4_sampler_restore(state, size - 1, &other), DSV4_ERR_TRUNCATED);
    EXPECT("TRUNCATED.sampler_head", dsv4_sampler_restore(state, 9, &other), DSV4_ERR_TRUNCATED);
    EXPECT("TRUNCATED.sampler_of_nothing", dsv4_sampler_restore(state, 0, &other), DSV4_ERR_TRUNCATED);
    EXPECT("FORMAT.sampler", dsv4_sampler_restore("something else, and long enough for a head of a file", 50, &other),
           DSV4_ERR_FORMAT);
    state[size - 2] ^= 1;
    EXPECT("CHECKSUM.sampler", dsv4_sampler_restore(state, size, &other), DSV4_ERR_CHECKSUM);
    CHECK("CHECKSUM.text", error_has("checksum"));
    state[size - 2] ^= 1;
    EXPECT("sampler.is_whole_again", dsv4_sampler_restore(state, size, &other), DSV4_OK);
}

/* Change one byte of a file. */
static void flip(const char *path, long offset, int from)
{
    FILE *file = fopen(path, "r+b");
    fseek(file, offset, from);
    int byte = fgetc(file);
    fseek(file, offset, from);
    fputc(byte ^ 1, file);
    fclose(file);
}

static void saved_sessions(void)
{
    const char *path = in_folder("talk.dsv4s");
    dsv4_engine *other = open_model("random-tiny");
    dsv4_session *elsewhere = new_session(other, 64), *small = new_session(engine, 3);
    struct stat before;
    size_t size;
    MUST(dsv4_session_save(session, path, NULL));
    EXPECT("MISMATCH.model", dsv4_session_load(elsewhere, path, NULL), DSV4_ERR_MISMATCH);
    CHECK("MISMATCH.path", names(path, ""));
    EXPECT("CONTEXT_FULL.load", dsv4_session_load(small, path, NULL), DSV4_ERR_CONTEXT_FULL);
    EXPECT("NOT_FOUND.load", dsv4_session_load(session, in_folder("no.dsv4s"), NULL), DSV4_ERR_NOT_FOUND);
    EXPECT("NOT_FOUND.save", dsv4_session_save(session, "/proc/self/talk.dsv4s", NULL), DSV4_ERR_NOT_FOUND);
    EXPECT("INVALID_ARGUMENT.save_to_a_folder", dsv4_session_save(session, folder, NULL),
           DSV4_ERR_INVALID_ARGUMENT);
    is_disk_full = 1;
    EXPECT("NO_SPACE.save", dsv4_session_save(session, path, NULL), DSV4_ERR_NO_SPACE);
    is_disk_full = 0;
    CHECK("NO_SPACE.path", names(path, ""));
    EXPECT("NO_SPACE.old_file_is_intact", dsv4_session_load(session, path, NULL), DSV4_OK);
    flip(path, -1, SEEK_END);
    EXPECT("CHECKSUM.load", dsv4_session_load(session, path, NULL), DSV4_ERR_CHECKSUM);
    CHECK("CHECKSUM.path", names(path, ""));
    EXPECT("CHECKSUM.inspect_reads_the_header_alone", dsv4_snapshot_inspect_json(path, NULL, 0, &size), DSV4_OK);
    stat(path, &before);
    CHECK("load.never_changes_the_file", before.st_size > 0);
    if (truncate(path, before.st_size - 1))
        exit(4);
    EXPECT("TRUNCATED.load", dsv4_session_load(session, path, NULL), DSV4_ERR_TRUNCATED);
    EXPECT("TRUNCATED.inspect", dsv4_snapshot_inspect_json(path, NULL, 0, &size), DSV4_ERR_TRUNCATED);
    flip(path, 0, SEEK_SET);
    EXPECT("FORMAT.load", dsv4_session_load(session, path, NULL), DSV4_ERR_FORMAT);
    dsv4_session_info info = {.struct_size = sizeof info};
    MUST(dsv4_session_get_info(session, &info));
    CHECK("load.failures_leave_the_session", info.length == 4);
    MUST(dsv4_session_free(elsewhere));
    MUST(dsv4_engine_close(other));
    MUST(dsv4_session_free(small));
}

/* The system refuses a file beyond a size; the signal for it is ignored as in Python. */
static void file_size_limit(void)
{
    struct rlimit old, tiny;
    getrlimit(RLIMIT_FSIZE, &old);
    tiny = old;
    tiny.rlim_cur = 512;
    setrlimit(RLIMIT_FSIZE, &tiny);
    int32_t status = dsv4_session_save(session, in_folder("limited.dsv4s"), NULL);
    setrlimit(RLIMIT_FSIZE, &old);
    EXPECT("NO_SPACE.size_limit", status, DSV4_ERR_NO_SPACE);
    int left = 0;
    DIR *listing = opendir(folder);
    for (struct dirent *entry; (entry = readdir(listing));)
        left += strstr(entry->d_name, ".partial") != NULL;
    closedir(listing);
    CHECK("NO_SPACE.nothing_is_left", left == 0);
}

static void cancel_objects(void)
{
    enum { MOST = 4096 };
    static dsv4_cancel *all[MOST];
    dsv4_cancel *one_more = NULL;
    int made = 0;
    while (made < MOST && dsv4_cancel_new(&all[made]) == DSV4_OK)
        made++;
    EXPECT("OUT_OF_MEMORY.cancel", dsv4_cancel_new(&one_more), DSV4_ERR_OUT_OF_MEMORY);
    CHECK("OUT_OF_MEMORY.cancel_text", made == MOST && one_more == NULL && error_has("4,096"));
    while (made)
        MUST(dsv4_cancel_free(all[--made]));
    EXPECT("OUT_OF_MEMORY.room_again", dsv4_cancel_new(&one_more), DSV4_OK);
    EXPECT("INVALID_ARGUMENT.cancel", dsv4_cancel_free(all[0]), DSV4_ERR_INVALID_ARGUMENT);
    CHECK("INVALID_ARGUMENT.cancel_name", strcmp(last_error().name, "cancel") == 0);
}

int main(int argc, char **argv)
{
    (void)argc;
    model = argv[1];
    folder = argv[2];
    signal(SIGXFSZ, SIG_IGN);
    arguments();
    broken_files();
    options_that_cannot_run();
    engine = open_model(model);
    session = new_session(engine, 0);
    MUST(dsv4_session_sync(session, ids, 4, NULL, NULL));
    sessions();
    cancelled();
    sampler();
    saved_sessions();
    file_size_limit();
    cancel_objects();
    return 0;
}

/* Saved sessions in bad places: `misuse_files FOLDER [FULL]`, where FULL is a file system of 512 KiB. */
#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static dsv4_engine *engine, *tiny;
static dsv4_session *session;
static char folder[512];

static const char *at(const char *name)
{
    static char paths[8][1024];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* Neither saved to nor loaded from. */
static void refused(const char *name, int32_t saving, int32_t loading)
{
    size_t size;
    EXPECT("place.save", dsv4_session_save(session, at(name), NULL), saving);
    CHECK("place.save_names_it", strstr(dsv4_last_error(), name) != NULL);
    EXPECT("place.load", dsv4_session_load(session, at(name), NULL), loading);
    EXPECT("place.inspect", dsv4_snapshot_inspect_json(at(name), NULL, 0, &size), loading);
}

static void must(int status)
{
    if (status < 0)
        perror("preparing"), exit(3);
}

static void odd_places(void)
{
    char long_name[300] = {0};
    memset(long_name, 'n', sizeof long_name - 1);
    must(mkdir(at("folder"), 0700));
    must(mkfifo(at("pipe"), 0600));
    must(mknod(at("socket"), S_IFSOCK | 0600, 0));
    must(symlink("loop2", at("loop1")));
    must(symlink("loop1", at("loop2")));
    must(symlink("nowhere/at/all", at("dangling")));
    must(close(creat(at("empty"), 0600)));
    refused("folder", DSV4_ERR_INVALID_ARGUMENT, DSV4_ERR_FORMAT);
    refused("pipe", DSV4_ERR_INVALID_ARGUMENT, DSV4_ERR_FORMAT);
    refused("socket", DSV4_ERR_INVALID_ARGUMENT, DSV4_ERR_IO);
    refused("loop1", DSV4_ERR_INVALID_ARGUMENT, DSV4_ERR_IO);
    refused("dangling", DSV4_ERR_NOT_FOUND, DSV4_ERR_NOT_FOUND);
    refused("missing/talk", DSV4_ERR_NOT_FOUND, DSV4_ERR_NOT_FOUND);
    refused("empty/talk", DSV4_ERR_IO, DSV4_ERR_IO);
    refused(long_name, DSV4_ERR_IO, DSV4_ERR_IO);
    EXPECT("place.load", dsv4_session_load(session, at("empty"), NULL), DSV4_ERR_TRUNCATED);
    EXPECT("place.load", dsv4_session_load(session, "/dev/zero", NULL), DSV4_ERR_FORMAT);
    EXPECT("place.load", dsv4_session_load(session, "/proc/self/exe", NULL), DSV4_ERR_FORMAT);
    EXPECT("place.save", dsv4_session_save(session, "/dev/full", NULL), DSV4_ERR_INVALID_ARGUMENT);
    EXPECT("place.save", dsv4_session_save(session, "", NULL), DSV4_ERR_INVALID_ARGUMENT);
}

static void odd_names(void)
{
    size_t size;
    struct stat facts;
    EXPECT("name.not_utf8", dsv4_session_save(session, at("na\xff\xfeme \x01"), NULL), DSV4_OK);
    EXPECT("name.not_utf8_loads", dsv4_session_load(session, at("na\xff\xfeme \x01"), NULL), DSV4_OK);
    EXPECT("name.not_utf8_missing", dsv4_session_load(session, at("\xff\xfe"), NULL), DSV4_ERR_NOT_FOUND);
    CHECK("name.not_utf8_in_the_error", strstr(last_error().path, "\xff\xfe") != NULL);
    EXPECT("name.model", dsv4_inspect_json(at("\xff\xfe.gguf"), NULL, 0, &size), DSV4_ERR_NOT_FOUND);
    CHECK("name.model_in_the_error", strstr(last_error().path, "\xff\xfe") != NULL);
    must(symlink("target", at("link")));
    EXPECT("name.link", dsv4_session_save(session, at("link"), NULL), DSV4_OK);
    CHECK("name.link_stays", lstat(at("link"), &facts) == 0 && S_ISLNK(facts.st_mode));
    EXPECT("name.link_loads", dsv4_session_load(session, at("target"), NULL), DSV4_OK);
}

static void others(void)
{
    static char note[4096];
    size_t size = 0;
    dsv4_session *small = new_session(engine, 8), *foreign = NULL, *again = NULL;
    dsv4_engine *second = open_model("pocket-v4");
    dsv4_engine_options options;
    MUST(dsv4_engine_options_init(&options, sizeof options));
    options.context = 256;
    MUST(dsv4_engine_open("random-tiny", &options, NULL, &tiny));
    foreign = new_session(tiny, 128);
    MUST(dsv4_session_save(session, at("talk"), NULL));
    EXPECT("other.model", dsv4_session_load(foreign, at("talk"), NULL), DSV4_ERR_MISMATCH);
    static const int32_t tokens[] = {5, 6, 7};
    EXPECT("other.model_works_on", dsv4_session_eval(foreign, tokens, 3, NULL), DSV4_OK);
    MUST(dsv4_session_save(foreign, at("tiny"), NULL));
    EXPECT("other.way_round", dsv4_session_load(session, at("tiny"), NULL), DSV4_ERR_MISMATCH);
    EXPECT("other.context", dsv4_session_load(small, at("talk"), NULL), DSV4_ERR_CONTEXT_FULL);
    again = new_session(second, 512);
    EXPECT("other.engine_of_the_same_model", dsv4_session_load(again, at("talk"), NULL), DSV4_OK);
    options.profile = "exact";
    dsv4_engine *exact = NULL;
    MUST(dsv4_engine_open("pocket-v4", &options, NULL, &exact));
    dsv4_session *precise = new_session(exact, 256);
    EXPECT("other.profile", dsv4_session_load(precise, at("talk"), NULL), DSV4_ERR_MISMATCH);
    EXPECT("other.garbage", dsv4_session_load_memory(session, note, sizeof note, NULL), DSV4_ERR_FORMAT);
    EXPECT("other.nothing", dsv4_session_load_memory(session, note, 0, NULL), DSV4_ERR_TRUNCATED);
    EXPECT("other.null", dsv4_session_load_memory(session, NULL, 0, NULL), DSV4_ERR_INVALID_ARGUMENT);
    /* A state is no model, either. */
    EXPECT("other.state_as_model", dsv4_inspect_json(at("talk"), NULL, 0, &size), DSV4_ERR_FORMAT);
    MUST(dsv4_session_free(small) | dsv4_session_free(foreign));
    MUST(dsv4_session_free(again) | dsv4_session_free(precise));
    MUST(dsv4_engine_close(second) | dsv4_engine_close(exact) | dsv4_engine_close(tiny));
}

static void full(const char *place)
{
    snprintf(folder, sizeof folder, "%s", place);
    dsv4_session *few = new_session(engine, 64);
    EXPECT("full.empty_session_fits", dsv4_session_save(few, at("talk"), NULL), DSV4_OK);
    struct stat before, after;
    stat(at("talk"), &before);
    EXPECT("full.no_space", dsv4_session_save(session, at("talk"), NULL), DSV4_ERR_NO_SPACE);
    stat(at("talk"), &after);
    CHECK("full.old_file_is_there", before.st_ino == after.st_ino && before.st_size == after.st_size);
    EXPECT("full.old_file_loads", dsv4_session_load(few, at("talk"), NULL), DSV4_OK);
    MUST(dsv4_session_free(few));
}

int main(int count, char **arguments)
{
    snprintf(folder, sizeof folder, "%s", count > 1 ? arguments[1] : ".");
    engine = open_model("pocket-v4");
    session = new_session(engine, 2048);
    dsv4_message message = message_of("user", "Who are you?");
    dsv4_sampling_options options = greedy(20);
    MUST(dsv4_session_reply(session, &message, 1, NULL, &options, NULL, NULL, NULL, NULL));
    odd_places();
    odd_names();
    others();
    if (count > 2)
        full(arguments[2]);
    EXPECT("all.frees", dsv4_session_free(session) | dsv4_engine_close(engine), DSV4_OK);
    return 0;
}

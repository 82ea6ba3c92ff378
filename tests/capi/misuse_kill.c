/* Saves two sessions to one file in turns until it is killed: `misuse_kill FOLDER`. */
#include "check.h"

int main(int count, char **arguments)
{
    char paths[3][1024];
    static const char *const names[] = {"first", "second", "talk"};
    for (int at = 0; at < 3; at++)
        snprintf(paths[at], sizeof paths[at], "%s/%s.dsv4s", count > 1 ? arguments[1] : ".", names[at]);
    dsv4_engine *engine = open_model("pocket-v4");
    dsv4_session *sessions[2];
    static const int32_t tokens[40] = {5, 6, 7, 8, 9};
    for (int at = 0; at < 2; at++) {
        sessions[at] = new_session(engine, 512);
        MUST(dsv4_session_eval(sessions[at], tokens, 10 + 20 * (size_t)at, NULL));
        MUST(dsv4_session_save(sessions[at], paths[at], NULL));
    }
    MUST(dsv4_session_save(sessions[1], paths[2], NULL));
    puts("ready");
    fflush(stdout);
    for (int at = 0;; at = !at)
        MUST(dsv4_session_save(sessions[at], paths[2], NULL));
}

/* An installation that does not start: every function says why, and what needs no interpreter works. */
#include "check.h"

int main(int argc, char **argv)
{
    dsv4_engine *engine = (dsv4_engine *)(void *)&argc;
    dsv4_cancel *cancel = NULL;
    size_t size;
    EXPECT("broken.init", dsv4_init(DSV4_ABI_VERSION, argv[1]), DSV4_ERR_INIT);
    CHECK("broken.reason", error_has(argv[2]));
    CHECK("broken.function", strcmp(last_error().function, "dsv4_init") == 0);
    EXPECT("broken.later_call", dsv4_engine_open("pocket-v4", NULL, NULL, &engine), DSV4_ERR_INIT);
    CHECK("broken.later_reason", error_has(argv[2]) && engine == NULL);
    EXPECT("broken.other_function", dsv4_devices_json(NULL, 0, &size), DSV4_ERR_INIT);
    EXPECT("broken.init_again", dsv4_init(DSV4_ABI_VERSION, NULL), DSV4_ERR_INIT);
    EXPECT("broken.cancel_objects_work", dsv4_cancel_new(&cancel) || dsv4_cancel_trigger(cancel), DSV4_OK);
    CHECK("broken.versions_work", dsv4_abi_version() == DSV4_ABI_VERSION && dsv4_version()[0]);
    return 0;
}

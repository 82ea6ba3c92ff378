/* What libdsv4 and the Python module behind it tell each other at the start. */
#ifndef EDGEDSV4_SHIM_H
#define EDGEDSV4_SHIM_H

#include "dsv4.h"

/* Low bits of handles, which say what they stand for (`handles.py` has the others). */
enum { CANCEL_KIND = 5 };

/* Functions of the library that Python calls. */
typedef struct dsv4_hooks {
    int32_t (*set_error)(const char *function, const dsv4_error_info *error);
    int32_t (*is_cancelled)(dsv4_cancel *cancel);
} dsv4_hooks;

#endif

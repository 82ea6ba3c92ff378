/* The best rows by score (select_top.c). */

#ifndef EDGEDSV4_SELECT_TOP_H
#define EDGEDSV4_SELECT_TOP_H

#include "native.h"

/* Write the ids of the `top` largest of `count` scores in ascending order, then -1. Equal scores go to the
 * lower row, -0 equals 0, NaN counts as -inf, and -inf is never taken. The scores are overwritten. */
__attribute__((visibility("hidden"))) void dk_select_top(int32_t *ids, float *scores, int64_t count,
                                                         int64_t top);

#endif

/* Rows at rest, for the C files that read them (kv_rows.c). */

#ifndef EDGEDSV4_ROWS_H
#define EDGEDSV4_ROWS_H

#include "native.h"

enum { DK_ROWS_F32 = 0, DK_ROWS_FP8 = 1, DK_ROWS_FP4 = 2 };
enum { DK_FP8_GROUP = 64, DK_FP4_GROUP = 32 };

/* Decode rows first .. first + count - 1 to y, `stride` floats from one row to the next. */
__attribute__((visibility("hidden"))) void dk_rows_read(float *y, int64_t stride, const dk_rows *rows,
                                                        int64_t first, int64_t count);

DK_INLINE void dk_mark_bad(dk_run *run) { __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED); }

DK_INLINE int dk_is_finite(float x) { return (dk_bits_of_float(x) & 0x7f800000u) != 0x7f800000u; }

#endif

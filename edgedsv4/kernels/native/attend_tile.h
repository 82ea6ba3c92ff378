/* What attention does with a tile of decoded rows, per instruction set (attend_tile.c). */

#ifndef EDGEDSV4_ATTEND_TILE_H
#define EDGEDSV4_ATTEND_TILE_H

#include "native.h"

enum { DK_TILE_ROWS = 64 };
#define DK_MINUS_INFINITY dk_float_of_bits(0xff800000u)

/* Heads lie dim apart in q and out, and DK_TILE_ROWS apart in scores (64-byte aligned); count is at most
 * that. */
typedef struct {
    /* scores = q . rows */
    void (*dots)(float *scores, const float *q, int64_t dim, const float *rows, int64_t row_stride,
                 int64_t count, int64_t heads);
    /* Scores become weights exp(scale * score - top), `top` and `sum` are brought up to date, and `factor`
     * is what earlier sums are worth now. A NaN among the scores is no maximum, but makes the sum NaN. */
    void (*soften)(float *scores, float *top, float *sum, float *factor, int64_t count, int64_t heads,
                   float scale);
    /* out = factor * out (nothing if is_first) + weights . rows */
    void (*mix)(float *out, const float *weights, const float *factor, int64_t dim, const float *rows,
                int64_t row_stride, int64_t count, int64_t heads, int is_first);
} dk_tile_kernels;

__attribute__((visibility("hidden"))) const dk_tile_kernels *dk_choose_tile_kernels(int64_t dim);

#endif

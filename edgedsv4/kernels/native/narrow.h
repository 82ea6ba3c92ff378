/* What the row-by-row forms share: the scratch of a row, and what a token brings. */
#ifndef EDGEDSV4_NARROW_H
#define EDGEDSV4_NARROW_H

#include "products.h"

enum { CHUNK = 64, WIDTH = 1024, ROWS = DK_NARROW_ROWS };

typedef struct {
    uint8_t u[WIDTH + CHUNK] DK_ALIGNED;
    float scale[WIDTH / 16 + 16] DK_ALIGNED;
    float offset[WIDTH / 16 + 16] DK_ALIGNED;
} slab;

/* What a token adds to a slab: pointers at its first column. */
typedef struct {
    const int8_t *q;
    const float *scale;
    const float *sums;   /* of the size of the weight's groups */
} activations;

DK_INLINE activations activations_at(const dk_product *p, int64_t token, int64_t column, int group)
{
    const dk_input *x = p->x;
    size_t place = (size_t)(token * p->w->columns + column);
    activations a = {x->q + place, x->scale + place / 32, NULL};
    a.sums = group == 32 ? x->sum32 + place / 32 : x->sum16 + place / 16;
    return a;
}

#endif

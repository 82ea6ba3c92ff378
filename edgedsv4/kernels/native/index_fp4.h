/* Scores of FP4 index keys in integers (index_fp4.c). */

#ifndef EDGEDSV4_INDEX_FP4_H
#define EDGEDSV4_INDEX_FP4_H

#include "rows.h"

#define DK_HIDDEN __attribute__((visibility("hidden")))

enum { DK_INDEX_BLOCK = 16 }; /* keys that lie side by side */

/* The queries of one token, rounded to FP4: x = scale / 2 * code in groups of 32. */
typedef struct {
    int8_t *codes;   /* [heads, dim], in the order of the expanded keys */
    float *scales;   /* [heads, dim / 32], a quarter of the scale of the values (keys are doubled too) */
    int32_t *starts; /* [heads, dim / 32], makes up for the offset of the expanded keys */
} dk_fp4_queries;

/* Split values that are on the grid of FP4 into codes and scales. */
DK_HIDDEN void dk_fp4_split_queries(const dk_fp4_queries *queries, const float *q, int64_t heads,
                                    int64_t dim);

/* Expand keys first .. first + count - 1 to bytes 2 * value + 12, in blocks of 16 keys: bytes
 * [blocks][dim / 4][16][4], scales [blocks][dim / 32][16]. A last block is filled up with its last key. */
DK_HIDDEN void dk_fp4_expand(uint8_t *bytes, float *scales, const dk_rows *keys, int64_t first,
                             int64_t count);

/* scores [blocks * 16] of one token: sum over heads of weight * relu(q . key). */
DK_HIDDEN void dk_fp4_scores(float *scores, const uint8_t *bytes, const float *key_scales, int64_t blocks,
                             const dk_fp4_queries *queries, const float *weights, int64_t heads, int64_t dim);

#endif

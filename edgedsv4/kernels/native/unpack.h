/* Unpackers for products with int8 activations: stored blocks as groups of unsigned bytes.
 *
 * Every block type whose elements lie on a grid of at most 256 steps per group can be written as
 * w = scale[g] * u + offset[g] over groups of 16 or 32 elements, u in 0..255. A product with activations
 * x = xs * q (int8, groups of 32) is then sum_g xs_g * (scale_g * dot(u, q) + offset_g * sum(q)): the
 * int32 dot products are exact, so all instruction sets agree on them.
 */
#ifndef DK_UNPACK_H
#define DK_UNPACK_H

#include <stdint.h>

#include "native.h"

/* Groups of elements [first_column, first_column + columns) of one row; both are multiples of the block
 * and of 32. Fills u [columns], scale and offset [columns / group]; scratch is aligned to 64 bytes and
 * has room for 64 more bytes after the end. w->factor is folded into scale and offset. A bad group gets
 * the scale or offset NaN. */
typedef void (*dk_unpack_fn)(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                             int64_t first_column, int64_t columns);

typedef struct {
    int32_t group;          /* 16 or 32 */
    dk_unpack_fn scalar;
    dk_unpack_fn avx2;      /* NULL: the next lower is used */
    dk_unpack_fn avx512;
} dk_unpacker;

extern const dk_unpacker dk_unpack_q8_0, dk_unpack_q4_0, dk_unpack_mxfp4, dk_unpack_nvfp4, dk_unpack_fp4_e2m1;
extern const dk_unpacker dk_unpack_q2_k, dk_unpack_q3_k, dk_unpack_q4_k, dk_unpack_q5_k, dk_unpack_q6_k;
extern const dk_unpacker dk_unpack_iq2_xxs, dk_unpack_iq2_xs, dk_unpack_iq3_xxs, dk_unpack_iq4_nl,
    dk_unpack_iq4_xs;

/* E2M1 codes doubled, plus 12. */
extern const uint8_t dk_e2m1_plus_12[16] __attribute__((visibility("hidden")));

/* Code book of IQ4_NL and IQ4_XS plus 127. */
extern const uint8_t dk_iq4_plus_127[16] __attribute__((visibility("hidden")));

/* NULL: no int8 form (F32, F16, BF16, FP8_E4M3 and the rest). */
const dk_unpacker *dk_unpacker_of(int type);

/* Largest code that an unpacker makes of a type. */
DK_INLINE int dk_largest_code(int type)
{
    switch (type) {
    case DK_Q2_K: return 3;
    case DK_Q3_K: return 7;
    case DK_Q4_0:
    case DK_Q4_K: return 15;
    case DK_MXFP4:
    case DK_NVFP4:
    case DK_FP4_E2M1: return 24;
    case DK_Q5_K: return 31;
    case DK_Q6_K: return 63;
    case DK_IQ2_XXS:
    case DK_IQ2_XS: return 86;
    case DK_IQ3_XXS: return 124;
    default: return 255;
    }
}

#endif

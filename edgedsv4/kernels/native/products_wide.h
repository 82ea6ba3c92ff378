/* What the products of many tokens share: unpacking sixteen rows, and interleaving them. */
#ifndef EDGEDSV4_PRODUCTS_WIDE_H
#define EDGEDSV4_PRODUCTS_WIDE_H

#include "products.h"

#if defined(DK_X86)

/* Columns that are unpacked together, and the most groups among them. */
enum { DK_SLAB = 1024, DK_SLAB_GROUPS = DK_SLAB / 16 };

typedef struct {
    uint8_t u[DK_WIDE_ROWS][DK_SLAB + 64] DK_ALIGNED;
    float scale[DK_WIDE_ROWS][DK_SLAB_GROUPS + 16] DK_ALIGNED;
    float offset[DK_WIDE_ROWS][DK_SLAB_GROUPS + 16] DK_ALIGNED;
} dk_unpacked;

/* Rows of a block from first_row on, at most sixteen. */
DK_INLINE int64_t dk_rows_at(const dk_block *b, int64_t first)
{
    return dk_min(DK_WIDE_ROWS, b->first_row + b->rows - first);
}

DK_INLINE void dk_unpack_rows(dk_unpacked *s, const dk_product *p, dk_unpack_fn unpack, int64_t first,
                              int64_t rows, int64_t column, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++)
        unpack(s->u[r], s->scale[r], s->offset[r], p->w, p->first_row + first + r, column, columns);
}

/* Transpose 16 x 16 words of 32 bits, from[row][column]: column j + 4 k goes to byte at_k + 64 j, at_0 = 0.
 * `shift` is added to every byte. */
DK_VNNI DK_INLINE void dk_transpose_16(void *to, const void *from, int64_t stride, const int at_1,
                                       const int at_2, const int at_3, __m512i shift)
{
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        a[r] = _mm512_add_epi8(_mm512_load_si512((const uint8_t *)from + r * stride), shift);
#pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    /* a[4 k + j]: rows 4 k .. 4 k + 3 of columns j, j + 4, j + 8, j + 12. */
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += 4) {
        a[k] = _mm512_unpacklo_epi64(b[k], b[k + 2]);
        a[k + 1] = _mm512_unpackhi_epi64(b[k], b[k + 2]);
        a[k + 2] = _mm512_unpacklo_epi64(b[k + 1], b[k + 3]);
        a[k + 3] = _mm512_unpackhi_epi64(b[k + 1], b[k + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88),
                low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd),
                high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        uint8_t *out = (uint8_t *)to + 64 * j;
        _mm512_store_si512(out, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_store_si512(out + at_1, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_store_si512(out + at_2, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_store_si512(out + at_3, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

/* Offset of every group in units of its scale, where that is a constant of the type; else 0. */
DK_INLINE float dk_middle_of(int type)
{
    switch (type) {
    case DK_Q8_0: return -128.0f;
    case DK_Q4_0: return -8.0f;
    case DK_MXFP4:
    case DK_NVFP4:
    case DK_FP4_E2M1: return -12.0f;
    case DK_Q3_K: return -4.0f;
    case DK_Q6_K: return -32.0f;
    case DK_IQ4_NL:
    case DK_IQ4_XS: return -127.0f;
    case DK_IQ2_XXS:
    case DK_IQ2_XS: return -43.0f;
    case DK_IQ3_XXS: return -62.0f;
    default: return 0.0f;
    }
}

#endif
#endif

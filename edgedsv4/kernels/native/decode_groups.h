/* Decoders to float32 by way of the unpackers of int8 products (unpack.h): the bytes of a slab go to a small
 * scratch in the cache, and then every element is (u - bias) * scale, or u * scale + offset. Products of a
 * byte and a scale have at most 24 significant bits, so the bits are those of the plain block functions,
 * fused or not. */
#ifndef EDGEDSV4_DECODE_GROUPS_H
#define EDGEDSV4_DECODE_GROUPS_H

#include "decode.h"
#include "products.h"

/* The bias of types with an offset of their own. */
enum { DK_HAS_OFFSET = -1 };

#ifdef DK_X86

/* Columns per slab: a multiple of every block. */
enum { DK_GROUP_SLAB = 1024 };

DK_AVX2 DK_INLINE void dk_expand_avx2(float *restrict y, const uint8_t *u, const float *scale,
                                      const float *offset, int64_t columns, int group, int bias)
{
    for (int64_t i = 0; i < columns; i += 8) {
        __m256 s = _mm256_set1_ps(scale[i / group]);
        __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(u + i))));
        if (bias == DK_HAS_OFFSET)
            x = _mm256_fmadd_ps(x, s, _mm256_set1_ps(offset[i / group]));
        else
            x = _mm256_mul_ps(_mm256_sub_ps(x, _mm256_set1_ps((float)bias)), s);
        _mm256_storeu_ps(y + i, x);
    }
}

DK_AVX512 DK_INLINE void dk_expand_avx512(float *restrict y, const uint8_t *u, const float *scale,
                                          const float *offset, int64_t columns, int group, int bias)
{
    for (int64_t i = 0; i < columns; i += 16) {
        __m512 s = _mm512_set1_ps(scale[i / group]);
        __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(u + i))));
        if (bias == DK_HAS_OFFSET)
            x = _mm512_fmadd_ps(x, s, _mm512_set1_ps(offset[i / group]));
        else
            x = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_set1_ps((float)bias)), s);
        _mm512_storeu_ps(y + i, x);
    }
}

#define DK_GROUP_ROW_FUNCTION(NAME, ATTRIBUTE, TYPE, GROUP, BIAS, EXPAND)                                  \
    ATTRIBUTE static void NAME(float *restrict y, const dk_matrix *w, int64_t row, int64_t first_column,   \
                               int64_t columns)                                                            \
    {                                                                                                      \
        DK_ALIGNED uint8_t u[DK_GROUP_SLAB + 64];                                                          \
        DK_ALIGNED float scale[DK_GROUP_SLAB / GROUP + 16], offset[DK_GROUP_SLAB / GROUP + 16];            \
        dk_unpack_fn unpack = dk_unpack_of(&dk_unpack_##TYPE);                                             \
        dk_matrix unscaled = *w;                                                                           \
        unscaled.factor = 1.0f;                                                                            \
        for (int64_t c = 0; c < columns; c += DK_GROUP_SLAB) {                                             \
            int64_t n = dk_min(DK_GROUP_SLAB, columns - c);                                                \
            unpack(u, scale, offset, &unscaled, row, first_column + c, n);                                 \
            EXPAND(y + c, u, scale, offset, n, GROUP, BIAS);                                               \
        }                                                                                                  \
        dk_apply_factor(y, w, columns);                                                                    \
    }

/* The table entry of a type: SCALAR decodes a block, the vector functions go by groups. */
#define DK_GROUP_DECODER(TYPE, ELEMENTS, BYTES, SCALAR, GROUP, BIAS)                                       \
    DK_ROW_FUNCTION(TYPE##_scalar_row, , ELEMENTS, BYTES, SCALAR)                                          \
    DK_GROUP_ROW_FUNCTION(TYPE##_avx2_row, DK_AVX2, TYPE, GROUP, BIAS, dk_expand_avx2)                     \
    DK_GROUP_ROW_FUNCTION(TYPE##_avx512_row, DK_AVX512, TYPE, GROUP, BIAS, dk_expand_avx512)               \
    const dk_decoder dk_decode_##TYPE = {ELEMENTS, BYTES, TYPE##_scalar_row, TYPE##_avx2_row,              \
                                         TYPE##_avx512_row};

#else

#define DK_GROUP_DECODER(TYPE, ELEMENTS, BYTES, SCALAR, GROUP, BIAS)                                       \
    DK_ROW_FUNCTION(TYPE##_scalar_row, , ELEMENTS, BYTES, SCALAR)                                          \
    const dk_decoder dk_decode_##TYPE = {ELEMENTS, BYTES, TYPE##_scalar_row, NULL, NULL};

#endif

#endif

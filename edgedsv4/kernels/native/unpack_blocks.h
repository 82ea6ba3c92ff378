/* What the unpackers of the K and IQ types are made of: a row function around a function for one block,
 * TYPE_plain, TYPE_avx2 or TYPE_avx512 (u, scale, offset, p, factor). */
#ifndef EDGEDSV4_UNPACK_BLOCKS_H
#define EDGEDSV4_UNPACK_BLOCKS_H

#include "decode.h"
#include "unpack.h"

#define DK_UNPACK_FUNCTION(NAME, ATTRIBUTE, GROUP, ELEMENTS, BYTES, BLOCK)                                 \
    ATTRIBUTE static void NAME(uint8_t *restrict u, float *restrict scale, float *restrict offset,         \
                               const dk_matrix *w, int64_t row, int64_t first_column, int64_t columns)     \
    {                                                                                                      \
        const uint8_t *p = dk_block_at(w, row, first_column, ELEMENTS, BYTES);                             \
        float factor = w->factor;                                                                          \
        for (int64_t i = 0; i < columns; i += ELEMENTS, p += BYTES)                                        \
            BLOCK(u + i, scale + i / GROUP, offset + i / GROUP, p, factor);                                \
    }

#ifdef DK_X86

#define DK_UNPACKER(TYPE, GROUP, ELEMENTS, BYTES)                                                          \
    DK_UNPACK_FUNCTION(TYPE##_scalar_row, , GROUP, ELEMENTS, BYTES, TYPE##_plain)                          \
    DK_UNPACK_FUNCTION(TYPE##_avx2_row, DK_AVX2, GROUP, ELEMENTS, BYTES, TYPE##_avx2)                      \
    DK_UNPACK_FUNCTION(TYPE##_avx512_row, DK_AVX512, GROUP, ELEMENTS, BYTES, TYPE##_avx512)                \
    const dk_unpacker dk_unpack_##TYPE = {GROUP, TYPE##_scalar_row, TYPE##_avx2_row, TYPE##_avx512_row};

/* Integers times a factor, as floats. */
DK_AVX2 DK_INLINE void dk_store_scaled8(float *y, __m256i values, float factor)
{
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtepi32_ps(values), _mm256_set1_ps(factor)));
}

DK_AVX512 DK_INLINE void dk_store_scaled16(float *y, __m512i values, float factor)
{
    _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_cvtepi32_ps(values), _mm512_set1_ps(factor)));
}

#else

#define DK_UNPACKER(TYPE, GROUP, ELEMENTS, BYTES)                                                          \
    DK_UNPACK_FUNCTION(TYPE##_scalar_row, , GROUP, ELEMENTS, BYTES, TYPE##_plain)                          \
    const dk_unpacker dk_unpack_##TYPE = {GROUP, TYPE##_scalar_row, NULL, NULL};

#endif

#endif

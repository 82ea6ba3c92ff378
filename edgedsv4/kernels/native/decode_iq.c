/* Decoders of the IQ types: indices into grids of 4 or 8 values, signs, and small scales. Formulas and field
 * order: kernels/dequantize/iq_blocks.py. Each block is first taken apart into fields (iq_fields.h). */

#include "decode.h"
#include "iq_fields.h"

/* ---- from fields to elements: sign * grid * scale, 16 elements at a time ---- */

DK_INLINE void eights(float *restrict y, const dk_iq_fields *f, const uint64_t *grid)
{
    for (int t = 0; t < 32; t++) {
        int8_t values[8];
        memcpy(values, grid + f->index[t], sizeof values);
        for (int i = 0; i < 8; i++) {
            int value = f->sign[t] >> i & 1 ? -values[i] : values[i];
            y[8 * t + i] = (float)value * f->scale[t >> 1];
        }
    }
}

DK_INLINE void fours(float *restrict y, const dk_iq_fields *f, const uint32_t *grid)
{
    for (int t = 0; t < 32; t++) {
        int8_t values[8];
        memcpy(values, grid + f->index[2 * t], 4);
        memcpy(values + 4, grid + f->index[2 * t + 1], 4);
        for (int i = 0; i < 8; i++) {
            int value = f->sign[t] >> i & 1 ? -values[i] : values[i];
            y[8 * t + i] = (float)value * f->scale[t >> 1];
        }
    }
}

/* ---- IQ1: (grid + delta) * scale ---- */

typedef struct {
    DK_ALIGNED uint16_t index[32];
    DK_ALIGNED float delta[32]; /* per 8 elements */
    DK_ALIGNED float scale[16]; /* per 16 elements */
} dk_iq1_fields;

/* Words of three upper index bits for each of four entries, a 3-bit scale, and the sign of delta. */
DK_INLINE void dk_iq1_s_fields(dk_iq1_fields *restrict f, const uint8_t *p, float d)
{
    for (int j = 0; j < 8; j++) {
        uint32_t word = dk_load16(p + 34 + 2 * j);
        f->scale[2 * j] = f->scale[2 * j + 1] = (float)(int)(2 * (word >> 12 & 7) + 1) * d;
        for (int i = 0; i < 4; i++) {
            f->index[4 * j + i] = (uint16_t)(p[2 + 4 * j + i] | (word >> 3 * i & 7) << 8);
            f->delta[4 * j + i] = word >> 15 ? -0.125f : 0.125f;
        }
    }
}

/* The half float whose nibbles are the top bits of the last four words. */
DK_INLINE uint16_t iq1_m_scale(const uint8_t *p)
{
    uint64_t words = dk_load64(p + 48);
    return (uint16_t)((words >> 12 & 0xf) | (words >> 24 & 0xf0) | (words >> 36 & 0xf00) |
                      (words >> 48 & 0xf000));
}

DK_INLINE void dk_iq1_m_fields(dk_iq1_fields *restrict f, const uint8_t *p, float d)
{
    for (int j = 0; j < 16; j++)
        f->scale[j] = (float)(2 * (dk_load16(p + 48 + 2 * (j >> 2)) >> 3 * (j & 3) & 7) + 1) * d;
    for (int i = 0; i < 32; i++) {
        uint32_t nibble = p[32 + (i >> 1)] >> 4 * (i & 1) & 15;
        f->index[i] = (uint16_t)(p[i] | (nibble & 7) << 8);
        f->delta[i] = nibble >> 3 ? -0.125f : 0.125f;
    }
}

DK_INLINE void shifted(float *restrict y, const dk_iq1_fields *f, const uint64_t *grid)
{
    for (int t = 0; t < 32; t++) {
        int8_t values[8];
        memcpy(values, grid + f->index[t], sizeof values);
        for (int i = 0; i < 8; i++)
            y[8 * t + i] = ((float)values[i] + f->delta[t]) * f->scale[t >> 1];
    }
}

#ifdef DK_X86

/* Eight signed bytes with their signs and scale. */
DK_AVX2 DK_INLINE void eight_avx2(float *y, __m128i values, uint8_t sign, float scale)
{
    const __m256i bits = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    __m256i flips = _mm256_sllv_epi32(_mm256_set1_epi32(sign), bits);
    flips = _mm256_and_si256(flips, _mm256_set1_epi32(INT32_MIN));
    __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)), _mm256_set1_ps(scale));
    _mm256_storeu_ps(y, _mm256_xor_ps(product, _mm256_castsi256_ps(flips)));
}

DK_AVX2 DK_INLINE void eights_avx2(float *y, const dk_iq_fields *f, const uint64_t *grid)
{
    for (int t = 0; t < 32; t++)
        eight_avx2(y + 8 * t, _mm_loadl_epi64((const __m128i *)(grid + f->index[t])), f->sign[t],
                   f->scale[t >> 1]);
}

DK_AVX2 DK_INLINE void fours_avx2(float *y, const dk_iq_fields *f, const uint32_t *grid)
{
    for (int t = 0; t < 32; t++) {
        __m128i values = _mm_cvtsi32_si128((int)grid[f->index[2 * t]]);
        values = _mm_insert_epi32(values, (int)grid[f->index[2 * t + 1]], 1);
        eight_avx2(y + 8 * t, values, f->sign[t], f->scale[t >> 1]);
    }
}

DK_AVX2 DK_INLINE void shifted_avx2(float *y, const dk_iq1_fields *f, const uint64_t *grid)
{
    for (int t = 0; t < 32; t++) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(grid + f->index[t]));
        __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        values = _mm256_add_ps(values, _mm256_set1_ps(f->delta[t]));
        _mm256_storeu_ps(y + 8 * t, _mm256_mul_ps(values, _mm256_set1_ps(f->scale[t >> 1])));
    }
}

/* Sixteen signed bytes with their signs and scale. */
DK_AVX512 DK_INLINE void sixteen_avx512(float *y, __m128i values, __mmask16 negative, float scale)
{
    __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values)), _mm512_set1_ps(scale));
    _mm512_storeu_ps(y, _mm512_mask_xor_ps(product, negative, product, _mm512_set1_ps(-0.0f)));
}

DK_AVX512 DK_INLINE __m128i two_eights(const uint64_t *grid, const uint16_t *index)
{
    __m128i low = _mm_loadl_epi64((const __m128i *)(grid + index[0]));
    return _mm_insert_epi64(low, (int64_t)grid[index[1]], 1);
}

DK_AVX512 DK_INLINE void eights_avx512(float *y, const dk_iq_fields *f, const uint64_t *grid)
{
    for (int t = 0; t < 16; t++)
        sixteen_avx512(y + 16 * t, two_eights(grid, f->index + 2 * t), dk_load16(f->sign + 2 * t),
                       f->scale[t]);
}

DK_AVX512 DK_INLINE void fours_avx512(float *y, const dk_iq_fields *f, const uint32_t *grid)
{
    for (int t = 0; t < 16; t++) {
        const uint16_t *index = f->index + 4 * t;
        __m128i values = _mm_cvtsi32_si128((int)grid[index[0]]);
        values = _mm_insert_epi32(values, (int)grid[index[1]], 1);
        values = _mm_insert_epi32(values, (int)grid[index[2]], 2);
        values = _mm_insert_epi32(values, (int)grid[index[3]], 3);
        sixteen_avx512(y + 16 * t, values, dk_load16(f->sign + 2 * t), f->scale[t]);
    }
}

DK_AVX512 DK_INLINE void shifted_avx512(float *y, const dk_iq1_fields *f, const uint64_t *grid)
{
    for (int t = 0; t < 16; t++) {
        __m128i bytes = two_eights(grid, f->index + 2 * t);
        __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        __m512 delta = _mm512_set1_ps(f->delta[2 * t]);
        delta = _mm512_mask_mov_ps(delta, 0xff00, _mm512_set1_ps(f->delta[2 * t + 1]));
        values = _mm512_add_ps(values, delta);
        _mm512_storeu_ps(y + 16 * t, _mm512_mul_ps(values, _mm512_set1_ps(f->scale[t])));
    }
}

#endif

/* A block function: fields by FIELDS with the scale of the half float BITS, then elements by EXPAND. */
#define IQ_BLOCK(NAME, ATTRIBUTE, RECORD, FIELDS, SCALE, EXPAND, GRID)                                     \
    ATTRIBUTE DK_INLINE void NAME(float *restrict y, const uint8_t *p)                                     \
    {                                                                                                      \
        RECORD f;                                                                                          \
        FIELDS(&f, p, SCALE);                                                                              \
        EXPAND(y, &f, GRID);                                                                               \
    }

#ifdef DK_X86
#define IQ_DECODER(TYPE, BYTES, RECORD, BITS, EXPAND, GRID)                                                \
    IQ_BLOCK(TYPE##_block, , RECORD, dk_##TYPE##_fields, dk_f16(BITS), EXPAND, GRID)                       \
    IQ_BLOCK(TYPE##_avx2, DK_AVX2, RECORD, dk_##TYPE##_fields, _cvtsh_ss(BITS), EXPAND##_avx2, GRID)       \
    IQ_BLOCK(TYPE##_avx512, DK_AVX512, RECORD, dk_##TYPE##_fields, _cvtsh_ss(BITS), EXPAND##_avx512, GRID)  \
    DK_DECODER(TYPE, 256, BYTES, TYPE##_block(out, p), TYPE##_avx2(out, p), TYPE##_avx512(out, p))
#else
#define IQ_DECODER(TYPE, BYTES, RECORD, BITS, EXPAND, GRID)                                                \
    IQ_BLOCK(TYPE##_block, , RECORD, dk_##TYPE##_fields, dk_f16(BITS), EXPAND, GRID)                       \
    DK_DECODER(TYPE, 256, BYTES, TYPE##_block(out, p), , )
#endif

IQ_DECODER(iq2_xxs, 66, dk_iq_fields, dk_load16(p), eights, dk_grid_iq2_xxs)
IQ_DECODER(iq2_xs, 74, dk_iq_fields, dk_load16(p), eights, dk_grid_iq2_xs)
IQ_DECODER(iq2_s, 82, dk_iq_fields, dk_load16(p), eights, dk_grid_iq2_s)
IQ_DECODER(iq3_xxs, 98, dk_iq_fields, dk_load16(p), fours, dk_grid_iq3_xxs)
IQ_DECODER(iq3_s, 110, dk_iq_fields, dk_load16(p), fours, dk_grid_iq3_s)
IQ_DECODER(iq1_s, 50, dk_iq1_fields, dk_load16(p), shifted, dk_grid_iq1_s)
IQ_DECODER(iq1_m, 56, dk_iq1_fields, iq1_m_scale(p), shifted, dk_grid_iq1_s)

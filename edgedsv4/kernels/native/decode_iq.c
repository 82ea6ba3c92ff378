/* Decoders of the IQ types: indices into grids of 4 or 8 values, signs, and small scales. Formulas and field
 * order: kernels/dequantize/iq_blocks.py. Each block is first taken apart into fields (iq_fields.h). */

#include "decode_groups.h"
#include "iq_fields_avx2.h"

/* ---- from fields to elements: sign * grid * scale, 16 elements at a time ---- */

DK_INLINE void biased_eight(float *restrict y, uint64_t values, uint8_t sign, float scale)
{
    uint64_t biased = dk_biased_eight(values, sign, 64);
    uint8_t u[8];
    memcpy(u, &biased, sizeof u);
    for (int i = 0; i < 8; i++)
        y[i] = (float)(u[i] - 64) * scale;
}

DK_INLINE void eights(float *restrict y, const dk_iq_fields *f, const uint64_t *grid, int group)
{
    for (int t = 0; t < 32; t++)
        biased_eight(y + 8 * t, grid[dk_index(f, t)], f->sign[t], f->scale[8 * t / group]);
}

DK_INLINE void fours(float *restrict y, const dk_iq_fields *f, const uint32_t *grid, int group)
{
    for (int t = 0; t < 32; t++) {
        uint64_t values = grid[dk_index(f, 2 * t)] | (uint64_t)grid[dk_index(f, 2 * t + 1)] << 32;
        biased_eight(y + 8 * t, values, f->sign[t], f->scale[8 * t / group]);
    }
}

DK_INLINE void shifted(float *restrict y, const dk_iq1_fields *f, const uint64_t *grid, int group)
{
    for (int t = 0; t < 32; t++) {
        int8_t values[8];
        memcpy(values, grid + f->index[t], sizeof values);
        for (int i = 0; i < 8; i++)
            y[8 * t + i] = ((float)values[i] + f->delta[t]) * f->scale[8 * t / group];
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

DK_AVX2 DK_INLINE void eights_avx2(float *y, const dk_iq_fields *f, const uint64_t *grid, int group)
{
    for (int t = 0; t < 32; t++)
        eight_avx2(y + 8 * t, _mm_loadl_epi64((const __m128i *)(grid + dk_index(f, t))), f->sign[t],
                   f->scale[8 * t / group]);
}

DK_AVX2 DK_INLINE void fours_avx2(float *y, const dk_iq_fields *f, const uint32_t *grid, int group)
{
    for (int t = 0; t < 32; t++) {
        __m128i values = _mm_cvtsi32_si128((int)grid[dk_index(f, 2 * t)]);
        values = _mm_insert_epi32(values, (int)grid[dk_index(f, 2 * t + 1)], 1);
        eight_avx2(y + 8 * t, values, f->sign[t], f->scale[8 * t / group]);
    }
}

DK_AVX2 DK_INLINE void shifted_avx2(float *y, const dk_iq1_fields *f, const uint64_t *grid, int group)
{
    for (int t = 0; t < 32; t++) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(grid + f->index[t]));
        __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        values = _mm256_add_ps(values, _mm256_set1_ps(f->delta[t]));
        _mm256_storeu_ps(y + 8 * t, _mm256_mul_ps(values, _mm256_set1_ps(f->scale[8 * t / group])));
    }
}

/* Sixteen signed bytes with their signs and scale. */
DK_AVX512 DK_INLINE void sixteen_avx512(float *y, __m128i values, __mmask16 negative, float scale)
{
    __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values)), _mm512_set1_ps(scale));
    _mm512_storeu_ps(y, _mm512_mask_xor_ps(product, negative, product, _mm512_set1_ps(-0.0f)));
}

DK_AVX512 DK_INLINE __m128i two_eights(const uint64_t *grid, uint32_t first, uint32_t second)
{
    return _mm_insert_epi64(_mm_loadl_epi64((const __m128i *)(grid + first)), (int64_t)grid[second], 1);
}

DK_AVX512 DK_INLINE void eights_avx512(float *y, const dk_iq_fields *f, const uint64_t *grid, int group)
{
    for (int t = 0; t < 16; t++)
        sixteen_avx512(y + 16 * t, two_eights(grid, dk_index(f, 2 * t), dk_index(f, 2 * t + 1)),
                       dk_load16(f->sign + 2 * t), f->scale[16 * t / group]);
}

DK_AVX512 DK_INLINE void fours_avx512(float *y, const dk_iq_fields *f, const uint32_t *grid, int group)
{
    for (int t = 0; t < 16; t++) {
        __m128i values = _mm_setr_epi32((int)grid[dk_index(f, 4 * t)], (int)grid[dk_index(f, 4 * t + 1)],
                                        (int)grid[dk_index(f, 4 * t + 2)], (int)grid[dk_index(f, 4 * t + 3)]);
        sixteen_avx512(y + 16 * t, values, dk_load16(f->sign + 2 * t), f->scale[16 * t / group]);
    }
}

DK_AVX512 DK_INLINE void shifted_avx512(float *y, const dk_iq1_fields *f, const uint64_t *grid, int group)
{
    for (int t = 0; t < 16; t++) {
        __m128i bytes = two_eights(grid, f->index[2 * t], f->index[2 * t + 1]);
        __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        __m512 delta = _mm512_set1_ps(f->delta[2 * t]);
        delta = _mm512_mask_mov_ps(delta, 0xff00, _mm512_set1_ps(f->delta[2 * t + 1]));
        values = _mm512_add_ps(values, delta);
        _mm512_storeu_ps(y + 16 * t, _mm512_mul_ps(values, _mm512_set1_ps(f->scale[16 * t / group])));
    }
}

#endif

/* A block function: fields by FIELDS with the scale of the half float BITS, then elements by EXPAND. */
#define IQ_BLOCK(NAME, ATTRIBUTE, RECORD, FIELDS, SCALE, EXPAND, GRID, GROUP)                              \
    ATTRIBUTE DK_INLINE void NAME(float *restrict y, const uint8_t *p)                                     \
    {                                                                                                      \
        RECORD f;                                                                                          \
        FIELDS(&f, p, SCALE);                                                                              \
        EXPAND(y, &f, GRID, GROUP);                                                                        \
    }

#ifdef DK_X86
#define IQ_DECODER(TYPE, BYTES, RECORD, BITS, EXPAND, GRID, GROUP)                                         \
    IQ_BLOCK(TYPE##_block, , RECORD, dk_##TYPE##_fields, dk_f16(BITS), EXPAND, GRID, GROUP)                \
    IQ_BLOCK(TYPE##_avx2, DK_AVX2, RECORD, dk_##TYPE##_fields_avx2, _cvtsh_ss(BITS), EXPAND##_avx2, GRID,  \
             GROUP)                                                                                        \
    IQ_BLOCK(TYPE##_avx512, DK_AVX512, RECORD, dk_##TYPE##_fields_avx2, _cvtsh_ss(BITS), EXPAND##_avx512,  \
             GRID, GROUP)                                                                                  \
    DK_DECODER(TYPE, 256, BYTES, TYPE##_block(out, p), TYPE##_avx2(out, p), TYPE##_avx512(out, p))
#else
#define IQ_DECODER(TYPE, BYTES, RECORD, BITS, EXPAND, GRID, GROUP)                                         \
    IQ_BLOCK(TYPE##_block, , RECORD, dk_##TYPE##_fields, dk_f16(BITS), EXPAND, GRID, GROUP)                \
    DK_DECODER(TYPE, 256, BYTES, TYPE##_block(out, p), , )
#endif

IQ_BLOCK(iq2_xxs_block, , dk_iq_fields, dk_iq2_xxs_fields, dk_half(p), eights, dk_grid_iq2_xxs, 32)
IQ_BLOCK(iq2_xs_block, , dk_iq_fields, dk_iq2_xs_fields, dk_half(p), eights, dk_grid_iq2_xs, 16)
IQ_BLOCK(iq3_xxs_block, , dk_iq_fields, dk_iq3_xxs_fields, dk_half(p), fours, dk_grid_iq3_xxs, 32)
DK_GROUP_DECODER(iq2_xxs, 256, 66, iq2_xxs_block(out, p), 32, 43)
DK_GROUP_DECODER(iq2_xs, 256, 74, iq2_xs_block(out, p), 16, 43)
DK_GROUP_DECODER(iq3_xxs, 256, 98, iq3_xxs_block(out, p), 32, 62)
IQ_DECODER(iq2_s, 82, dk_iq_fields, dk_load16(p), eights, dk_grid_iq2_s, 16)
IQ_DECODER(iq3_s, 110, dk_iq_fields, dk_load16(p), fours, dk_grid_iq3_s, 32)
IQ_DECODER(iq1_s, 50, dk_iq1_fields, dk_load16(p), shifted, dk_grid_iq1_s, 32)
IQ_DECODER(iq1_m, 56, dk_iq1_fields, dk_iq1_m_scale(p), shifted, dk_grid_iq1_s, 16)

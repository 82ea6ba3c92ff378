/* Products of IQ2_XXS with few tokens in registers of 256 bits, without scratch. A part of products_256.h.
 *
 * The sums of products_vbmi.c, to the same bits: a group of 32 is one exact integer, times the product of both
 * scales it goes to lane g mod 16 of group g, and the lanes are added in the same order. Signs go to the
 * activations, so that values stay below 44 and bytes can be multiplied as unsigned by signed. */
#ifndef EDGEDSV4_IQ2_XXS_256_H
#define EDGEDSV4_IQ2_XXS_256_H

#include "decode.h"
#include "iq_fields_avx2.h"
#include "products.h"

enum { GRID_TOKENS = 4, GRID_BLOCK = 256, GRID_BYTES = 66, GRID_AHEAD = 4096 };

/* Sums of four products of values up to 43, times one. */
DK_256 DK_INLINE __m256i grid_fours(__m256i values, __m256i q)
{
#if DK_256_HAS_DPBUSD
    return dk_dpbusd(_mm256_setzero_si256(), values, q);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(values, q), _mm256_set1_epi16(1));
#endif
}

/* Totals of eight registers of eight: lane i is that of register i. */
DK_256 DK_INLINE __m256i grid_totals(const __m256i *sums)
{
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[4], sums[5]), _mm256_hadd_epi32(sums[6], sums[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

/* The values of group j of a block, without signs. */
DK_256 DK_INLINE __m256i grid_values(const uint8_t *p, int j)
{
    const uint8_t *index = p + 2 + 8 * j;
#define EIGHT(i) _mm_loadl_epi64((const __m128i *)&dk_grid_iq2_xxs[index[i]])
    __m128i low = _mm_unpacklo_epi64(EIGHT(0), EIGHT(1)), high = _mm_unpacklo_epi64(EIGHT(2), EIGHT(3));
#undef EIGHT
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* Of four words of sign bits, given twice, the j-th: -1 where a bit says minus, else 1. */
DK_256 DK_INLINE __m256i grid_signs(__m256i four, int j)
{
    const int64_t step = 0x0101010101010101, first = 4 * j * step;
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i spread = _mm256_setr_epi64x(first, first + step, first + 2 * step, first + 3 * step);
    __m256i sign = _mm256_and_si256(_mm256_shuffle_epi8(four, spread), bits);
    return _mm256_or_si256(_mm256_cmpeq_epi8(sign, bits), _mm256_set1_epi8(1));
}

/* Add a block of a row to lanes of `tokens` (a constant) tokens. */
DK_256 DK_INLINE void grid_block(__m256 *lanes, const uint8_t *p, const int8_t *q, const float *scale,
                                 int64_t columns, float factor, const int tokens)
{
    dk_iq_fields f;
    __m256i sums[GRID_TOKENS][8];
    dk_iq2_xxs_fields_avx2(&f, p, dk_half_avx2(p) * factor);
    const __m256i words = _mm256_load_si256((const __m256i *)f.sign);
    const __m256i fours[2] = {_mm256_permute4x64_epi64(words, 0x44), _mm256_permute4x64_epi64(words, 0xee)};
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i values = grid_values(p, j), signs = grid_signs(fours[j / 4], j % 4);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(q + t * columns + 32 * j));
            sums[t][j] = grid_fours(values, _mm256_sign_epi8(x, signs));
        }
    }
    const __m256 steps = _mm256_loadu_ps(f.scale);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        __m256 own = _mm256_mul_ps(steps, _mm256_loadu_ps(scale + t * (columns / 32)));
        lanes[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(grid_totals(sums[t])), own, lanes[t]);
    }
}

DK_256 DK_INLINE float grid_total(__m256 first, __m256 second)
{
    __m256 eight = _mm256_add_ps(first, second);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

DK_256 DK_INLINE void grid_rows(const dk_product *p, const dk_block *b, int64_t token, const int tokens)
{
    const int64_t columns = p->w->columns;
    const int8_t *q = p->x->q + token * columns;
    const float *scale = p->x->scale + token * (columns / 32);
    for (int64_t r = b->first_row; r < b->first_row + b->rows; r++) {
        const uint8_t *row = p->w->data + (p->first_row + r) * p->w->row_bytes;
        __m256 first[GRID_TOKENS], second[GRID_TOKENS];
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            first[t] = second[t] = _mm256_setzero_ps();
        for (int64_t c = 0; c < columns; c += GRID_BLOCK, row += GRID_BYTES) {
            __m256 *lanes = c % (2 * GRID_BLOCK) ? second : first;
            __builtin_prefetch(row + GRID_AHEAD, 0, 2);
            grid_block(lanes, row, q + c, scale + c / 32, columns, p->w->factor, tokens);
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            p->y[(token + t) * p->y_stride + r] = grid_total(first[t], second[t]);
    }
}

DK_256 void DK_256_NAME(dk_iq2_xxs)(const dk_product *p, const dk_block *b)
{
    int64_t token = b->first_token, last = b->first_token + b->tokens;
    for (; token + GRID_TOKENS <= last; token += GRID_TOKENS)
        grid_rows(p, b, token, GRID_TOKENS);
    if (last - token == 3)
        grid_rows(p, b, token, 3);
    else if (last - token == 2)
        grid_rows(p, b, token, 2);
    else if (last - token == 1)
        grid_rows(p, b, token, 1);
}

#endif

/* float32 products of few tokens with F32, BF16 and F16, without the scratch of products_float.c: weights go
 * from memory through registers into the sums. Same lanes, same order, same bits. */

#include "products.h"

#if defined(DK_X86)

enum { ROWS = DK_FLOAT_ROWS, LANES = 16, TOKENS = 2 };

/* Sixteen weights, those of `kept`; the rest is 0 and not read. */
DK_AVX512 DK_INLINE __m512 some_weights(const uint8_t *p, const int type, __mmask16 kept)
{
    if (type == DK_F32)
        return _mm512_maskz_loadu_ps(kept, p);
    __m256i halves = _mm256_maskz_loadu_epi16(kept, p);
    if (type == DK_F16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

DK_AVX512 DK_INLINE __m512 weights(const uint8_t *p, const int type)
{
    if (type == DK_F32)
        return _mm512_loadu_ps(p);
    __m256i halves = _mm256_loadu_si256((const __m256i *)p);
    if (type == DK_F16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

DK_AVX512 DK_INLINE float total(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* `rows` rows from r on times `tokens` tokens, all three constants. */
DK_AVX512 DK_INLINE void some_rows(const dk_product *p, int64_t r, int64_t token, const int type,
                                   const int rows, const int tokens)
{
    const dk_matrix *m = p->w;
    const int64_t bytes = type == DK_F32 ? 4 : 2, columns = m->columns;
    const uint8_t *w = m->data + (p->first_row + r) * m->row_bytes;
    const float *x = p->x->x + token * p->x->stride;
    __m512 sum[ROWS * TOKENS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * tokens; i++)
        sum[i] = _mm512_setzero_ps();
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
        __m512 values[TOKENS];
#pragma GCC unroll 2
        for (int t = 0; t < tokens; t++)
            values[t] = _mm512_loadu_ps(x + t * p->x->stride + c);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const uint8_t *place = w + i * m->row_bytes + c * bytes;
            /* The rows after these, a line at a time. */
            if (c * bytes % 64 == 0)
                __builtin_prefetch(place + ROWS * m->row_bytes, 0, 2);
            __m512 weight = weights(place, type);
#pragma GCC unroll 2
            for (int t = 0; t < tokens; t++)
                sum[i * tokens + t] = _mm512_fmadd_ps(weight, values[t], sum[i * tokens + t]);
        }
    }
    if (c < columns) {
        __mmask16 kept = (__mmask16)((1u << (columns - c)) - 1);
#pragma GCC unroll 16
        for (int i = 0; i < rows * tokens; i++) {
            const uint8_t *place = w + i / tokens * m->row_bytes + c * bytes;
            __m512 value = _mm512_maskz_loadu_ps(kept, x + i % tokens * p->x->stride + c);
            sum[i] = _mm512_fmadd_ps(some_weights(place, type, kept), value, sum[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * tokens; i++)
        p->y[(token + i % tokens) * p->y_stride + r + i / tokens] = total(sum[i]);
}

DK_AVX512 DK_INLINE void all_rows(const dk_product *p, const dk_block *b, const int type)
{
    int64_t end = b->first_row + b->rows, last = b->first_token + b->tokens;
    int64_t whole = b->first_row + b->rows / ROWS * ROWS;
    for (int64_t r = b->first_row; r < whole; r += ROWS) {
        int64_t t = b->first_token;
        for (; t + TOKENS <= last; t += TOKENS)
            some_rows(p, r, t, type, ROWS, TOKENS);
        if (t < last)
            some_rows(p, r, t, type, ROWS, 1);
    }
    for (int64_t r = whole; r < end; r++)
        for (int64_t t = b->first_token; t < last; t++)
            some_rows(p, r, t, type, 1, 1);
}

int dk_has_direct(const dk_product *p)
{
    int type = p->w->type;
    return p->tokens <= DK_DIRECT_TOKENS && p->w->factor == 1.0f &&
           (type == DK_F32 || type == DK_BF16 || type == DK_F16);
}

DK_AVX512 void dk_direct_avx512(const dk_product *p, const dk_block *b)
{
    if (p->w->type == DK_F32)
        all_rows(p, b, DK_F32);
    else if (p->w->type == DK_BF16)
        all_rows(p, b, DK_BF16);
    else
        all_rows(p, b, DK_F16);
}

#endif

/* int8 products of few tokens with Q8_0, Q4_0 and MXFP4, without the scratch of products_narrow.c: blocks go
 * from memory through registers into the dot products of up to four tokens. Same lanes, same order, same
 * bits. */

#include "products.h"
#include "unpack_avx512.h"

#if defined(DK_X86)

enum { CHUNK = 64, STEP = 512, ROWS = DK_NARROW_ROWS, TOKENS = 4, MOST_LANES = 8 };

/* Block type, bytes of a block, offset of a group in units of its scale. */
typedef struct {
    int type, bytes;
    float middle;
} layout;

DK_VNNI DK_INLINE __m512 scales_of(const uint8_t *block, const layout l, const int groups)
{
    return l.type == DK_MXFP4 ? dk_powers_avx512(block, groups) : dk_halves_avx512(block, l.bytes, groups);
}

DK_VNNI DK_INLINE __m512i two_blocks(const uint8_t *block, const layout l)
{
    return l.type == DK_MXFP4  ? dk_two_mxfp4(block)
           : l.type == DK_Q8_0 ? dk_two_q8_0(block)
                               : dk_two_q4_0(block);
}

/* Place in the rows and in the tokens. */
typedef struct {
    const uint8_t *w;
    const int8_t *q;
    const float *x, *sum;
} place;

/* Add sixteen groups, or the eight at the end, of some rows to the lanes of some tokens, [rows, tokens]. */
DK_VNNI DK_INLINE void add_groups(__m512 *own, place at, const dk_matrix *m, const layout l, const int groups,
                                  const int rows, const int tokens)
{
    const __m512i eighth = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512 factor = _mm512_set1_ps(m->factor), middle = _mm512_set1_ps(l.middle);
    const __mmask16 kept = groups == 16 ? 0xffff : 0x00ff;
    const int64_t stride = m->columns / 32;
    __m512 scale[MOST_LANES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const uint8_t *row = at.w + r * m->row_bytes;
        for (int k = 0; k < groups * l.bytes; k += 64)
            __builtin_prefetch(row + ROWS * m->row_bytes + k, 0, 2);
        __m512 scales = _mm512_maskz_mul_ps(kept, scales_of(row, l, groups), factor);
        __m512 offsets = _mm512_mul_ps(scales, middle);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m512 *lanes = &own[r * tokens + t];
            *lanes = _mm512_fmadd_ps(offsets, _mm512_maskz_loadu_ps(kept, at.sum + t * stride), *lanes);
            scale[r * tokens + t] = _mm512_mul_ps(scales, _mm512_maskz_loadu_ps(kept, at.x + t * stride));
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < groups / 2; i++) {
        __m512i places = _mm512_add_epi32(eighth, _mm512_set1_epi32(2 * i));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i u = two_blocks(at.w + r * m->row_bytes + 2 * i * l.bytes, l);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                __m512i q = _mm512_loadu_si512(at.q + t * m->columns + CHUNK * i);
                __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, q);
                __m512 weight = _mm512_permutexvar_ps(places, scale[r * tokens + t]);
                own[r * tokens + t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), weight, own[r * tokens + t]);
            }
        }
    }
}

/* Lanes of some rows, the first at w, and of some tokens. */
DK_VNNI DK_INLINE void dot_rows(__m512 *own, const uint8_t *w, const dk_matrix *m, const dk_input *in,
                                int64_t token, const layout l, const int rows, const int tokens)
{
    int64_t group = token * (m->columns / 32), c = 0;
    place at = {w, in->q + token * m->columns, in->scale + group, in->sum32 + group};
    for (; c + STEP <= m->columns; c += STEP) {
        add_groups(own, at, m, l, 16, rows, tokens);
        at = (place){at.w + 16 * l.bytes, at.q + STEP, at.x + 16, at.sum + 16};
    }
    if (c < m->columns)
        add_groups(own, at, m, l, 8, rows, tokens);
}

DK_VNNI DK_INLINE __m128 quarters(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/* Four rows from r on: at once for one or two tokens, two and two for more, as far as registers go. */
DK_VNNI DK_INLINE void four_rows(const dk_product *p, int64_t r, int64_t token, const layout l,
                                 const int tokens)
{
    const dk_matrix *m = p->w;
    const uint8_t *w = m->data + (p->first_row + r) * m->row_bytes;
    __m512 own[ROWS * TOKENS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * tokens; i++)
        own[i] = _mm512_setzero_ps();
    if (tokens <= 2) {
        dot_rows(own, w, m, p->x, token, l, ROWS, tokens);
    } else {
        dot_rows(own, w, m, p->x, token, l, ROWS / 2, tokens);
        dot_rows(own + 2 * tokens, w + 2 * m->row_bytes, m, p->x, token, l, ROWS / 2, tokens);
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        __m128 s0 = quarters(own[t]), s1 = quarters(own[tokens + t]);
        __m128 s2 = quarters(own[2 * tokens + t]), s3 = quarters(own[3 * tokens + t]);
        __m128 low = _mm_add_ps(_mm_unpacklo_ps(s0, s1), _mm_unpackhi_ps(s0, s1));
        __m128 high = _mm_add_ps(_mm_unpacklo_ps(s2, s3), _mm_unpackhi_ps(s2, s3));
        _mm_storeu_ps(p->y + (token + t) * p->y_stride + r,
                      _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
    }
}

DK_VNNI DK_INLINE void all_rows(const dk_product *p, const dk_block *b, const layout l)
{
    int64_t r = b->first_row, end = b->first_row + b->rows, last = b->first_token + b->tokens;
    for (; r + ROWS <= end; r += ROWS) {
        int64_t t = b->first_token;
        for (; t + TOKENS <= last; t += TOKENS)
            four_rows(p, r, t, l, TOKENS);
        if (last - t == 3)
            four_rows(p, r, t, l, 3);
        else if (last - t == 2)
            four_rows(p, r, t, l, 2);
        else if (last - t == 1)
            four_rows(p, r, t, l, 1);
    }
    if (r < end) {
        dk_block rest = {r, end - r, b->first_token, b->tokens};
        dk_narrow_vnni(p, &rest);
    }
}

int dk_has_single(const dk_product *p)
{
    int type = p->w->type;
    return p->tokens <= DK_SINGLE_TOKENS && p->w->columns % (STEP / 2) == 0 &&
           (type == DK_Q8_0 || type == DK_Q4_0 || type == DK_MXFP4);
}

DK_VNNI void dk_single_vnni(const dk_product *p, const dk_block *b)
{
    if (p->w->type == DK_Q8_0)
        all_rows(p, b, (layout){DK_Q8_0, 34, -128.0f});
    else if (p->w->type == DK_Q4_0)
        all_rows(p, b, (layout){DK_Q4_0, 18, -8.0f});
    else
        all_rows(p, b, (layout){DK_MXFP4, 17, -12.0f});
}

#endif

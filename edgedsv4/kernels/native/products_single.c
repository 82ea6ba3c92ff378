/* int8 products of one token with Q8_0, Q4_0 and MXFP4, without the scratch of products_narrow.c: blocks go
 * from memory through registers into the dot product. Same lanes, same order, same bits. */

#include "products.h"
#include "unpack_avx512.h"

#if defined(DK_X86)

enum { CHUNK = 64, STEP = 512, ROWS = DK_NARROW_ROWS };

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

/* Place in the rows and in the token. */
typedef struct {
    const uint8_t *w;
    const int8_t *q;
    const float *x, *sum;
} place;

/* Add sixteen groups, or the eight at the end, of four rows. */
DK_VNNI DK_INLINE void add_groups(__m512 *own, place at, const dk_matrix *m, const layout l, const int groups)
{
    const __m512i eighth = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512 factor = _mm512_set1_ps(m->factor), middle = _mm512_set1_ps(l.middle);
    const __mmask16 kept = groups == 16 ? 0xffff : 0x00ff;
    __m512 scale[ROWS], token_scale = _mm512_maskz_loadu_ps(kept, at.x);
    __m512 sums = _mm512_maskz_loadu_ps(kept, at.sum);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        const uint8_t *row = at.w + r * m->row_bytes;
        for (int k = 0; k < groups * l.bytes; k += 64)
            __builtin_prefetch(row + ROWS * m->row_bytes + k, 0, 2);
        __m512 scales = _mm512_maskz_mul_ps(kept, scales_of(row, l, groups), factor);
        own[r] = _mm512_fmadd_ps(_mm512_mul_ps(scales, middle), sums, own[r]);
        scale[r] = _mm512_mul_ps(scales, token_scale);
    }
#pragma GCC unroll 8
    for (int i = 0; i < groups / 2; i++) {
        __m512i places = _mm512_add_epi32(eighth, _mm512_set1_epi32(2 * i));
        __m512i values = _mm512_loadu_si512(at.q + CHUNK * i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            __m512i u = two_blocks(at.w + r * m->row_bytes + 2 * i * l.bytes, l);
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, values);
            __m512 weight = _mm512_permutexvar_ps(places, scale[r]);
            own[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), weight, own[r]);
        }
    }
}

/* Lanes of four rows, the first at w. */
DK_VNNI DK_INLINE void dot_rows(__m512 *own, const uint8_t *w, const dk_matrix *m, const dk_input *in,
                                int64_t token, const layout l)
{
    int64_t group = token * (m->columns / 32), c = 0;
    place at = {w, in->q + token * m->columns, in->scale + group, in->sum32 + group};
    for (; c + STEP <= m->columns; c += STEP) {
        add_groups(own, at, m, l, 16);
        at = (place){at.w + 16 * l.bytes, at.q + STEP, at.x + 16, at.sum + 16};
    }
    if (c < m->columns)
        add_groups(own, at, m, l, 8);
}

DK_VNNI DK_INLINE __m128 quarters(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

DK_VNNI DK_INLINE void all_rows(const dk_product *p, const dk_block *b, const layout l)
{
    int64_t r = b->first_row, end = b->first_row + b->rows;
    for (; r + ROWS <= end; r += ROWS) {
        __m512 own[ROWS] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                            _mm512_setzero_ps()};
        dot_rows(own, p->w->data + (p->first_row + r) * p->w->row_bytes, p->w, p->x, b->first_token, l);
        __m128 s0 = quarters(own[0]), s1 = quarters(own[1]), s2 = quarters(own[2]), s3 = quarters(own[3]);
        __m128 low = _mm_add_ps(_mm_unpacklo_ps(s0, s1), _mm_unpackhi_ps(s0, s1));
        __m128 high = _mm_add_ps(_mm_unpacklo_ps(s2, s3), _mm_unpackhi_ps(s2, s3));
        _mm_storeu_ps(p->y + b->first_token * p->y_stride + r,
                      _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
    }
    if (r < end) {
        dk_block rest = {r, end - r, b->first_token, b->tokens};
        dk_narrow_vnni(p, &rest);
    }
}

int dk_has_single(const dk_product *p)
{
    int type = p->w->type;
    return p->tokens == 1 && p->w->columns % (STEP / 2) == 0 &&
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

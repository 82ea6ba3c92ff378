/* int8 products of few tokens without the scratch of products_narrow.c: superblocks of four rows go from memory
 * through registers into the dot products of up to four tokens.
 *
 * Sixteen float lanes per (row, token): superblocks come in order, in each the offsets first, then two or four
 * sums of products, so nothing depends on how many rows or tokens are in hand. The lanes are other ones than in
 * products_narrow.c, and the type and columns of a matrix decide which of the two multiplies it. */

#include "products.h"
#include "superblocks_k.h"
#include "superblocks_small.h"

#if defined(DK_X86)

enum { SUPERBLOCK = 256, ROWS = DK_NARROW_ROWS, TOKENS = 4, MOST_LANES = 8 };

DK_VNNI DK_INLINE dk_pair codes_of(const uint8_t *p, const dk_form f, const int half)
{
    switch (f.type) {
    case DK_Q8_0: return q8_0_codes(p, half);
    case DK_Q4_0: return q4_0_codes(p, half);
    case DK_MXFP4: return mxfp4_codes(p, half);
    case DK_NVFP4: return nvfp4_codes(p, half);
    case DK_IQ4_NL: return iq4_nl_codes(p, half);
    case DK_IQ4_XS: return iq4_xs_codes(p, half);
    case DK_Q2_K: return q2_k_codes(p, half);
    case DK_Q3_K: return q3_k_codes(p, half);
    case DK_Q4_K: return q4_k_codes(p, half);
    case DK_Q5_K: return q5_k_codes(p, half);
    default: return q6_k_codes(p, half);
    }
}

DK_VNNI DK_INLINE dk_weights weights_of(const uint8_t *p, const dk_form f)
{
    switch (f.type) {
    case DK_Q8_0: return q8_0_weights(p);
    case DK_Q4_0:
    case DK_IQ4_NL: return q4_0_weights(p);
    case DK_MXFP4: return mxfp4_weights(p);
    case DK_NVFP4: return nvfp4_weights(p);
    case DK_IQ4_XS: return iq4_xs_weights(p);
    case DK_Q2_K: return q2_k_weights(p);
    case DK_Q3_K: return q3_k_weights(p);
    case DK_Q4_K:
    case DK_Q5_K: return six_bit_weights(p);
    default: return q6_k_weights(p);
    }
}

/* What scales and sums of activations are multiplied with, whatever the row: the matrix's factor, the part of a
 * scale that a code's place in its byte makes, and the units of offsets. */
DK_VNNI DK_INLINE dk_weights steps_of(const dk_form f, float factor)
{
    const __m512 all = _mm512_set1_ps(factor), offsets = _mm512_mul_ps(all, _mm512_set1_ps(f.middle));
    __m512 scales = all;
    if (f.type == DK_Q4_K) /* groups 0 4 1 5 2 6 3 7: odd ones are high nibbles */
        scales = _mm512_mask_mul_ps(all, 0xcccc, all, _mm512_set1_ps(0.0625f));
    if (f.type == DK_Q2_K || f.type == DK_Q3_K) /* every second plane of 32 elements is two bits up */
        scales = _mm512_mask_mul_ps(all, 0xcccc, all, _mm512_set1_ps(0.25f));
    if (f.type == DK_Q2_K)
        scales = _mm512_mask_mul_ps(scales, 0xf0f0, scales, _mm512_set1_ps(0.0625f));
    return (dk_weights){f.group == 32 ? _mm512_mask_mov_ps(scales, 0xff00, offsets) : scales, offsets};
}

/* A superblock of four rows, and the activations of the first token that go with it. */
typedef struct {
    const uint8_t *w[ROWS];
    const int8_t *q;
    const float *x, *sum32, *sum16;
} place;

/* Scales and sums of a token, times the steps. */
DK_VNNI DK_INLINE dk_weights activations_of(const place *at, int64_t token, int64_t columns, const dk_form f,
                                            const dk_weights steps)
{
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i mixed = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m512 x = _mm512_castps256_ps512(_mm256_loadu_ps(at->x + token * (columns / 32))), sums = x;
    if (f.group == 16) {
        x = _mm512_permutexvar_ps(twice, x);
        sums = _mm512_loadu_ps(at->sum16 + token * (columns / 16));
    } else {
        x = _mm512_insertf32x8(x, _mm256_loadu_ps(at->sum32 + token * (columns / 32)), 1);
        if (f.order == DK_CROSSED)
            x = _mm512_permutexvar_ps(mixed, x);
    }
    return (dk_weights){_mm512_mul_ps(x, steps.scale), _mm512_mul_ps(sums, steps.offset)};
}

/* Add the sum of products of a register of codes, or of two, times the scale of its group. */
DK_VNNI DK_INLINE __m512 add_sum(__m512 lanes, __m512i sum, __m512 scale, const dk_form f, const int i)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(dk_groups(f, i), scale), lanes);
}

/* Add a superblock of some rows to the lanes of some tokens, [rows, tokens]. */
DK_VNNI DK_INLINE void add_superblock(__m512 *own, const place *at, int64_t columns, int64_t ahead,
                                      const dk_weights steps, const dk_form f, const int rows, const int tokens)
{
    const __m512i zero = _mm512_setzero_si512();
    __m512 scale[MOST_LANES];
    dk_weights x[TOKENS];
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
        x[t] = activations_of(at, t, columns, f, steps);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        for (int k = 0; k < f.bytes; k += 64)
            __builtin_prefetch(at->w[r] + ahead + k, 0, 2);
        dk_weights w = weights_of(at->w[r], f);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m512 *lanes = &own[r * tokens + t];
            __m512 product = _mm512_mul_ps(w.scale, x[t].scale);
            *lanes = f.group == 16 ? _mm512_fmadd_ps(w.offset, x[t].offset, *lanes)
                                   : _mm512_mask_add_ps(*lanes, 0xff00, *lanes, product);
            scale[r * tokens + t] = product;
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        dk_pair q[TOKENS];
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            q[t] = dk_ordered(at->q + t * columns + 128 * half, f.order);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            dk_pair u = codes_of(at->w[r], f, half);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                int i = r * tokens + t;
                __m512i first = _mm512_dpbusd_epi32(zero, u.first, q[t].first);
                if (f.order == DK_NATURAL)
                    own[i] = add_sum(own[i], first, scale[i], f, 2 * half);
                __m512i second = _mm512_dpbusd_epi32(f.order == DK_NATURAL ? zero : first, u.second, q[t].second);
                own[i] = add_sum(own[i], second, scale[i], f, f.order == DK_NATURAL ? 2 * half + 1 : half);
            }
        }
    }
}

/* Lanes of some rows and tokens. */
DK_VNNI DK_INLINE void dot_rows(__m512 *own, const uint8_t *const *w, const dk_product *p, int64_t token,
                                const dk_form f, const int rows, const int tokens)
{
    const dk_input *x = p->x;
    const int64_t columns = p->w->columns, group = token * (columns / 32), ahead = ROWS * p->w->row_bytes;
    const dk_weights steps = steps_of(f, p->w->factor);
    place at = {{w[0], w[1]}, x->q + token * columns, x->scale + group, x->sum32 + group, x->sum16 + 2 * group};
    for (int r = 2; r < rows; r++)
        at.w[r] = w[r];
    for (int64_t c = 0; c < columns; c += SUPERBLOCK) {
        add_superblock(own, &at, columns, ahead, steps, f, rows, tokens);
        for (int r = 0; r < rows; r++)
            at.w[r] += f.bytes;
        at.q += SUPERBLOCK;
        at.x += SUPERBLOCK / 32;
        at.sum32 += SUPERBLOCK / 32;
        at.sum16 += SUPERBLOCK / 16;
    }
}

DK_VNNI DK_INLINE __m128 quarters(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/* Four rows, of which `kept` are wanted: at once for one or two tokens, two and two for more, as far as
 * registers go. */
DK_VNNI DK_INLINE void four_rows(float *y, int64_t y_stride, __mmask8 kept, const uint8_t *const *w,
                                 const dk_product *p, int64_t token, const dk_form f, const int tokens)
{
    __m512 own[ROWS * TOKENS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * tokens; i++)
        own[i] = _mm512_setzero_ps();
    if (tokens <= 2) {
        dot_rows(own, w, p, token, f, ROWS, tokens);
    } else {
        dot_rows(own, w, p, token, f, ROWS / 2, tokens);
        dot_rows(own + 2 * tokens, w + 2, p, token, f, ROWS / 2, tokens);
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        __m128 s0 = quarters(own[t]), s1 = quarters(own[tokens + t]);
        __m128 s2 = quarters(own[2 * tokens + t]), s3 = quarters(own[3 * tokens + t]);
        __m128 low = _mm_add_ps(_mm_unpacklo_ps(s0, s1), _mm_unpackhi_ps(s0, s1));
        __m128 high = _mm_add_ps(_mm_unpacklo_ps(s2, s3), _mm_unpackhi_ps(s2, s3));
        _mm_mask_storeu_ps(y + (token + t) * y_stride, kept,
                           _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
    }
}

/* Past the end of the block, its last row stands for the missing ones. */
DK_VNNI DK_INLINE void all_rows(const dk_product *p, const dk_block *b, const dk_form f)
{
    int64_t end = b->first_row + b->rows, last = b->first_token + b->tokens;
    for (int64_t row = b->first_row; row < end; row += ROWS) {
        const uint8_t *w[ROWS];
        for (int64_t r = 0; r < ROWS; r++)
            w[r] = p->w->data + (p->first_row + dk_min(row + r, end - 1)) * p->w->row_bytes;
        __mmask8 kept = (__mmask8)((1u << dk_min(ROWS, end - row)) - 1);
        float *y = p->y + row;
        int64_t t = b->first_token;
        for (; t + TOKENS <= last; t += TOKENS)
            four_rows(y, p->y_stride, kept, w, p, t, f, TOKENS);
        if (last - t == 3)
            four_rows(y, p->y_stride, kept, w, p, t, f, 3);
        else if (last - t == 2)
            four_rows(y, p->y_stride, kept, w, p, t, f, 2);
        else if (last - t == 1)
            four_rows(y, p->y_stride, kept, w, p, t, f, 1);
    }
}

#define SINGLE(NAME, ...)                                                                                  \
    DK_VNNI static void NAME##_rows(const dk_product *p, const dk_block *b)                                \
    {                                                                                                      \
        all_rows(p, b, (dk_form){__VA_ARGS__});                                                            \
    }

SINGLE(q8_0, DK_Q8_0, 272, 32, DK_NATURAL, -128.0f)
SINGLE(q4_0, DK_Q4_0, 144, 32, DK_BY_GROUP, -8.0f)
SINGLE(mxfp4, DK_MXFP4, 136, 32, DK_BY_GROUP, -12.0f)
SINGLE(nvfp4, DK_NVFP4, 144, 16, DK_BY_EIGHT, -12.0f)
SINGLE(iq4_nl, DK_IQ4_NL, 144, 32, DK_BY_GROUP, -127.0f)
SINGLE(iq4_xs, DK_IQ4_XS, 136, 32, DK_BY_GROUP, -127.0f)
SINGLE(q2_k, DK_Q2_K, 84, 16, DK_NATURAL, -1.0f)
SINGLE(q3_k, DK_Q3_K, 110, 16, DK_NATURAL, -4.0f)
SINGLE(q4_k, DK_Q4_K, 144, 32, DK_CROSSED, -1.0f)
SINGLE(q5_k, DK_Q5_K, 176, 32, DK_CROSSED, -1.0f)
SINGLE(q6_k, DK_Q6_K, 210, 16, DK_NATURAL, -32.0f)

dk_block_fn dk_single_of(const dk_product *p)
{
    if (p->w->columns % SUPERBLOCK)
        return NULL;
    switch (p->w->type) {
    case DK_IQ2_XXS: return dk_level >= DK_LEVEL_VBMI && p->w->columns <= DK_VBMI_COLUMNS ? dk_iq2_xxs_vbmi : NULL;
    case DK_Q8_0: return q8_0_rows;
    case DK_Q4_0: return q4_0_rows;
    case DK_MXFP4: return mxfp4_rows;
    case DK_NVFP4: return nvfp4_rows;
    case DK_IQ4_NL: return iq4_nl_rows;
    case DK_IQ4_XS: return iq4_xs_rows;
    case DK_Q2_K: return q2_k_rows;
    case DK_Q3_K: return q3_k_rows;
    case DK_Q4_K: return q4_k_rows;
    case DK_Q5_K: return q5_k_rows;
    case DK_Q6_K: return q6_k_rows;
    default: return NULL;
    }
}

#endif

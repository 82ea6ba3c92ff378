/* int8 products of IQ2_XXS with few tokens, by byte permutations (AVX-512 VBMI) instead of look-ups in memory.
 *
 * An index stands for eight values out of three, so sixteen bits say them all: dk_codes_iq2_xxs, which fits into
 * eight registers. 64 indices at a time become their codes by permutation; a code and its sign are an index into
 * 64 bytes, where the unsigned value stands. Register e then holds value e of all 64 indices, byte 4 j .. 4 j + 3
 * those of group j, so the sums of a dot product are those of sixteen whole groups and the eight registers add up
 * in integers. Activations are put into the same order once per block of rows.
 *
 * Sixteen float lanes per (row, token): lane j takes groups j, j + 16, .. in order, each as its exact integer
 * times the product of both scales, so nothing depends on how many rows or tokens are in hand. iq2_xxs_256.h
 * does the same with look-ups of eight bytes, to the same bits. */

#include "iq_fields.h"
#include "products.h"
#include "superblocks.h"

#if defined(DK_X86)

enum { BLOCK = 256, BLOCK_BYTES = 66, STEP = 512, GROUPS = 16, EIGHTS = 8, TOKENS = 4, BIAS = 43 };
enum { AHEAD = 4096 }; /* bytes between what is multiplied and what is asked for */

/* Activations of a token by value in an eight, then by index; and -43 times the sum of each group, for codes
 * that are 43 too large. */
typedef struct {
    int8_t q[STEP / 64][64] DK_ALIGNED;
    int32_t offset[GROUPS] DK_ALIGNED;
} step_input;

/* Registers of constants. */
typedef struct {
    __m512i low[4], high[4]; /* codes of the first four and of the last four values, by index */
    __m512i first, second;   /* values by sign and code: of an even value, of an odd one */
} tables;

/* ---- activations ---- */

/* Eight 64-bit columns of eight registers become registers. */
DK_VBMI DK_INLINE void transpose(__m512i *a)
{
    __m512i pairs[EIGHTS];
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]);
        pairs[4 + i] = _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        const __m512i *p = pairs + 4 * i;
        __m512i front = _mm512_shuffle_i64x2(p[0], p[1], 0x44), front2 = _mm512_shuffle_i64x2(p[2], p[3], 0x44);
        __m512i back = _mm512_shuffle_i64x2(p[0], p[1], 0xee), back2 = _mm512_shuffle_i64x2(p[2], p[3], 0xee);
        a[i] = _mm512_shuffle_i64x2(front, front2, 0x88);
        a[2 + i] = _mm512_shuffle_i64x2(front, front2, 0xdd);
        a[4 + i] = _mm512_shuffle_i64x2(back, back2, 0x88);
        a[6 + i] = _mm512_shuffle_i64x2(back, back2, 0xdd);
    }
}

/* One token; past its end are zeros. */
DK_VBMI static void order_token(step_input *to, const int8_t *q, int64_t columns)
{
    const __m512i bytes = _mm512_setr_epi64(0x3830282018100800, 0x3931292119110901, 0x3a322a221a120a02,
                                            0x3b332b231b130b03, 0x3c342c241c140c04, 0x3d352d251d150d05,
                                            0x3e362e261e160e06, 0x3f372f271f170f07);
    const __m512i bias = _mm512_set1_epi8(BIAS);
    for (int64_t c = 0; c < columns; c += STEP, to++) {
        __m512i eights[EIGHTS], sum = _mm512_setzero_si512();
        for (int i = 0; i < EIGHTS; i++) {
            int64_t place = c + 64 * i;
            __m512i x = place < columns ? _mm512_loadu_si512(q + place) : _mm512_setzero_si512();
            eights[i] = _mm512_permutexvar_epi8(bytes, x);
        }
        transpose(eights);
        for (int i = 0; i < EIGHTS; i++) {
            _mm512_store_si512(to->q[i], eights[i]);
            sum = _mm512_dpbusd_epi32(sum, bias, eights[i]);
        }
        _mm512_store_si512(to->offset, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
}

/* ---- weights ---- */

DK_VBMI DK_INLINE tables tables_of(void)
{
    const int up = 0x56564433, down = 0x00001223; /* 43 + 8, 25, 43; 43 - 8, 25, 43 */
    const int up8 = 0x33333333, up25 = 0x44444444, up43 = 0x56565656, down8 = 0x23232323, down25 = 0x12121212;
    tables t;
    for (int i = 0; i < 4; i++) {
        t.low[i] = _mm512_loadu_si512(dk_codes_iq2_xxs + 64 * i);
        t.high[i] = _mm512_loadu_si512(dk_codes_iq2_xxs + 256 + 64 * i);
    }
    t.first = _mm512_setr_epi32(up, up, up, up, down, down, down, down, up, up, up, up, down, down, down, down);
    t.second = _mm512_setr_epi32(up8, up25, up43, up43, up8, up25, up43, up43,
                                 down8, down25, 0, 0, down8, down25, 0, 0);
    return t;
}

/* Bytes of a table of 256 by index. */
DK_VBMI DK_INLINE __m512i look_up(const __m512i *table, __m512i index, const __mmask64 *quarters)
{
    __m512i found = _mm512_permutexvar_epi8(index, table[0]);
    found = _mm512_mask_permutexvar_epi8(found, quarters[0], index, table[1]);
    found = _mm512_mask_permutexvar_epi8(found, quarters[1], index, table[2]);
    return _mm512_mask_permutexvar_epi8(found, quarters[2], index, table[3]);
}

/* Half-precision scales of two blocks, or of one and zero, times factor: eight lanes each. */
DK_VBMI DK_INLINE __m512 two_scales(const uint8_t *p, const int blocks, float factor)
{
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m128i words = _mm_cvtsi32_si128(dk_load16(p));
    if (blocks == 2)
        words = _mm_insert_epi16(words, dk_load16(p + BLOCK_BYTES), 1);
    __m128 d = _mm_mul_ps(_mm_cvtph_ps(words), _mm_set1_ps(factor));
    return _mm512_permutexvar_ps(halves, _mm512_castps128_ps512(d));
}

/* Add one or two blocks of a row to the lanes of some tokens. */
DK_VBMI DK_INLINE void add_step(__m512 *lanes, const uint8_t *p, const step_input *const *x, const float *scale,
                                int64_t stride, const tables *t, float factor, const int blocks, const int tokens)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512i sevens = _mm512_set1_epi64(0x352e272015 << 24 | 0x0e0700);
    /* Bits 4 and 5 from two of seven sign bits; the eighth makes the number of signs even. */
    static const int64_t pairs[4] = {0x01020000, 0x04080000, 0x10200000, 0x407f0000};
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i a = dk_load_once(p + 2);
    __m512i b = blocks == 2 ? dk_load_once(p + BLOCK_BYTES + 2) : _mm512_setzero_si512();
    __m512i index = _mm512_permutex2var_epi32(a, even, b), words = _mm512_permutex2var_epi32(a, odd, b);
    __mmask64 bit6 = _mm512_test_epi8_mask(index, _mm512_set1_epi8(64)), bit7 = _mm512_movepi8_mask(index);
    const __mmask64 quarters[3] = {bit6 & ~bit7, bit7 & ~bit6, bit6 & bit7};
    __m512i signs = _mm512_multishift_epi64_epi8(sevens, words);
    __m512i codes[4] = {look_up(t->low, index, quarters)};
    codes[2] = look_up(t->high, index, quarters);
    codes[1] = _mm512_srli_epi16(codes[0], 4);
    codes[3] = _mm512_srli_epi16(codes[2], 4);
    __m512i sums[TOKENS];
#pragma GCC unroll 4
    for (int i = 0; i < tokens; i++)
        sums[i] = _mm512_load_si512(x[i]->offset);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i places = _mm512_gf2p8affine_epi64_epi8(signs, _mm512_set1_epi64(pairs[k]), 0);
        places = dk_bits_or(codes[k], nibble, places);
        __m512i first = _mm512_permutexvar_epi8(places, t->first);
        __m512i second = _mm512_permutexvar_epi8(places, t->second);
#pragma GCC unroll 4
        for (int i = 0; i < tokens; i++) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], first, _mm512_load_si512(x[i]->q[2 * k]));
            sums[i] = _mm512_dpbusd_epi32(sums[i], second, _mm512_load_si512(x[i]->q[2 * k + 1]));
        }
    }
    __m512 steps = _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 28));
    steps = _mm512_mul_ps(_mm512_add_ps(steps, _mm512_set1_ps(0.5f)), two_scales(p, blocks, 0.25f * factor));
#pragma GCC unroll 4
    for (int i = 0; i < tokens; i++) {
        __m512 own = blocks == 2 ? _mm512_loadu_ps(scale + i * stride)
                                 : _mm512_maskz_loadu_ps(0xff, scale + i * stride);
        lanes[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i]), _mm512_mul_ps(steps, own), lanes[i]);
    }
}

DK_VBMI DK_INLINE float total_of_16(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* All rows of a block, times `tokens` (a constant) tokens from `token` on. */
DK_VBMI DK_INLINE void all_rows(const dk_product *p, const dk_block *b, int64_t token, const tables *t,
                                const int tokens)
{
    step_input ordered[TOKENS][DK_VBMI_COLUMNS / STEP];
    const int64_t columns = p->w->columns, groups = columns / 32;
    const float *scales = p->x->scale + token * groups;
    for (int i = 0; i < tokens; i++)
        order_token(ordered[i], p->x->q + (token + i) * columns, columns);
    for (int64_t r = b->first_row; r < b->first_row + b->rows; r++) {
        const uint8_t *row = p->w->data + (p->first_row + r) * p->w->row_bytes;
        const float *scale = scales;
        const step_input *x[TOKENS];
        __m512 lanes[TOKENS];
#pragma GCC unroll 4
        for (int i = 0; i < tokens; i++) {
            x[i] = ordered[i];
            lanes[i] = _mm512_setzero_ps();
        }
        int64_t c = 0;
        for (; c + STEP <= columns; c += STEP, row += 2 * BLOCK_BYTES, scale += GROUPS) {
            __builtin_prefetch(row + AHEAD, 0, 2);
            __builtin_prefetch(row + AHEAD + 64, 0, 2);
            add_step(lanes, row, x, scale, groups, t, p->w->factor, 2, tokens);
#pragma GCC unroll 4
            for (int i = 0; i < tokens; i++)
                x[i]++;
        }
        if (c < columns)
            add_step(lanes, row, x, scale, groups, t, p->w->factor, 1, tokens);
#pragma GCC unroll 4
        for (int i = 0; i < tokens; i++)
            p->y[(token + i) * p->y_stride + r] = total_of_16(lanes[i]);
    }
}

DK_VBMI void dk_iq2_xxs_vbmi(const dk_product *p, const dk_block *b)
{
    const tables t = tables_of();
    int64_t token = b->first_token, last = b->first_token + b->tokens;
    for (; token + TOKENS <= last; token += TOKENS)
        all_rows(p, b, token, &t, TOKENS);
    if (last - token == 3)
        all_rows(p, b, token, &t, 3);
    else if (last - token == 2)
        all_rows(p, b, token, &t, 2);
    else if (last - token == 1)
        all_rows(p, b, token, &t, 1);
}

#endif

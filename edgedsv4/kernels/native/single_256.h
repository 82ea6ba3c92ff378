/* Products of few tokens without scratch: blocks go from memory through registers into the dot products of up to
 * four tokens. A part of products_256.h.
 *
 * Eight float lanes per (row, token): lane i of a block of 32 columns takes the dot product of its elements
 * 4 i .. 4 i + 3. Steps of eight blocks come in order, before each the offsets of its blocks (lane i: block i),
 * so nothing depends on how many rows or tokens are in hand.
 */
#ifndef EDGEDSV4_SINGLE_256_H
#define EDGEDSV4_SINGLE_256_H

#include "decode.h"
#include "products.h"

enum { SINGLE_ROWS = DK_NARROW_ROWS, SINGLE_MOST = 4, BLOCKS = 8, STEP = 256 };

/* Block type, bytes of 256 columns, offset of a block in units of its scale. */
typedef struct {
    int type, bytes;
    float middle;
} layout;

/* Bytes 0: the type has no such form. Q8_0 is taken as signed. */
DK_INLINE layout single_layout_of(int type)
{
    switch (type) {
    case DK_Q8_0: return (layout){DK_Q8_0, 8 * 34, 0.0f};
    case DK_Q4_0: return (layout){DK_Q4_0, 8 * 18, -8.0f};
    case DK_MXFP4: return (layout){DK_MXFP4, 8 * 17, -12.0f};
    case DK_FP4_E2M1: return (layout){DK_FP4_E2M1, 8 * 16, -12.0f};
    case DK_Q2_K: return (layout){DK_Q2_K, 84, 0.0f};
    case DK_Q4_K: return (layout){DK_Q4_K, 144, 0.0f};
    case DK_Q5_K: return (layout){DK_Q5_K, 176, 0.0f};
    case DK_Q6_K: return (layout){DK_Q6_K, 210, -32.0f};
    default: return (layout){0, 0, 0.0f};
    }
}

/* ---- what stands at the head of eight blocks ---- */

typedef struct {
    __m256 scale, offset, offset2; /* of blocks; Q2_K and Q6_K have an offset for every half of one */
    __m256i sub;                   /* of these: 16 bits, scales of the first halves, then of the second */
} heads;

/* Two bytes of each of `blocks` blocks that lie `bytes` apart; past the last it is repeated. Sixteen bytes of a
 * block are there to be read. */
DK_256 DK_INLINE __m128i words_of(const uint8_t *p, const int bytes, int64_t blocks)
{
#define BLOCK(k) _mm_loadu_si128((const __m128i *)(p + bytes * (k < blocks ? k : blocks - 1)))
    __m128i a = _mm_unpacklo_epi16(BLOCK(0), BLOCK(1)), b = _mm_unpacklo_epi16(BLOCK(2), BLOCK(3));
    __m128i c = _mm_unpacklo_epi16(BLOCK(4), BLOCK(5)), d = _mm_unpacklo_epi16(BLOCK(6), BLOCK(7));
#undef BLOCK
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
}

/* Half of 2^(byte - 127). */
DK_256 DK_INLINE __m256 half_powers(__m256i byte)
{
    const __m256i one = _mm256_set1_epi32(1), tiny = _mm256_set1_epi32(0x00200000);
    __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(byte, one), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_sllv_epi32(tiny, _mm256_min_epi32(byte, one))));
}

/* `blocks` bytes; the rest is the last one. */
DK_256 DK_INLINE __m256i powers_at(const uint8_t *powers, int64_t blocks)
{
    uint64_t eight = 0;
    if (blocks == BLOCKS)
        eight = dk_load64(powers);
    else
        for (int64_t k = 0; k < BLOCKS; k++)
            eight |= (uint64_t)powers[dk_min(k, blocks - 1)] << 8 * k;
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)eight));
}

DK_256 DK_INLINE __m256 both_halves(const uint8_t *p, float factor, __m256 *second)
{
    __m128 two = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128((int32_t)dk_load32(p))), _mm_set1_ps(factor));
    *second = _mm256_broadcastss_ps(_mm_movehdup_ps(two));
    return _mm256_broadcastss_ps(two);
}

DK_256 DK_INLINE __m256 floats_of(uint64_t bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes)));
}

/* Whether halves of a block have scales and offsets of their own. */
DK_256 DK_INLINE int has_halves(const layout l) { return l.type == DK_Q2_K || l.type == DK_Q6_K; }

/* Sixteen bytes of halves: as 16 bits, first halves, then second ones. */
DK_256 DK_INLINE __m256i apart(__m128i bytes)
{
    const __m128i places = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, places));
}

DK_256 DK_INLINE heads q2_k_heads(const uint8_t *p, float factor)
{
    const __m128i nibble = _mm_set1_epi8(15);
    __m128i packed = _mm_loadu_si128((const __m128i *)p);
    __m128i offsets = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    heads h;
    __m256 m;
    h.scale = both_halves(p + 80, factor, &m);
    m = _mm256_xor_ps(m, _mm256_set1_ps(-0.0f));
    h.offset = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(offsets)), m);
    offsets = _mm_unpackhi_epi64(offsets, offsets);
    h.offset2 = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(offsets)), m);
    h.sub = apart(_mm_and_si128(packed, nibble));
    return h;
}

/* p: the blocks; powers: the scales of FP4_E2M1. */
DK_256 DK_INLINE heads heads_of(const uint8_t *p, const uint8_t *powers, float factor, const layout l,
                                int64_t blocks)
{
    heads h = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_set1_epi16(1)};
    if (l.type == DK_Q2_K)
        return q2_k_heads(p, factor);
    if (l.type == DK_Q4_K || l.type == DK_Q5_K) {
        uint64_t scales, offsets;
        __m256 m, d = both_halves(p, factor, &m);
        dk_six_bit_words(p + 4, &scales, &offsets);
        h.scale = _mm256_mul_ps(floats_of(scales), d);
        h.offset = _mm256_mul_ps(floats_of(offsets), _mm256_xor_ps(m, _mm256_set1_ps(-0.0f)));
        return h;
    }
    if (l.type == DK_Q6_K) {
        __m128i sub = _mm_loadu_si128((const __m128i *)(p + 192));
        h.scale = _mm256_set1_ps(dk_half_avx2(p + 208) * factor);
        __m256 middle = _mm256_mul_ps(h.scale, _mm256_set1_ps(l.middle));
        h.offset = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(sub)), middle);
        sub = _mm_unpackhi_epi64(sub, sub);
        h.offset2 = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(sub)), middle);
        sub = _mm_loadu_si128((const __m128i *)(p + 192));
        h.sub = apart(sub);
        return h;
    }
    __m256 scale;
    if (l.type == DK_FP4_E2M1) {
        __m256i byte = powers_at(powers, blocks), bad = _mm256_cmpeq_epi32(byte, _mm256_set1_epi32(255));
        scale = _mm256_or_ps(half_powers(byte), _mm256_castsi256_ps(bad));
    } else if (l.type == DK_MXFP4) {
        __m128i words = words_of(p, l.bytes / BLOCKS, blocks);
        scale = half_powers(_mm256_cvtepu16_epi32(_mm_and_si128(words, _mm_set1_epi16(255))));
    } else {
        scale = _mm256_cvtph_ps(words_of(p, l.bytes / BLOCKS, blocks));
    }
    h.scale = _mm256_mul_ps(scale, _mm256_set1_ps(factor));
    h.offset = _mm256_mul_ps(h.scale, _mm256_set1_ps(l.middle));
    return h;
}

/* ---- the codes of block j ---- */

/* Low nibbles of 16 bytes, then the high ones. */
DK_256 DK_INLINE __m256i nibbles_of(const uint8_t *p)
{
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_and_si256(_mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
}

DK_256 DK_INLINE __m256i e2m1_of(__m256i codes)
{
    __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)dk_e2m1_plus_12));
    return _mm256_shuffle_epi8(table, codes);
}

DK_256 DK_INLINE __m256i load_32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Bits `mask` of each byte after a right shift. */
DK_256 DK_INLINE __m256i bits_of(__m256i bytes, const int shift, const char mask)
{
    return _mm256_and_si256(shift ? _mm256_srli_epi16(bytes, shift) : bytes, _mm256_set1_epi8(mask));
}

/* Block j of 16 bytes with neighbours in a byte: of two such blocks at once all that this one does not use falls
 * away. `is_alone`: block j + 1 may not be there. */
DK_256 DK_INLINE __m256i pairs_of(const uint8_t *p, int64_t j, int is_alone)
{
    __m256i bytes;
    if (is_alone)
        bytes = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(p + 16 * j)));
    else
        bytes = load_32(p + 16 * (j & ~(int64_t)1));
    bytes = _mm256_permute4x64_epi64(bytes, 0xd8);
    __m256i even = e2m1_of(bits_of(bytes, 0, 15)), odd = e2m1_of(bits_of(bytes, 4, 15));
    return is_alone || j % 2 == 0 ? _mm256_unpacklo_epi8(even, odd) : _mm256_unpackhi_epi8(even, odd);
}

DK_256 DK_INLINE __m256i q5_k_codes(const uint8_t *p, int64_t j)
{
    __m256i low = bits_of(load_32(p + 48 + 32 * (j >> 1)), 4 * (j & 1), 15), upper = load_32(p + 16);
    const __m256i bit = _mm256_set1_epi8(16);
    upper = j < 4 ? _mm256_slli_epi16(upper, (int)(4 - j)) : _mm256_srli_epi16(upper, (int)(j - 4));
    return _mm256_or_si256(low, _mm256_and_si256(upper, bit));
}

DK_256 DK_INLINE __m256i q6_k_codes(const uint8_t *p, int64_t j)
{
    const int part = (int)(j & 3), half = (int)(j >> 2);
    const __m256i mask = _mm256_set1_epi8(0x30);
    __m256i low = bits_of(load_32(p + 64 * half + 32 * (part & 1)), 4 * (part >> 1), 15);
    __m256i upper = load_32(p + 128 + 32 * half);
    upper = part < 2 ? _mm256_slli_epi16(upper, 4 - 2 * part) : _mm256_srli_epi16(upper, 2 * part - 4);
    return _mm256_or_si256(low, _mm256_and_si256(upper, mask));
}

DK_256 DK_INLINE __m256i codes_of(const uint8_t *p, int64_t j, const layout l, int is_alone)
{
    switch (l.type) {
    case DK_Q8_0: return load_32(p + 34 * j + 2);
    case DK_Q4_0: return nibbles_of(p + 18 * j + 2);
    case DK_MXFP4: return e2m1_of(nibbles_of(p + 17 * j + 1));
    case DK_FP4_E2M1: return pairs_of(p, j, is_alone);
    case DK_Q2_K: return bits_of(load_32(p + 16 + 32 * (j >> 2)), 2 * (j & 3), 3);
    case DK_Q4_K: return bits_of(load_32(p + 16 + 32 * (j >> 1)), 4 * (j & 1), 15);
    case DK_Q5_K: return q5_k_codes(p, j);
    default: return q6_k_codes(p, j);
    }
}

/* ---- dot products ---- */

/* The scales of both halves of block j, from all of them. */
DK_256 DK_INLINE __m256i sub_of(__m256i sub, int64_t j)
{
    return _mm256_shuffle_epi8(sub, _mm256_set1_epi16((short)(0x0100 + 0x0202 * j)));
}

/* Sums of four, each times its 16-bit scale: 1, or the scale of the half. All fit into 24 bits. */
DK_256 DK_INLINE __m256 dot_of(__m256i codes, __m256i q, __m256i sub, const layout l)
{
    __m256i u = codes;
    if (l.type == DK_Q8_0) {
        u = _mm256_abs_epi8(codes);
        q = _mm256_sign_epi8(q, codes);
    }
#if DK_256_HAS_DPBUSD
    if (!has_halves(l))
        return _mm256_cvtepi32_ps(dk_dpbusd(_mm256_setzero_si256(), u, q));
#endif
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(u, q), sub));
}

/* Where the rows, and the tokens, stand. */
typedef struct {
    const uint8_t *w, *powers;
    const int8_t *q;
    const float *x, *sum;
} place;

/* Values of `blocks` blocks; the rest is 0 and is not read. */
DK_256 DK_INLINE __m256 some_floats(const float *p, int64_t blocks)
{
    if (blocks == BLOCKS)
        return _mm256_loadu_ps(p);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)blocks), lane));
}

/* Heads of the step: offsets go to the lanes, scales of blocks times those of the tokens to `scale`. */
DK_256 DK_INLINE void add_heads(__m256 *own, __m256i *sub, float (*scale)[BLOCKS], place at, const dk_matrix *m,
                                const layout l, int64_t blocks, const int rows, const int tokens)
{
    const int64_t stride = m->columns / 32, halves = has_halves(l) ? 2 : 1;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const uint8_t *row = at.w + r * m->row_bytes;
        for (int k = 0; k < l.bytes; k += 64)
            __builtin_prefetch(row + SINGLE_ROWS * m->row_bytes + k, 0, 2);
        const uint8_t *powers = l.type == DK_FP4_E2M1 ? at.powers + r * m->scale_stride : NULL;
        heads h = heads_of(row, powers, m->factor, l, blocks);
        sub[r] = h.sub;
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            const float *sum = at.sum + t * stride * halves;
            __m256 *lanes = &own[r * tokens + t];
            if (l.type != DK_Q8_0)
                *lanes = _mm256_fmadd_ps(h.offset, some_floats(sum, blocks), *lanes);
            if (has_halves(l))
                *lanes = _mm256_fmadd_ps(h.offset2, _mm256_loadu_ps(sum + BLOCKS), *lanes);
            _mm256_store_ps(scale[r * tokens + t], _mm256_mul_ps(h.scale, some_floats(at.x + t * stride, blocks)));
        }
    }
}

DK_256 DK_INLINE void add_block(__m256 *own, const __m256i *sub, float (*scale)[BLOCKS], place at,
                                const dk_matrix *m, const layout l, int64_t j, const int rows, const int tokens,
                                int is_alone)
{
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        __m256i codes = codes_of(at.w + r * m->row_bytes, j, l, is_alone);
        __m256i weight = has_halves(l) ? sub_of(sub[r], j) : sub[r];
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m256 dot = dot_of(codes, load_32(at.q + t * m->columns + 32 * j), weight, l);
            __m256 *lanes = &own[r * tokens + t];
            *lanes = _mm256_fmadd_ps(dot, _mm256_broadcast_ss(&scale[r * tokens + t][j]), *lanes);
        }
    }
}

/* Lanes [rows, tokens] of rows from r on and of tokens. */
DK_256 DK_INLINE void dot_rows(__m256 *own, const dk_product *p, int64_t r, int64_t token, const layout l,
                               const int rows, const int tokens)
{
    const dk_matrix *m = p->w;
    const int64_t row = p->first_row + r, group = token * (m->columns / 32), columns = m->columns;
    float scale[SINGLE_ROWS * SINGLE_MOST][BLOCKS] DK_ALIGNED;
    __m256i sub[SINGLE_ROWS];
    place at = {m->data + row * m->row_bytes, NULL, p->x->q + token * columns, p->x->scale + group, NULL};
    at.sum = has_halves(l) ? p->x->sum16 + 2 * group : p->x->sum32 + group;
    if (l.type == DK_FP4_E2M1)
        at.powers = m->scale + row * m->scale_stride;
    int64_t c = 0;
    for (; c + STEP <= columns; c += STEP) {
        add_heads(own, sub, scale, at, m, l, BLOCKS, rows, tokens);
#pragma GCC unroll 8
        for (int j = 0; j < BLOCKS; j++)
            add_block(own, sub, scale, at, m, l, j, rows, tokens, 0);
        at.w += l.bytes;
        if (l.type == DK_FP4_E2M1)
            at.powers += BLOCKS;
        at.q += STEP;
        at.x += BLOCKS;
        at.sum += has_halves(l) ? 2 * BLOCKS : BLOCKS;
    }
    if (c < columns && !has_halves(l) && l.type != DK_Q4_K && l.type != DK_Q5_K) {
        int64_t blocks = (columns - c) / 32;
        add_heads(own, sub, scale, at, m, l, blocks, rows, tokens);
        for (int64_t j = 0; j < blocks; j++)
            add_block(own, sub, scale, at, m, l, j, rows, tokens, 1);
    }
}

DK_256 DK_INLINE float total_of_8(__m256 lanes)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* `rows` x `tokens`, both constants, at most four sums. */
DK_256 DK_INLINE void some_sums(const dk_product *p, int64_t r, int64_t token, const layout l, const int rows,
                                const int tokens)
{
    __m256 own[SINGLE_MOST];
#pragma GCC unroll 4
    for (int i = 0; i < rows * tokens; i++)
        own[i] = _mm256_setzero_ps();
    dot_rows(own, p, r, token, l, rows, tokens);
#pragma GCC unroll 4
    for (int i = 0; i < rows * tokens; i++)
        p->y[(token + i % tokens) * p->y_stride + r + i / tokens] = total_of_8(own[i]);
}

DK_256 DK_INLINE void all_rows(const dk_product *p, const dk_block *b, const layout l)
{
    int64_t r = b->first_row, end = b->first_row + b->rows, last = b->first_token + b->tokens;
    for (; r + SINGLE_ROWS <= end; r += SINGLE_ROWS) {
        int64_t t = b->first_token;
        for (; t + 3 <= last; t += 4)
            for (int i = 0; i < SINGLE_ROWS; i++)
                if (t + 4 <= last)
                    some_sums(p, r + i, t, l, 1, 4);
                else
                    some_sums(p, r + i, t, l, 1, 3);
        if (t + 2 <= last) {
            some_sums(p, r, t, l, 2, 2);
            some_sums(p, r + 2, t, l, 2, 2);
        } else if (t < last) {
            some_sums(p, r, t, l, 4, 1);
        }
    }
    for (; r < end; r++)
        for (int64_t t = b->first_token; t < last; t++)
            some_sums(p, r, t, l, 1, 1);
}

#define SINGLE_CASE(TYPE) \
    case TYPE: all_rows(p, b, single_layout_of(TYPE)); break;

DK_256 void DK_256_NAME(dk_single)(const dk_product *p, const dk_block *b)
{
    switch (p->w->type) {
        SINGLE_CASE(DK_Q8_0)
        SINGLE_CASE(DK_Q4_0)
        SINGLE_CASE(DK_MXFP4)
        SINGLE_CASE(DK_FP4_E2M1)
        SINGLE_CASE(DK_Q2_K)
        SINGLE_CASE(DK_Q4_K)
        SINGLE_CASE(DK_Q5_K)
        SINGLE_CASE(DK_Q6_K)
    }
}

#endif

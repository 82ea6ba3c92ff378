/* The row-by-row form of products_narrow.c in registers of 256 bits: the sixteen lanes are two of them.
 * A part of products_256.h. */
#ifndef EDGEDSV4_NARROW_256_H
#define EDGEDSV4_NARROW_256_H

#include "narrow.h"

typedef struct {
    __m256 lanes[2];
} narrow_lanes;

/* Dot products of four, exact: products of one byte pair are at most 2 * 127 * 128 in each half of u. */
DK_256 DK_INLINE __m256 narrow_fours(__m256i u, __m256i q, int has_bit_7)
{
#if DK_256_HAS_DPBUSD
    (void)has_bit_7;
    return _mm256_cvtepi32_ps(dk_dpbusd(_mm256_setzero_si256(), u, q));
#else
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(0x7f);
    if (!has_bit_7)
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(u, q), ones));
    __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(u, low), q), ones);
    __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_andnot_si256(low, u), q), ones);
    return _mm256_cvtepi32_ps(_mm256_add_epi32(a, b));
#endif
}

/* Scale of each lane of 32 columns from column c on. */
DK_256 DK_INLINE __m256 narrow_scales(const slab *s, const activations *a, int64_t c, int group)
{
    float x = a->scale[c / 32];
    if (group == 32)
        return _mm256_set1_ps(s->scale[c / 32] * x);
    __m128 low = _mm_set1_ps(s->scale[c / 16] * x), high = _mm_set1_ps(s->scale[c / 16 + 1] * x);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
}

/* Offsets of sixteen groups times the sums: lane i takes group i. */
DK_256 DK_INLINE void narrow_offsets(narrow_lanes *l, const float *offset, const float *sums, int64_t groups)
{
    for (int half = 0; half < 2; half++) {
        int64_t left = groups - 8 * half;
        __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)left), lane);
        l->lanes[half] = _mm256_fmadd_ps(_mm256_maskload_ps(offset + 8 * half, kept),
                                         _mm256_maskload_ps(sums + 8 * half, kept), l->lanes[half]);
    }
}

/* 32 columns from column c on. */
DK_256 DK_INLINE __m256 narrow_add(__m256 lanes, const slab *s, const activations *a, int64_t c, int group,
                                   int has_bit_7)
{
    __m256i u = _mm256_load_si256((const __m256i *)(s->u + c));
    __m256i q = _mm256_loadu_si256((const __m256i *)(a->q + c));
    return _mm256_fmadd_ps(narrow_fours(u, q, has_bit_7), narrow_scales(s, a, c, group), lanes);
}

DK_256 DK_INLINE void narrow_dot(narrow_lanes *l, const slab *s, const activations *a, int64_t columns,
                                 int group, int has_bit_7)
{
    for (int64_t c = 0; c < columns;) {
        int64_t end = dk_min(c + 16 * group, columns);
        narrow_offsets(l, s->offset + c / group, a->sums + c / group, (end - c) / group);
        __m256 low = l->lanes[0], high = l->lanes[1];
        for (; c + CHUNK <= end; c += CHUNK) {
            low = narrow_add(low, s, a, c, group, has_bit_7);
            high = narrow_add(high, s, a, c + CHUNK / 2, group, has_bit_7);
        }
        if (c < end)
            low = narrow_add(low, s, a, c, group, has_bit_7);
        c = end;
        l->lanes[0] = low;
        l->lanes[1] = high;
    }
}

/* Sum of the sixteen lanes: halves, then quarters, and so on. */
DK_256 DK_INLINE float narrow_total(const narrow_lanes *l)
{
    __m256 eight = _mm256_add_ps(l->lanes[0], l->lanes[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

DK_256 DK_INLINE void narrow_rows(const dk_product *p, const dk_block *b, dk_unpack_fn unpack, int group,
                                int has_bit_7)
{
    int64_t columns = p->w->columns;
    slab s;
    narrow_lanes lanes[DK_NARROW_TOKENS];
    for (int64_t r = b->first_row; r < b->first_row + b->rows; r++) {
        memset(lanes, 0, (size_t)b->tokens * sizeof *lanes);
        for (int64_t c = 0; c < columns; c += WIDTH) {
            int64_t width = dk_min(WIDTH, columns - c);
            dk_prefetch_columns(p->w, p->first_row + r + 2, c, width);
            unpack(s.u, s.scale, s.offset, p->w, p->first_row + r, c, width);
            for (int64_t t = 0; t < b->tokens; t++) {
                activations a = activations_at(p, b->first_token + t, c, group);
                narrow_lanes own = lanes[t];
                narrow_dot(&own, &s, &a, width, group, has_bit_7);
                lanes[t] = own;
            }
        }
        for (int64_t t = 0; t < b->tokens; t++)
            p->y[(b->first_token + t) * p->y_stride + r] = narrow_total(&lanes[t]);
    }
}

DK_256 void DK_256_NAME(dk_narrow)(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    dk_unpack_fn unpack = dk_unpack_of(unpacker);
    if (unpacker->group == 16)
        narrow_rows(p, b, unpack, 16, 0);
    else if (dk_largest_code(p->w->type) < 128)
        narrow_rows(p, b, unpack, 32, 0);
    else
        narrow_rows(p, b, unpack, 32, 1);
}

#endif

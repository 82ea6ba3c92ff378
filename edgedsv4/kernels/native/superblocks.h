/* Superblocks: 256 elements of a row as products_single.c multiplies them, straight from the stored bytes.
 *
 * What differs between block types is a dk_form, constant wherever it is used, and two functions of the stored
 * bytes (superblocks_small.h, superblocks_k.h): TYPE_codes gives 128 elements as unsigned bytes in two
 * registers, TYPE_weights the scales and offsets of the groups; element = scale * code + offset, as in unpack.h.
 * Codes are taken where they lie: one at the top of its byte is 16 times too large, and the scale of its group is
 * made a sixteenth, which is exact. Loads stay inside the superblock. */
#ifndef EDGEDSV4_SUPERBLOCKS_H
#define EDGEDSV4_SUPERBLOCKS_H

#include "decode.h"
#include "unpack.h"

#if defined(DK_X86)

/* Where sixteens of the elements of four groups of 32, a to d, lie in the two registers. In the natural order
 * the registers are of different groups; in the others of the same, and one sum takes both. */
typedef enum {
    DK_NATURAL,  /* a0 a1 b0 b1, c0 c1 d0 d1 */
    DK_BY_GROUP, /* a0 b0 c0 d0, a1 b1 c1 d1 */
    DK_CROSSED,  /* a0 b1 c0 d1, a1 b0 c1 d0 */
    DK_BY_EIGHT  /* eights of eight groups of 16: first all first ones, then all second ones */
} dk_order;

typedef struct {
    int type, bytes, group; /* bytes of a superblock; groups of 16 or 32 elements */
    dk_order order;
    float middle;           /* offset in units of the scale, or of the stored offset */
} dk_form;

typedef struct {
    __m512i first, second;
} dk_pair;

/* What groups are multiplied with, in weights and in activations: sixteen scales and sixteen offsets (sums).
 * With groups of 32 eight of each share `scale`, the offsets above; where offsets are multiples of scales, the
 * weights' `offset` is `scale`. */
typedef struct {
    __m512 scale, offset;
} dk_weights;

/* 64 bytes that are used twice: without this, the compiler loads them twice. */
DK_VNNI DK_INLINE __m512i dk_load_once(const uint8_t *p)
{
    __m512i bytes = _mm512_loadu_si512(p);
    __asm__("" : "+v"(bytes));
    return bytes;
}

/* A byte for each 128-bit lane. */
DK_VNNI DK_INLINE __m512i dk_lanes(const uint32_t a, const uint32_t b, const uint32_t c, const uint32_t d)
{
    const __m512i lanes = _mm512_set_epi64(d, d, c, c, b, b, a, a);
    return _mm512_mullo_epi64(lanes, _mm512_set1_epi64(0x0101010101010101));
}

/* Bits `mask` of a, or'ed into b. */
DK_VNNI DK_INLINE __m512i dk_bits_or(__m512i a, __m512i mask, __m512i b)
{
    return _mm512_ternarylogic_epi32(a, mask, b, 0xea);
}

/* Activations in the order of the codes. */
DK_VNNI DK_INLINE dk_pair dk_ordered(const int8_t *q, const dk_order order)
{
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    __m512i low = _mm512_loadu_si512(q), high = _mm512_loadu_si512(q + 64);
    switch (order) {
    case DK_BY_GROUP:
        return (dk_pair){_mm512_shuffle_i64x2(low, high, 0x88), _mm512_shuffle_i64x2(low, high, 0xdd)};
    case DK_CROSSED:
        return (dk_pair){_mm512_shuffle_i64x2(low, high, 0xcc), _mm512_shuffle_i64x2(low, high, 0x99)};
    case DK_BY_EIGHT:
        return (dk_pair){_mm512_permutex2var_epi64(low, even, high), _mm512_permutex2var_epi64(low, odd, high)};
    default: return (dk_pair){low, high};
    }
}

/* The group, as dk_weights counts, of each 32-bit lane in sum i of a superblock: two sums, or four in the natural
 * order. */
DK_VNNI DK_INLINE __m512i dk_groups(const dk_form f, const int i)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i mixed = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    if (f.order == DK_CROSSED)
        return _mm512_add_epi32(mixed, _mm512_set1_epi32(i));
    const int shift = f.order == DK_BY_EIGHT ? 1 : f.order == DK_NATURAL && f.group == 32 ? 3 : 2;
    return _mm512_add_epi32(_mm512_srli_epi32(lane, shift), _mm512_set1_epi32(i * (16 >> shift)));
}

#endif
#endif

/* Superblocks of the K types: one block each. */
#ifndef EDGEDSV4_SUPERBLOCKS_K_H
#define EDGEDSV4_SUPERBLOCKS_K_H

#include "superblocks.h"

#if defined(DK_X86)

/* 32 bytes, twice. */
DK_VNNI DK_INLINE __m512i dk_twice(const uint8_t *p)
{
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
}

/* The lanes of each pair exchanged. */
DK_VNNI DK_INLINE __m512i dk_exchanged(__m512i x) { return _mm512_permutex_epi64(x, 0x4e); }

/* A shift for the 16-bit parts of each 128-bit lane. */
DK_VNNI DK_INLINE __m512i dk_shifts(const int64_t a, const int64_t b, const int64_t c, const int64_t d)
{
    return _mm512_mullo_epi64(_mm512_set_epi64(d, d, c, c, b, b, a, a), _mm512_set1_epi64(0x0001000100010001));
}

/* ---- codes ---- */

/* 32 bytes hold a group in their low nibbles and the next in their high ones; the latter are left there. */
DK_VNNI DK_INLINE dk_pair q4_k_codes(const uint8_t *p, const int half)
{
    const __m512i mask = dk_lanes(0x0f, 0xf0, 0x0f, 0xf0);
    __m512i bytes = dk_load_once(p + 16 + 64 * half);
    return (dk_pair){_mm512_and_si512(bytes, mask), _mm512_and_si512(dk_exchanged(bytes), mask)};
}

DK_VNNI DK_INLINE dk_pair q5_k_codes(const uint8_t *p, const int half)
{
    const __m512i shifts = dk_shifts(0, 4, 0, 4), low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(16);
    const __m512i bit = half ? dk_lanes(16, 32, 64, 128) : dk_lanes(1, 2, 4, 8);
    __m512i bytes = dk_load_once(p + 48 + 64 * half), fifth = dk_twice(p + 16);
    __m512i first = _mm512_and_si512(_mm512_srlv_epi16(bytes, shifts), low);
    __m512i second = _mm512_and_si512(_mm512_srlv_epi16(dk_exchanged(bytes), shifts), low);
    return (dk_pair){_mm512_mask_add_epi8(first, _mm512_test_epi8_mask(fifth, bit), first, high),
                     _mm512_mask_add_epi8(second, _mm512_test_epi8_mask(dk_exchanged(fifth), bit), second, high)};
}

/* Bit pairs of 32 bytes are planes of 32 elements; the upper planes of a nibble are left where they are. */
DK_VNNI DK_INLINE dk_pair q2_k_codes(const uint8_t *p, const int half)
{
    __m512i bytes = dk_twice(p + 16 + 32 * half);
    return (dk_pair){_mm512_and_si512(bytes, dk_lanes(3, 3, 12, 12)),
                     _mm512_and_si512(bytes, dk_lanes(0x30, 0x30, 0xc0, 0xc0))};
}

DK_VNNI DK_INLINE dk_pair q3_k_codes(const uint8_t *p, const int half)
{
    const __m512i mask = dk_lanes(3, 3, 12, 12), four = dk_lanes(4, 4, 16, 16);
    const __m512i first_bit = half ? dk_lanes(16, 16, 32, 32) : dk_lanes(1, 1, 2, 2);
    const __m512i second_bit = half ? dk_lanes(64, 64, 128, 128) : dk_lanes(4, 4, 8, 8);
    __m512i bytes = dk_twice(p + 32 + 32 * half), third = dk_twice(p);
    __m512i first = _mm512_and_si512(bytes, mask), second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
    return (dk_pair){_mm512_mask_add_epi8(first, _mm512_test_epi8_mask(third, first_bit), first, four),
                     _mm512_mask_add_epi8(second, _mm512_test_epi8_mask(third, second_bit), second, four)};
}

DK_VNNI DK_INLINE dk_pair q6_k_codes(const uint8_t *p, const int half)
{
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(0x30);
    __m512i bytes = dk_load_once(p + 64 * half), upper = dk_twice(p + 128 + 32 * half);
    __m512i first = _mm512_and_si512(_mm512_sllv_epi16(upper, dk_shifts(4, 4, 2, 2)), high);
    __m512i second = _mm512_and_si512(_mm512_srlv_epi16(upper, dk_shifts(0, 0, 2, 2)), high);
    return (dk_pair){dk_bits_or(bytes, low, first), dk_bits_or(_mm512_srli_epi16(bytes, 4), low, second)};
}

/* ---- scales and offsets ---- */

/* Of Q4_K and Q5_K. Packed as decode.h says: here a qword of scales 0-3 and offsets 0-3 with two bits on top of
 * each, and a word with the lower bits of scales and of offsets 4-7. Groups come as 0 4 1 5 2 6 3 7. */
DK_VNNI DK_INLINE dk_weights six_bit_weights(const uint8_t *p)
{
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i shifts = _mm_setr_epi32(0, 4, 0, 0);
    __m128i six = _mm_loadl_epi64((const __m128i *)(p + 4));
    __m128i low = _mm_srlv_epi32(_mm_set1_epi32((int)dk_load32(p + 12)), shifts);
    __m128i top = _mm_and_si128(_mm_srli_epi32(six, 2), _mm_set1_epi8(0x30));
    low = _mm_ternarylogic_epi32(low, _mm_set1_epi8(15), top, 0xea); /* (low & 15) | top */
    __m128i bytes = _mm_unpacklo_epi8(_mm_and_si128(six, _mm_set1_epi8(63)), low);
    __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128((int)dk_load32(p)));
    __m512 d = _mm512_permutexvar_ps(halves, _mm512_castps128_ps512(both));
    __m512 scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), d);
    return (dk_weights){scale, scale};
}

DK_VNNI DK_INLINE dk_weights q2_k_weights(const uint8_t *p)
{
    __m512i packed = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512 scale = _mm512_cvtepi32_ps(_mm512_and_si512(packed, _mm512_set1_epi32(15)));
    __m512 offset = _mm512_cvtepi32_ps(_mm512_srli_epi32(packed, 4));
    return (dk_weights){_mm512_mul_ps(scale, _mm512_set1_ps(dk_half_avx2(p + 80))),
                        _mm512_mul_ps(offset, _mm512_set1_ps(dk_half_avx2(p + 82)))};
}

DK_VNNI DK_INLINE dk_weights dk_integer_scales(__m512i scales, float d)
{
    __m512 scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(d));
    return (dk_weights){scale, scale};
}

DK_VNNI DK_INLINE dk_weights q3_k_weights(const uint8_t *p)
{
    uint64_t words[2];
    dk_q3_k_words(p + 96, words);
    __m512i scales = _mm512_cvtepu8_epi32(_mm_set_epi64x((int64_t)words[1], (int64_t)words[0]));
    return dk_integer_scales(_mm512_sub_epi32(scales, _mm512_set1_epi32(32)), dk_half_avx2(p + 108));
}

DK_VNNI DK_INLINE dk_weights q6_k_weights(const uint8_t *p)
{
    __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)));
    return dk_integer_scales(scales, dk_half_avx2(p + 208));
}

#endif
#endif

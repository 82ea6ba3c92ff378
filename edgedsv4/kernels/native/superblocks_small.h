/* Superblocks of the types with small blocks, and of IQ4_XS: Q8_0, Q4_0, IQ4_NL, MXFP4, NVFP4. Block k of a
 * register is reached by a load that starts where its bytes come to lie in lane k, or by one permutation of two
 * loads that both stay inside the blocks. */
#ifndef EDGEDSV4_SUPERBLOCKS_SMALL_H
#define EDGEDSV4_SUPERBLOCKS_SMALL_H

#include "superblocks.h"
#include "unpack_avx512.h"

#if defined(DK_X86)

/* ---- codes ---- */

/* A code book of sixteen bytes in every lane. */
DK_VNNI DK_INLINE __m512i dk_book(const uint8_t *book)
{
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)book));
}

/* Low and high nibbles. */
DK_VNNI DK_INLINE dk_pair dk_nibbles(__m512i bytes)
{
    const __m512i mask = _mm512_set1_epi8(15);
    return (dk_pair){_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
}

DK_VNNI DK_INLINE dk_pair dk_by_book(__m512i bytes, const uint8_t *book)
{
    dk_pair codes = dk_nibbles(bytes);
    __m512i values = dk_book(book);
    return (dk_pair){_mm512_shuffle_epi8(values, codes.first), _mm512_shuffle_epi8(values, codes.second)};
}

DK_VNNI DK_INLINE dk_pair q8_0_codes(const uint8_t *p, const int half)
{
    return (dk_pair){dk_two_q8_0(p + 136 * half), dk_two_q8_0(p + 136 * half + 68)};
}

/* The sixteen bytes after the scales of four blocks of 18. */
DK_VNNI DK_INLINE __m512i dk_four_of_18(const uint8_t *p)
{
    const __m512i places = _mm512_setr_epi32(
        0x00010000, 0x00030002, 0x00050004, 0x00070006, 0x000a0009, 0x000c000b, 0x000e000d, 0x0010000f,
        0x00130012, 0x00150014, 0x00170016, 0x00190018, 0x00390038, 0x003b003a, 0x003d003c, 0x003f003e);
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(p + 2), places, _mm512_loadu_si512(p + 8));
}

DK_VNNI DK_INLINE dk_pair q4_0_codes(const uint8_t *p, const int half)
{
    return dk_nibbles(dk_four_of_18(p + 72 * half));
}

DK_VNNI DK_INLINE dk_pair iq4_nl_codes(const uint8_t *p, const int half)
{
    return dk_by_book(dk_four_of_18(p + 72 * half), dk_iq4_plus_127);
}

DK_VNNI DK_INLINE dk_pair iq4_xs_codes(const uint8_t *p, const int half)
{
    return dk_by_book(_mm512_loadu_si512(p + 8 + 64 * half), dk_iq4_plus_127);
}

/* Words of two loads, so that the odd bytes at which blocks 1 and 3 start are even ones. */
DK_VNNI DK_INLINE dk_pair mxfp4_codes(const uint8_t *p, const int half)
{
    const __m512i places = _mm512_setr_epi32(
        0x00010000, 0x00030002, 0x00050004, 0x00070006, 0x00280027, 0x002a0029, 0x002c002b, 0x002e002d,
        0x00120011, 0x00140013, 0x00160015, 0x00180017, 0x00390038, 0x003b003a, 0x003d003c, 0x003f003e);
    p += 68 * half;
    __m512i bytes = _mm512_permutex2var_epi16(_mm512_loadu_si512(p + 1), places, _mm512_loadu_si512(p + 4));
    return dk_by_book(bytes, dk_e2m1_plus_12);
}

DK_VNNI DK_INLINE dk_pair nvfp4_codes(const uint8_t *p, const int half)
{
    p += 72 * half;
    return dk_by_book(_mm512_mask_loadu_epi32(_mm512_loadu_si512(p + 4), 0xff00, p + 8), dk_e2m1_plus_12);
}

/* ---- scales ---- */

DK_VNNI DK_INLINE dk_weights dk_only_scales(__m512 scale) { return (dk_weights){scale, scale}; }

/* Half-precision scales of eight blocks, twice. */
DK_VNNI DK_INLINE dk_weights q4_0_weights(const uint8_t *p)
{
    const __m512i places = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0x003f0036, 0x002d0024, 0x001b0012, 0x00090000,
                                            0x003f0036, 0x002d0024, 0x001b0012, 0x00090000);
    __m512i words = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), places, _mm512_loadu_si512(p + 64));
    return dk_only_scales(_mm512_cvtph_ps(_mm512_castsi512_si256(words)));
}

DK_VNNI DK_INLINE dk_weights q8_0_weights(const uint8_t *p)
{
    __m128i words = dk_eight_words(p, 34);
    return dk_only_scales(_mm512_cvtph_ps(_mm256_broadcastsi128_si256(words)));
}

/* E8M0 bytes at 0, 17, 34 ..; half of what they stand for, as the codes are doubled. */
DK_VNNI DK_INLINE dk_weights mxfp4_weights(const uint8_t *p)
{
    const __m512i places = _mm512_setr_epi32(0, 8, 17, 25, 34, 42, 51, 59, 0, 8, 17, 25, 34, 42, 51, 59);
    const __m512i shifts = _mm512_set1_epi64((int64_t)8 << 32);
    __m512i byte = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), places, _mm512_loadu_si512(p + 64));
    byte = _mm512_and_si512(_mm512_srlv_epi32(byte, shifts), _mm512_set1_epi32(255));
    return dk_only_scales(dk_half_powers_avx512(byte));
}

/* E4M3 bytes without sign, four at 0, 36, 72, 108; 0x7f is 0. Half of what they stand for. */
DK_VNNI DK_INLINE dk_weights nvfp4_weights(const uint8_t *p)
{
    const __m512i places = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 27, 18, 9, 0);
    const __m512i most = _mm512_set1_epi32(0x7f);
    __m512i words = _mm512_permutex2var_epi32(_mm512_loadu_si512(p), places, _mm512_loadu_si512(p + 64));
    __m512i byte = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(words));
    __mmask16 kept = _mm512_cmpneq_epi32_mask(byte, most);
    __m512i bits = _mm512_maskz_slli_epi32(kept, _mm512_and_si512(byte, most), 20);
    return dk_only_scales(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p119f)));
}

/* Eight 6-bit integers in two fields, twice, times a half-precision scale. */
DK_VNNI DK_INLINE dk_weights iq4_xs_weights(const uint8_t *p)
{
    const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i twos = _mm512_srli_epi32(fours, 1);
    __m512i low = _mm512_srlv_epi32(_mm512_set1_epi32((int)dk_load32(p + 4)), fours);
    __m512i high = _mm512_srlv_epi32(_mm512_set1_epi32(dk_load16(p + 2)), twos);
    high = _mm512_and_si512(_mm512_slli_epi32(high, 4), _mm512_set1_epi32(0x30));
    low = dk_bits_or(low, _mm512_set1_epi32(15), high);
    __m512 scale = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_set1_epi32(32)));
    return dk_only_scales(_mm512_mul_ps(scale, _mm512_set1_ps(dk_half_avx2(p))));
}

#endif
#endif

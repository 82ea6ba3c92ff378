/* AVX-512 pieces of the unpackers of Q8_0, Q4_0 and MXFP4, some of them also for superblocks_small.h. */
#ifndef EDGEDSV4_UNPACK_AVX512_H
#define EDGEDSV4_UNPACK_AVX512_H

#include "unpack.h"

#if defined(DK_X86)

DK_AVX512 DK_INLINE __m512i dk_e2m1_avx512(__m512i codes)
{
    __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)dk_e2m1_plus_12));
    return _mm512_shuffle_epi8(table, codes);
}

/* Low, then high nibbles of the 16 bytes at p, then those of the 16 bytes at q. */
DK_AVX512 DK_INLINE __m512i dk_nibbles_avx512(const uint8_t *p, const uint8_t *q)
{
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    bytes = _mm512_mask_broadcast_i32x4(bytes, 0xff00, _mm_loadu_si128((const __m128i *)q));
    const __m512i counts = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004,
                                            0x0004000400040004, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi16(bytes, counts), _mm512_set1_epi8(15));
}

/* The fields at the head of sixteen blocks are collected in registers: sixteen stores of four bytes could not
 * be forwarded to one load. */

DK_AVX512 DK_INLINE __m128i dk_eight_words(const uint8_t *block, const int bytes)
{
    __m128i words = _mm_setzero_si128();
#define TAKE(k) words = _mm_insert_epi16(words, dk_load16(block + (k) * bytes), k);
    TAKE(0) TAKE(1) TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7)
#undef TAKE
    return words;
}

DK_AVX512 DK_INLINE __m512 dk_sixteen_halves(const uint8_t *block, const int bytes)
{
    __m128i low = dk_eight_words(block, bytes), high = dk_eight_words(block + 8 * bytes, bytes);
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

DK_AVX512 DK_INLINE __m128i dk_eight_heads(const uint8_t *block)
{
    __m128i heads = _mm_setzero_si128();
#define TAKE(k) heads = _mm_insert_epi8(heads, block[(k) * 17], k);
    TAKE(0) TAKE(1) TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7)
#undef TAKE
    return heads;
}

/* E8M0 bytes as floats of half their value, which goes with the doubled codes. */
DK_AVX512 DK_INLINE __m512 dk_half_powers_avx512(__m512i byte)
{
    const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2),
                  tiny = _mm512_set1_epi32(0x00200000);
    __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(byte, one), 23);
    bits = _mm512_mask_sllv_epi32(bits, _mm512_cmplt_epu32_mask(byte, two), tiny, byte);
    return _mm512_castsi512_ps(bits);
}

/* Of sixteen blocks of MXFP4. */
DK_AVX512 DK_INLINE __m512 dk_sixteen_powers(const uint8_t *block)
{
    __m128i heads = _mm_unpacklo_epi64(dk_eight_heads(block), dk_eight_heads(block + 8 * 17));
    return dk_half_powers_avx512(_mm512_cvtepu8_epi32(heads));
}

/* Elements of two neighbouring blocks as unsigned bytes. */
DK_AVX512 DK_INLINE __m512i dk_two_q8_0(const uint8_t *block)
{
    __m512i q = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(block + 2)));
    q = _mm512_inserti64x4(q, _mm256_loadu_si256((const __m256i *)(block + 36)), 1);
    return _mm512_xor_si512(q, _mm512_set1_epi8(-128));
}

DK_AVX512 DK_INLINE __m512i dk_two_q4_0(const uint8_t *block)
{
    return dk_nibbles_avx512(block + 2, block + 20);
}

DK_AVX512 DK_INLINE __m512i dk_two_mxfp4(const uint8_t *block)
{
    return dk_e2m1_avx512(dk_nibbles_avx512(block + 1, block + 18));
}

#endif
#endif

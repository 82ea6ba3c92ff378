/* The fields of the IQ block types (iq_fields.h) by AVX2: the same record from the same bytes. */
#ifndef EDGEDSV4_IQ_FIELDS_AVX2_H
#define EDGEDSV4_IQ_FIELDS_AVX2_H

#include "iq_fields.h"

#ifdef DK_X86

/* ---- signs ---- */

/* dk_even_signs of eight words. */
DK_AVX2 DK_INLINE void dk_even_signs_avx2(uint8_t *sign, __m256i words)
{
    __m256i seven = _mm256_and_si256(words, _mm256_set1_epi32(0x7f));
    for (int i = 1; i < 4; i++) {
        __m256i field = _mm256_and_si256(_mm256_slli_epi32(words, i), _mm256_set1_epi32(0x7f << 8 * i));
        seven = _mm256_or_si256(seven, field);
    }
    /* The eighth bit of four bits, and of three: the number of those that are set, made odd. */
    const __m256i eighth = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i low = _mm256_shuffle_epi8(eighth, _mm256_and_si256(seven, nibble));
    __m256i high = _mm256_shuffle_epi8(eighth, _mm256_and_si256(_mm256_srli_epi32(seven, 4), nibble));
    _mm256_storeu_si256((__m256i *)sign, _mm256_or_si256(seven, _mm256_xor_si256(low, high)));
}

/* The same of sixteen 7-bit patterns in 16-bit lanes. */
DK_AVX2 DK_INLINE __m256i dk_even_lanes(__m256i seven)
{
    __m256i parity = _mm256_xor_si256(seven, _mm256_srli_epi16(seven, 4));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi16(parity, 2));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi16(parity, 1));
    parity = _mm256_slli_epi16(_mm256_and_si256(parity, _mm256_set1_epi16(1)), 7);
    return _mm256_or_si256(seven, parity);
}

DK_AVX2 DK_INLINE void dk_copy32(uint8_t *to, const uint8_t *from)
{
    _mm256_storeu_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
}

/* ---- scales ---- */

/* (s + 1/2) d step of eight integers. */
DK_AVX2 DK_INLINE void dk_store_half_steps(float *scale, __m256i s, float d, float step)
{
    __m256 product = _mm256_add_ps(_mm256_cvtepi32_ps(s), _mm256_set1_ps(0.5f));
    product = _mm256_mul_ps(product, _mm256_set1_ps(d));
    _mm256_storeu_ps(scale, _mm256_mul_ps(product, _mm256_set1_ps(step)));
}

/* (2 s + 1) d of eight integers. */
DK_AVX2 DK_INLINE void dk_store_odd_steps(float *scale, __m256i s, float d)
{
    __m256i odd = _mm256_add_epi32(_mm256_add_epi32(s, s), _mm256_set1_epi32(1));
    _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_cvtepi32_ps(odd), _mm256_set1_ps(d)));
}

/* Nibbles of the lower eight bytes in order, low nibble first: sixteen bytes. */
DK_AVX2 DK_INLINE __m128i dk_nibbles_in_order(__m128i bytes)
{
    const __m128i nibble = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble), _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
}

DK_AVX2 DK_INLINE void dk_nibble_scales_avx2(dk_iq_fields *f, const uint8_t *packed, float d)
{
    __m128i s = dk_nibbles_in_order(_mm_loadl_epi64((const __m128i *)packed));
    dk_store_half_steps(f->scale, _mm256_cvtepu8_epi32(s), d, 0.25f);
    dk_store_half_steps(f->scale + 8, _mm256_cvtepu8_epi32(_mm_srli_si128(s, 8)), d, 0.25f);
}

/* ---- indices ---- */

/* Sixteen bytes with upper bits already in place. */
DK_AVX2 DK_INLINE void dk_store_index(uint16_t *index, __m128i bytes, __m256i upper)
{
    _mm256_storeu_si256((__m256i *)index, _mm256_or_si256(_mm256_cvtepu8_epi16(bytes), upper));
}

DK_AVX2 DK_INLINE __m128i dk_load128(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

/* ---- blocks ---- */

DK_AVX2 DK_INLINE void dk_iq2_xxs_fields_avx2(dk_iq_fields *f, const uint8_t *p, float d)
{
    __m256 first = _mm256_loadu_ps((const float *)(p + 2)), second = _mm256_loadu_ps((const float *)(p + 34));
    __m256d high = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0xdd));
    __m256i words = _mm256_castpd_si256(_mm256_permute4x64_pd(high, 0xd8));
    dk_stored_indices(f, p + 2, 4);
    dk_even_signs_avx2(f->sign, words);
    dk_store_half_steps(f->scale, _mm256_srli_epi32(words, 28), d, 0.25f);
}

DK_AVX2 DK_INLINE void dk_iq3_xxs_fields_avx2(dk_iq_fields *f, const uint8_t *p, float d)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)(p + 66));
    dk_even_signs_avx2(f->sign, words);
    dk_store_half_steps(f->scale, _mm256_srli_epi32(words, 28), d, 0.5f);
    dk_stored_indices(f, p + 2, 0);
}

DK_AVX2 DK_INLINE void dk_iq2_xs_fields_avx2(dk_iq_fields *f, const uint8_t *p, float d)
{
    f->bytes = NULL;
    __m256i first = _mm256_loadu_si256((const __m256i *)(p + 2));
    __m256i second = _mm256_loadu_si256((const __m256i *)(p + 34));
    const __m256i nine = _mm256_set1_epi16(511);
    _mm256_storeu_si256((__m256i *)f->index, _mm256_and_si256(first, nine));
    _mm256_storeu_si256((__m256i *)(f->index + 16), _mm256_and_si256(second, nine));
    first = dk_even_lanes(_mm256_srli_epi16(first, 9));
    second = dk_even_lanes(_mm256_srli_epi16(second, 9));
    __m256i sign = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
    _mm256_storeu_si256((__m256i *)f->sign, sign);
    dk_nibble_scales_avx2(f, p + 66, d);
}

/* Upper bits: four pairs per byte; a product brings each pair of a byte to bits 8 and 9. */
DK_AVX2 DK_INLINE void dk_iq2_s_fields_avx2(dk_iq_fields *f, const uint8_t *p, float d)
{
    f->bytes = NULL;
    const __m256i each_four = _mm256_setr_epi64x((int64_t)0xff00ff00ff00ff00, (int64_t)0xff01ff01ff01ff01,
                                                 (int64_t)0xff02ff02ff02ff02, (int64_t)0xff03ff03ff03ff03);
    const __m256i powers = _mm256_set1_epi64x(0x0004001000400100);
    for (int i = 0; i < 32; i += 16) {
        __m256i bytes = _mm256_set1_epi32((int)dk_load32(p + 66 + i / 4));
        bytes = _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, each_four), powers);
        bytes = _mm256_and_si256(bytes, _mm256_set1_epi16(0x300));
        dk_store_index(f->index + i, dk_load128(p + 2 + i), bytes);
    }
    dk_copy32(f->sign, p + 34);
    dk_nibble_scales_avx2(f, p + 74, d);
}

DK_AVX2 DK_INLINE void dk_iq3_s_fields_avx2(dk_iq_fields *f, const uint8_t *p, float d)
{
    f->bytes = NULL;
    const __m256i each_eight = _mm256_setr_epi64x((int64_t)0xff00ff00ff00ff00, (int64_t)0xff00ff00ff00ff00,
                                                  (int64_t)0xff01ff01ff01ff01, (int64_t)0xff01ff01ff01ff01);
    const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 64; i += 16) {
        __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(dk_load16(p + 66 + i / 8)), each_eight);
        __m256i is_set = _mm256_cmpeq_epi16(_mm256_and_si256(bytes, bits), bits);
        dk_store_index(f->index + i, dk_load128(p + 2 + i), _mm256_and_si256(is_set, _mm256_set1_epi16(256)));
    }
    dk_copy32(f->sign, p + 74);
    __m128i s = dk_nibbles_in_order(_mm_cvtsi32_si128((int)dk_load32(p + 106)));
    dk_store_odd_steps(f->scale, _mm256_cvtepu8_epi32(s), d);
}

/* ---- IQ1 ---- */

/* 1/8 with the sign bit of each lane. */
DK_AVX2 DK_INLINE __m256 dk_signed_delta(__m256i lanes)
{
    __m256i sign = _mm256_and_si256(lanes, _mm256_set1_epi32(INT32_MIN));
    return _mm256_or_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(0.125f));
}

/* Upper bits: four triples per word; a product brings each triple of a word to bits 9 to 11. */
DK_AVX2 DK_INLINE void dk_iq1_s_fields_avx2(dk_iq1_fields *f, const uint8_t *p, float d)
{
    const __m256i each_four = _mm256_setr_epi64x(0x0100010001000100, 0x0302030203020302, 0x0504050405040504,
                                                 0x0706070607060706);
    const __m256i powers = _mm256_set1_epi64x(0x0001000800400200);
    for (int i = 0; i < 32; i += 16) {
        __m256i words = _mm256_set1_epi64x((int64_t)dk_load64(p + 34 + i / 2));
        words = _mm256_mullo_epi16(_mm256_shuffle_epi8(words, each_four), powers);
        words = _mm256_and_si256(_mm256_srli_epi16(words, 1), _mm256_set1_epi16(0x700));
        dk_store_index(f->index + i, dk_load128(p + 2 + i), words);
    }
    __m256i words = _mm256_cvtepu16_epi32(dk_load128(p + 34));
    __m256i s = _mm256_and_si256(_mm256_srli_epi32(words, 12), _mm256_set1_epi32(7));
    dk_store_odd_steps(f->scale, s, d);
    const __m256i four_each = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    __m256 delta = dk_signed_delta(_mm256_slli_epi32(words, 16));
    for (int i = 0; i < 4; i++) {
        __m256i pair = _mm256_add_epi32(four_each, _mm256_set1_epi32(2 * i));
        _mm256_storeu_ps(f->delta + 8 * i, _mm256_permutevar8x32_ps(delta, pair));
    }
}

DK_AVX2 DK_INLINE void dk_iq1_m_fields_avx2(dk_iq1_fields *f, const uint8_t *p, float d)
{
    for (int i = 0; i < 32; i += 16) {
        __m128i nibbles = dk_nibbles_in_order(_mm_loadl_epi64((const __m128i *)(p + 32 + i / 2)));
        __m256i upper = _mm256_cvtepu8_epi16(_mm_and_si128(nibbles, _mm_set1_epi8(7)));
        dk_store_index(f->index + i, dk_load128(p + i), _mm256_slli_epi16(upper, 8));
        __m256i first = _mm256_cvtepu8_epi32(nibbles);
        __m256i second = _mm256_cvtepu8_epi32(_mm_srli_si128(nibbles, 8));
        _mm256_storeu_ps(f->delta + i, dk_signed_delta(_mm256_slli_epi32(first, 28)));
        _mm256_storeu_ps(f->delta + i + 8, dk_signed_delta(_mm256_slli_epi32(second, 28)));
    }
    __m256i words = _mm256_castsi128_si256(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(p + 48))));
    const __m256i shifts = _mm256_setr_epi32(0, 3, 6, 9, 0, 3, 6, 9), three_bits = _mm256_set1_epi32(7);
    const __m256i four_each = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    for (int i = 0; i < 2; i++) {
        __m256i pair = _mm256_add_epi32(four_each, _mm256_set1_epi32(2 * i));
        __m256i s = _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(words, pair), shifts);
        dk_store_odd_steps(f->scale + 8 * i, _mm256_and_si256(s, three_bits), d);
    }
}

#endif

#endif

/* Groups of the K types as unsigned bytes: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Formulas and field order:
 * kernels/dequantize/k_blocks.py; contract: unpack.h. d and m are the half-precision scales times the
 * matrix's factor. 64 elements of a type nearly always are one load, one shift by lane and one mask. */

#include "unpack_blocks.h"

/* ---- scales: eight or sixteen small integers in words, lowest byte first ---- */

DK_INLINE void six_bit_groups(float *restrict scale, float *restrict offset, const uint8_t *packed, float d,
                              float m)
{
    uint64_t scales, offsets;
    dk_six_bit_words(packed, &scales, &offsets);
    for (int j = 0; j < 8; j++) {
        scale[j] = (float)(int)(scales >> 8 * j & 255) * d;
        offset[j] = (float)(int)(offsets >> 8 * j & 255) * -m;
    }
}

/* ---- plain ---- */

DK_INLINE void q2_k_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                          const uint8_t *p, float factor)
{
    float d = dk_half(p + 80) * factor, m = dk_half(p + 82) * factor;
    for (int j = 0; j < 16; j++) {
        scale[j] = (float)(p[j] & 15) * d;
        offset[j] = (float)(p[j] >> 4) * -m;
    }
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++)
            u[32 * j + i] = p[16 + 32 * (j >> 2) + i] >> 2 * (j & 3) & 3;
}

DK_INLINE void q3_k_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                          const uint8_t *p, float factor)
{
    float d = dk_half(p + 108) * factor;
    uint64_t words[2];
    dk_q3_k_words(p + 96, words);
    for (int j = 0; j < 16; j++) {
        scale[j] = (float)((int)(words[j >> 3] >> 8 * (j & 7) & 255) - 32) * d;
        offset[j] = -4.0f * scale[j];
    }
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) {
            uint8_t low = p[32 + 32 * (j >> 2) + i] >> 2 * (j & 3) & 3;
            u[32 * j + i] = (uint8_t)(low | (p[i] >> j & 1) << 2);
        }
}

DK_INLINE void q4_k_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                          const uint8_t *p, float factor)
{
    six_bit_groups(scale, offset, p + 4, dk_half(p) * factor, dk_half(p + 2) * factor);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++)
            u[32 * j + i] = p[16 + 32 * (j >> 1) + i] >> 4 * (j & 1) & 15;
}

DK_INLINE void q5_k_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                          const uint8_t *p, float factor)
{
    six_bit_groups(scale, offset, p + 4, dk_half(p) * factor, dk_half(p + 2) * factor);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) {
            uint8_t low = p[48 + 32 * (j >> 1) + i] >> 4 * (j & 1) & 15;
            u[32 * j + i] = (uint8_t)(low | (p[16 + i] >> j & 1) << 4);
        }
}

DK_INLINE void q6_k_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                          const uint8_t *p, float factor)
{
    float d = dk_half(p + 208) * factor;
    for (int j = 0; j < 16; j++) {
        scale[j] = (float)(int8_t)p[192 + j] * d;
        offset[j] = -32.0f * scale[j];
    }
    for (int j = 0; j < 8; j++) {
        int half = j >> 2, part = j & 3;
        const uint8_t *low = p + 64 * half + 32 * (part & 1), *upper = p + 128 + 32 * half;
        for (int i = 0; i < 32; i++)
            u[32 * j + i] = (uint8_t)((low[i] >> 4 * (part >> 1) & 15) | (upper[i] >> 2 * part & 3) << 4);
    }
}

#ifdef DK_X86

/* ---- AVX2 ---- */

/* A load of 32 bytes, bits `mask` of each after a right shift. */
DK_AVX2 DK_INLINE __m256i bits32(const uint8_t *p, int shift, char mask)
{
    __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
    return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8(mask));
}

/* `add` where bit `bit` of the bytes is set, else 0. */
DK_AVX2 DK_INLINE __m256i where_bit(__m256i bytes, int bit, char add)
{
    __m256i mask = _mm256_set1_epi8((char)(1 << bit));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask), _mm256_set1_epi8(add));
}

DK_AVX2 DK_INLINE void six_bit_groups_avx2(float *scale, float *offset, const uint8_t *packed, float d,
                                           float m)
{
    uint64_t scales, offsets;
    dk_six_bit_words(packed, &scales, &offsets);
    dk_store_scaled8(scale, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)scales)), d);
    dk_store_scaled8(offset, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)offsets)), -m);
}

DK_AVX2 DK_INLINE void q2_k_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p + 80) * factor, m = dk_half_avx2(p + 82) * factor;
    for (int j = 0; j < 16; j += 8) {
        __m256i packed = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + j)));
        dk_store_scaled8(scale + j, _mm256_and_si256(packed, _mm256_set1_epi32(15)), d);
        dk_store_scaled8(offset + j, _mm256_srli_epi32(packed, 4), -m);
    }
    for (int j = 0; j < 8; j++)
        _mm256_storeu_si256((__m256i *)(u + 32 * j), bits32(p + 16 + 32 * (j >> 2), 2 * (j & 3), 3));
}

DK_AVX2 DK_INLINE void q3_k_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p + 108) * factor;
    uint64_t words[2];
    dk_q3_k_words(p + 96, words);
    for (int j = 0; j < 2; j++) {
        __m256i s = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)words[j]));
        s = _mm256_sub_epi32(s, _mm256_set1_epi32(32));
        dk_store_scaled8(scale + 8 * j, s, d);
        dk_store_scaled8(offset + 8 * j, s, -4.0f * d);
    }
    __m256i third = _mm256_loadu_si256((const __m256i *)p);
    for (int j = 0; j < 8; j++) {
        __m256i low = bits32(p + 32 + 32 * (j >> 2), 2 * (j & 3), 3);
        _mm256_storeu_si256((__m256i *)(u + 32 * j), _mm256_or_si256(low, where_bit(third, j, 4)));
    }
}

DK_AVX2 DK_INLINE void q4_k_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    six_bit_groups_avx2(scale, offset, p + 4, dk_half_avx2(p) * factor, dk_half_avx2(p + 2) * factor);
    for (int j = 0; j < 8; j++)
        _mm256_storeu_si256((__m256i *)(u + 32 * j), bits32(p + 16 + 32 * (j >> 1), 4 * (j & 1), 15));
}

DK_AVX2 DK_INLINE void q5_k_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    six_bit_groups_avx2(scale, offset, p + 4, dk_half_avx2(p) * factor, dk_half_avx2(p + 2) * factor);
    __m256i fifth = _mm256_loadu_si256((const __m256i *)(p + 16));
    for (int j = 0; j < 8; j++) {
        __m256i low = bits32(p + 48 + 32 * (j >> 1), 4 * (j & 1), 15);
        _mm256_storeu_si256((__m256i *)(u + 32 * j), _mm256_or_si256(low, where_bit(fifth, j, 16)));
    }
}

DK_AVX2 DK_INLINE void q6_k_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p + 208) * factor;
    for (int j = 0; j < 16; j += 8) {
        __m256i s = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 192 + j)));
        dk_store_scaled8(scale + j, s, d);
        dk_store_scaled8(offset + j, s, -32.0f * d);
    }
    for (int j = 0; j < 8; j++) {
        int half = j >> 2, part = j & 3;
        __m256i low = bits32(p + 64 * half + 32 * (part & 1), 4 * (part >> 1), 15);
        __m256i upper = _mm256_slli_epi16(bits32(p + 128 + 32 * half, 2 * part, 3), 4);
        _mm256_storeu_si256((__m256i *)(u + 32 * j), _mm256_or_si256(low, upper));
    }
}

/* ---- AVX-512 ---- */

/* 32 bytes twice, bits `mask` of each after a right shift that differs between the halves. */
DK_AVX512 DK_INLINE __m512i bits64(const uint8_t *p, int shift, int upper_shift, char mask)
{
    __m512i bytes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
    __m512i shifts = _mm512_mask_set1_epi16(_mm512_set1_epi16((short)shift), 0xffff0000, (short)upper_shift);
    return _mm512_and_si512(_mm512_srlv_epi16(bytes, shifts), _mm512_set1_epi8(mask));
}

/* Add where bit `bit` of 32 bytes, and bit + 1 of them again, is set. */
DK_AVX512 DK_INLINE __m512i add_where_bit(__m512i u, __m512i twice, int bit, char add)
{
    __m512i first = _mm512_set1_epi8((char)(1 << bit));
    __m512i mask = _mm512_mask_set1_epi8(first, 0xffffffff00000000, (char)(2 << bit));
    return _mm512_mask_add_epi8(u, _mm512_test_epi8_mask(twice, mask), u, _mm512_set1_epi8(add));
}

DK_AVX512 DK_INLINE __m512i two_words(const uint64_t words[2])
{
    return _mm512_cvtepu8_epi32(_mm_set_epi64x((int64_t)words[1], (int64_t)words[0]));
}

DK_AVX512 DK_INLINE void q2_k_avx512(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p + 80) * factor, m = dk_half_avx2(p + 82) * factor;
    __m512i packed = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    dk_store_scaled16(scale, _mm512_and_si512(packed, _mm512_set1_epi32(15)), d);
    dk_store_scaled16(offset, _mm512_srli_epi32(packed, 4), -m);
    for (int j = 0; j < 4; j++)
        _mm512_storeu_si512(u + 64 * j, bits64(p + 16 + 32 * (j >> 1), 4 * (j & 1), 4 * (j & 1) + 2, 3));
}

DK_AVX512 DK_INLINE void q3_k_avx512(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p + 108) * factor;
    uint64_t words[2];
    dk_q3_k_words(p + 96, words);
    __m512i s = _mm512_sub_epi32(two_words(words), _mm512_set1_epi32(32));
    dk_store_scaled16(scale, s, d);
    dk_store_scaled16(offset, s, -4.0f * d);
    __m512i third = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
    for (int j = 0; j < 4; j++) {
        __m512i low = bits64(p + 32 + 32 * (j >> 1), 4 * (j & 1), 4 * (j & 1) + 2, 3);
        _mm512_storeu_si512(u + 64 * j, add_where_bit(low, third, 2 * j, 4));
    }
}

DK_AVX512 DK_INLINE void q4_k_avx512(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    six_bit_groups_avx2(scale, offset, p + 4, dk_half_avx2(p) * factor, dk_half_avx2(p + 2) * factor);
    for (int j = 0; j < 4; j++)
        _mm512_storeu_si512(u + 64 * j, bits64(p + 16 + 32 * j, 0, 4, 15));
}

DK_AVX512 DK_INLINE void q5_k_avx512(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    six_bit_groups_avx2(scale, offset, p + 4, dk_half_avx2(p) * factor, dk_half_avx2(p + 2) * factor);
    __m512i fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + 16)));
    for (int j = 0; j < 4; j++)
        _mm512_storeu_si512(u + 64 * j, add_where_bit(bits64(p + 48 + 32 * j, 0, 4, 15), fifth, 2 * j, 16));
}

DK_AVX512 DK_INLINE void q6_k_avx512(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p + 208) * factor;
    __m512i s = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)));
    dk_store_scaled16(scale, s, d);
    dk_store_scaled16(offset, s, -32.0f * d);
    for (int half = 0; half < 2; half++) {
        __m512i low = _mm512_loadu_si512(p + 64 * half), nibble = _mm512_set1_epi8(15);
        const uint8_t *upper = p + 128 + 32 * half; /* four planes of two bits */
        __m512i first = _mm512_slli_epi16(bits64(upper, 0, 2, 3), 4);
        __m512i second = bits64(upper, 0, 2, 0x30);
        first = _mm512_or_si512(first, _mm512_and_si512(low, nibble));
        second = _mm512_or_si512(second, _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble));
        _mm512_storeu_si512(u + 128 * half, first);
        _mm512_storeu_si512(u + 128 * half + 64, second);
    }
}

#endif

DK_UNPACKER(q2_k, 16, 256, 84)
DK_UNPACKER(q3_k, 16, 256, 110)
DK_UNPACKER(q4_k, 32, 256, 144)
DK_UNPACKER(q5_k, 32, 256, 176)
DK_UNPACKER(q6_k, 16, 256, 210)

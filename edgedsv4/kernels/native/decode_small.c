/* Decoders of the types of 32 elements with one half-precision scale, of the ternary types, and of the 4-bit
 * floats in blocks (MXFP4, NVFP4). Formulas and field order: kernels/dequantize/small_blocks.py. */

#include "decode_groups.h"

const int8_t dk_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* ---- plain blocks: d scale, m offset, q stored integers; elements 0-15 are low nibbles, 16-31 high ---- */

DK_INLINE void q8_0_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int i = 0; i < 32; i++)
        y[i] = (float)(int8_t)p[2 + i] * d;
}

DK_INLINE void q4_0_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int i = 0; i < 16; i++) {
        y[i] = (float)((p[2 + i] & 15) - 8) * d;
        y[16 + i] = (float)((p[2 + i] >> 4) - 8) * d;
    }
}

/* Low nibbles of 16 bytes, then the high ones. */
DK_INLINE void nibbles(uint8_t u[32], const uint8_t *q)
{
    for (int i = 0; i < 16; i++) {
        u[i] = q[i] & 15;
        u[16 + i] = q[i] >> 4;
    }
}

/* The same with a fifth bit, bit e of a word for element e. */
DK_INLINE void five_bits(uint8_t u[32], const uint8_t *q, uint32_t fifth)
{
    nibbles(u, q);
    for (int i = 0; i < 32; i++)
        u[i] |= (uint8_t)((fifth >> i & 1) << 4);
}

DK_INLINE void q4_1_block(float *restrict y, const uint8_t *p, float d, float m)
{
    uint8_t u[32];
    nibbles(u, p + 4);
    for (int i = 0; i < 32; i++)
        y[i] = (float)u[i] * d + m;
}

DK_INLINE void q5_0_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    uint8_t u[32];
    five_bits(u, p + 6, dk_load32(p + 2));
    for (int i = 0; i < 32; i++)
        y[i] = (float)(u[i] - 16) * d;
}

DK_INLINE void q5_1_block(float *restrict y, const uint8_t *p, float d, float m)
{
    uint8_t u[32];
    five_bits(u, p + 8, dk_load32(p + 4));
    for (int i = 0; i < 32; i++)
        y[i] = (float)u[i] * d + m;
}

DK_INLINE void iq4_nl_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int i = 0; i < 16; i++) {
        y[i] = (float)dk_iq4_values[p[2 + i] & 15] * d;
        y[16 + i] = (float)dk_iq4_values[p[2 + i] >> 4] * d;
    }
}

/* A byte holds base-3 digits as a fraction: multiplying by 3^k modulo 256 brings digit k to the top. */
DK_INLINE void ternary_digits(float *restrict y, const uint8_t *q, int width, int digits, float d)
{
    uint8_t power = 1;
    for (int k = 0; k < digits; k++, power = (uint8_t)(power * 3))
        for (int i = 0; i < width; i++)
            y[k * width + i] = (float)(((uint8_t)(q[i] * power) * 3 >> 8) - 1) * d;
}

DK_INLINE void tq1_0_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    ternary_digits(y, p, 32, 5, d);
    ternary_digits(y + 160, p + 32, 16, 5, d);
    ternary_digits(y + 240, p + 48, 4, 4, d);
}

DK_INLINE void tq2_0_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 32; i++)
                y[128 * half + 32 * k + i] = (float)((p[32 * half + i] >> 2 * k & 3) - 1) * d;
}

/* 2^(byte - 128) for every byte, 0xff included, as ggml reads the scales of MXFP4: they go with doubled
 * values, because 2^128 is no float. */
DK_INLINE float half_power(uint8_t byte)
{
    return dk_float_of_bits(byte < 2 ? 0x00200000u << byte : (uint32_t)(byte - 1) << 23);
}

/* Twice the E2M1 numbers of codes 0..15, as ggml has them (code 8 is +0): 0 1 2 3 4 6 8 12 and negatives.
 * Arithmetic in place of a table, so that loops become vectors. */
DK_INLINE int8_t twice_e2m1(uint8_t code)
{
    int8_t m = code & 7, sign = (int8_t)-(code >> 3);
    int8_t value = (int8_t)(m + ((m - 4) & -(m > 3)) + ((2 * m - 12) & -(m > 5)));
    return (int8_t)((value ^ sign) - sign);
}

/* n codes of low nibbles, then n of high ones. */
DK_INLINE void e2m1_values(int8_t *restrict values, const uint8_t *q, int n)
{
    for (int i = 0; i < n; i++) {
        values[i] = twice_e2m1(q[i] & 15);
        values[n + i] = twice_e2m1(q[i] >> 4);
    }
}

DK_INLINE void mxfp4_block(float *restrict y, const uint8_t *p)
{
    int8_t values[32];
    float scale = half_power(p[0]);
    e2m1_values(values, p + 1, 16);
    for (int i = 0; i < 32; i++)
        y[i] = (float)values[i] * scale;
}

/* Half a scale of NVFP4, to go with doubled values: unsigned E4M3 whose top bit is ignored, but 0x7f is 0. */
DK_INLINE float half_nvfp4_scale(uint8_t byte)
{
    uint32_t code = byte & 0x7f;
    if (code < 8)
        return (float)code * 0x1p-10f;
    return byte == 0x7f ? 0.0f : dk_float_of_bits((code << 20) + (119u << 23));
}

DK_INLINE void nvfp4_block(float *restrict y, const uint8_t *p)
{
    int8_t values[64]; /* low nibbles of all 32 bytes, then high ones */
    e2m1_values(values, p + 4, 32);
    for (int j = 0; j < 4; j++) {
        float scale = half_nvfp4_scale(p[j]);
        for (int i = 0; i < 8; i++) {
            y[16 * j + i] = (float)values[8 * j + i] * scale;
            y[16 * j + 8 + i] = (float)values[32 + 8 * j + i] * scale;
        }
    }
}

#ifdef DK_X86

/* ---- the types that have no unpacker ---- */

DK_AVX2 DK_INLINE void nibbles_avx2(uint8_t *u, const uint8_t *q)
{
    __m128i packed = _mm_loadu_si128((const __m128i *)q), nibble = _mm_set1_epi8(15);
    _mm_store_si128((__m128i *)u, _mm_and_si128(packed, nibble));
    _mm_store_si128((__m128i *)(u + 16), _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
}

DK_AVX2 DK_INLINE void five_bits_avx2(uint8_t *u, const uint8_t *q, uint32_t fifth)
{
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m128i packed = _mm_loadu_si128((const __m128i *)q);
    __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
    __m256i upper = _mm256_shuffle_epi8(_mm256_set1_epi32((int)fifth), spread);
    upper = _mm256_cmpeq_epi8(_mm256_and_si256(upper, bits), bits);
    low = _mm256_and_si256(low, _mm256_set1_epi8(15));
    _mm256_store_si256((__m256i *)u, _mm256_or_si256(low, _mm256_and_si256(upper, _mm256_set1_epi8(16))));
}

#define VECTOR_BLOCKS(TYPE, UNPACK, M, BIAS)                                                               \
    DK_AVX2 DK_INLINE void TYPE##_avx2(float *restrict y, const uint8_t *p)                                \
    {                                                                                                      \
        DK_ALIGNED uint8_t u[32];                                                                          \
        float d = dk_half_avx2(p), m = dk_half_avx2(p + M);                                                \
        UNPACK;                                                                                            \
        dk_expand_avx2(y, u, &d, &m, 32, 32, BIAS);                                                        \
    }                                                                                                      \
    DK_AVX512 DK_INLINE void TYPE##_avx512(float *restrict y, const uint8_t *p)                            \
    {                                                                                                      \
        DK_ALIGNED uint8_t u[32];                                                                          \
        float d = dk_half_avx2(p), m = dk_half_avx2(p + M);                                                \
        UNPACK;                                                                                            \
        dk_expand_avx512(y, u, &d, &m, 32, 32, BIAS);                                                      \
    }

VECTOR_BLOCKS(q4_1, nibbles_avx2(u, p + 4), 2, DK_HAS_OFFSET)
VECTOR_BLOCKS(q5_0, five_bits_avx2(u, p + 6, dk_load32(p + 2)), 0, 16)
VECTOR_BLOCKS(q5_1, five_bits_avx2(u, p + 8, dk_load32(p + 4)), 2, DK_HAS_OFFSET)

#endif

DK_PLAIN_DECODER(q8_0, 32, 34, 0, 0)
DK_GROUP_DECODER(q4_0, 32, 18, DK_PLAIN(q4_0, 0, 0), 32, 8)
DK_DECODER(q4_1, 32, 20, DK_PLAIN(q4_1, 0, 2), q4_1_avx2(out, p), q4_1_avx512(out, p))
DK_DECODER(q5_0, 32, 22, DK_PLAIN(q5_0, 0, 0), q5_0_avx2(out, p), q5_0_avx512(out, p))
DK_DECODER(q5_1, 32, 24, DK_PLAIN(q5_1, 0, 2), q5_1_avx2(out, p), q5_1_avx512(out, p))
DK_GROUP_DECODER(iq4_nl, 32, 18, DK_PLAIN(iq4_nl, 0, 0), 32, 127)
DK_PLAIN_DECODER(tq1_0, 256, 54, 52, 52)
DK_PLAIN_DECODER(tq2_0, 256, 66, 64, 64)
DK_GROUP_DECODER(mxfp4, 32, 17, mxfp4_block(out, p), 32, 12)
DK_GROUP_DECODER(nvfp4, 64, 36, nvfp4_block(out, p), 16, 12)

/* Decoders of the types of 32 elements with one half-precision scale, of the ternary types, and of the 4-bit
 * floats in blocks (MXFP4, NVFP4). Formulas and field order: kernels/dequantize/small_blocks.py. */

#include "decode.h"

const int8_t dk_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t dk_twice_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

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

DK_INLINE void q4_1_block(float *restrict y, const uint8_t *p, float d, float m)
{
    for (int i = 0; i < 16; i++) {
        y[i] = (float)(p[4 + i] & 15) * d + m;
        y[16 + i] = (float)(p[4 + i] >> 4) * d + m;
    }
}

/* Bit e of the word `fifth` belongs to element e. */
DK_INLINE void q5_0_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    uint32_t fifth = dk_load32(p + 2);
    for (int i = 0; i < 16; i++) {
        y[i] = (float)((int)((p[6 + i] & 15) | (fifth >> i & 1) << 4) - 16) * d;
        y[16 + i] = (float)((int)(p[6 + i] >> 4 | (fifth >> (16 + i) & 1) << 4) - 16) * d;
    }
}

DK_INLINE void q5_1_block(float *restrict y, const uint8_t *p, float d, float m)
{
    uint32_t fifth = dk_load32(p + 4);
    for (int i = 0; i < 16; i++) {
        y[i] = (float)(int)((p[8 + i] & 15) | (fifth >> i & 1) << 4) * d + m;
        y[16 + i] = (float)(int)(p[8 + i] >> 4 | (fifth >> (16 + i) & 1) << 4) * d + m;
    }
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

DK_INLINE void mxfp4_block(float *restrict y, const uint8_t *p)
{
    float scale = half_power(p[0]);
    for (int i = 0; i < 16; i++) {
        y[i] = (float)dk_twice_e2m1[p[1 + i] & 15] * scale;
        y[16 + i] = (float)dk_twice_e2m1[p[1 + i] >> 4] * scale;
    }
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
    for (int j = 0; j < 4; j++) {
        float scale = half_nvfp4_scale(p[j]);
        const uint8_t *q = p + 4 + 8 * j;
        for (int i = 0; i < 8; i++) {
            y[16 * j + i] = (float)dk_twice_e2m1[q[i] & 15] * scale;
            y[16 * j + 8 + i] = (float)dk_twice_e2m1[q[i] >> 4] * scale;
        }
    }
}

DK_PLAIN_DECODER(q8_0, 32, 34, 0, 0)
DK_PLAIN_DECODER(q4_0, 32, 18, 0, 0)
DK_PLAIN_DECODER(q4_1, 32, 20, 0, 2)
DK_PLAIN_DECODER(q5_0, 32, 22, 0, 0)
DK_PLAIN_DECODER(q5_1, 32, 24, 0, 2)
DK_PLAIN_DECODER(iq4_nl, 32, 18, 0, 0)
DK_PLAIN_DECODER(tq1_0, 256, 54, 52, 52)
DK_PLAIN_DECODER(tq2_0, 256, 66, 64, 64)
DK_DECODER(mxfp4, 32, 17, mxfp4_block(out, p), mxfp4_block(out, p), mxfp4_block(out, p))
DK_DECODER(nvfp4, 64, 36, nvfp4_block(out, p), nvfp4_block(out, p), nvfp4_block(out, p))

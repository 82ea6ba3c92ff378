/* Decoders of the K types: 256 elements in sub-blocks of 16 or 32 with small integer scales. Formulas and
 * field order: kernels/dequantize/k_blocks.py. d and m are the half-precision scales, q stored integers. */

#include "decode_groups.h"

DK_INLINE void q2_k_block(float *restrict y, const uint8_t *p, float d, float m)
{
    for (int j = 0; j < 16; j++) {
        float scale = (float)(p[j] & 15) * d, offset = (float)(p[j] >> 4) * m;
        const uint8_t *q = p + 16 + 32 * (j >> 3) + 16 * (j & 1);
        int shift = j & 6;
        for (int i = 0; i < 16; i++)
            y[16 * j + i] = (float)(q[i] >> shift & 3) * scale - offset;
    }
}

/* 6-bit scale j of Q3_K, at byte 96: eight bytes of low nibbles, then four of upper bit pairs. */
DK_INLINE int q3_k_scale(const uint8_t *packed, int j)
{
    int low = j < 8 ? packed[j] & 15 : packed[j - 8] >> 4;
    return (low | (packed[8 + (j & 3)] >> 2 * (j >> 2) & 3) << 4) - 32;
}

DK_INLINE void q3_k_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int j = 0; j < 16; j++) {
        float scale = (float)q3_k_scale(p + 96, j) * d;
        const uint8_t *third = p + 16 * (j & 1), *q = p + 32 + 32 * (j >> 3) + 16 * (j & 1);
        int shift = j & 6;
        for (int i = 0; i < 16; i++)
            y[16 * j + i] = (float)((q[i] >> shift & 3) + (third[i] >> (j >> 1) & 1) * 4 - 4) * scale;
    }
}

DK_INLINE void q4_k_block(float *restrict y, const uint8_t *p, float d, float m)
{
    for (int j = 0; j < 8; j++) {
        float scale = (float)dk_six_bit_scale(p + 4, j) * d, offset = (float)dk_six_bit_offset(p + 4, j) * m;
        const uint8_t *q = p + 16 + 32 * (j >> 1);
        int shift = 4 * (j & 1);
        for (int i = 0; i < 32; i++)
            y[32 * j + i] = (float)(q[i] >> shift & 15) * scale - offset;
    }
}

DK_INLINE void q5_k_block(float *restrict y, const uint8_t *p, float d, float m)
{
    for (int j = 0; j < 8; j++) {
        float scale = (float)dk_six_bit_scale(p + 4, j) * d, offset = (float)dk_six_bit_offset(p + 4, j) * m;
        const uint8_t *fifth = p + 16, *q = p + 48 + 32 * (j >> 1);
        int shift = 4 * (j & 1);
        for (int i = 0; i < 32; i++)
            y[32 * j + i] = (float)((q[i] >> shift & 15) | (fifth[i] >> j & 1) << 4) * scale - offset;
    }
}

DK_INLINE void q6_k_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int j = 0; j < 16; j++) {
        float scale = (float)(int8_t)p[192 + j] * d;
        int half = j >> 3, part = j >> 1 & 3, side = 16 * (j & 1);
        const uint8_t *low = p + 64 * half + 32 * (part & 1) + side, *upper = p + 128 + 32 * half + side;
        int low_shift = 4 * (part >> 1), upper_shift = 2 * part;
        for (int i = 0; i < 16; i++) {
            int q = (low[i] >> low_shift & 15) | (upper[i] >> upper_shift & 3) << 4;
            y[16 * j + i] = (float)(q - 32) * scale;
        }
    }
}

DK_INLINE int iq4_xs_scale(const uint8_t *p, int j)
{
    return ((p[4 + (j >> 1)] >> 4 * (j & 1) & 15) | (dk_load16(p + 2) >> 2 * j & 3) << 4) - 32;
}

DK_INLINE void iq4_xs_block(float *restrict y, const uint8_t *p, float d, float m)
{
    (void)m;
    for (int j = 0; j < 8; j++) {
        float scale = (float)iq4_xs_scale(p, j) * d;
        const uint8_t *q = p + 8 + 16 * j;
        for (int i = 0; i < 16; i++) {
            y[32 * j + i] = (float)dk_iq4_values[q[i] & 15] * scale;
            y[32 * j + 16 + i] = (float)dk_iq4_values[q[i] >> 4] * scale;
        }
    }
}

DK_GROUP_DECODER(q2_k, 256, 84, DK_PLAIN(q2_k, 80, 82), 16, DK_HAS_OFFSET)
DK_GROUP_DECODER(q3_k, 256, 110, DK_PLAIN(q3_k, 108, 108), 16, 4)
DK_GROUP_DECODER(q4_k, 256, 144, DK_PLAIN(q4_k, 0, 2), 32, DK_HAS_OFFSET)
DK_GROUP_DECODER(q5_k, 256, 176, DK_PLAIN(q5_k, 0, 2), 32, DK_HAS_OFFSET)
DK_GROUP_DECODER(q6_k, 256, 210, DK_PLAIN(q6_k, 208, 208), 16, 32)
DK_GROUP_DECODER(iq4_xs, 256, 136, DK_PLAIN(iq4_xs, 0, 0), 32, 127)

/* The fields of the IQ block types, as indices into grids, signs and scales: what decoding to float32 and
 * unpacking for int8 products have in common. Formulas: kernels/dequantize/iq_blocks.py. */
#ifndef EDGEDSV4_IQ_FIELDS_H
#define EDGEDSV4_IQ_FIELDS_H

#include "native.h"

#define DK_HIDDEN __attribute__((visibility("hidden")))

/* One grid index stands for eight signed bytes, or four, the first in the lowest byte (iq_grids.c). IQ1_M
 * uses the grid of IQ1_S. */
extern const uint64_t dk_grid_iq1_s[2048] DK_HIDDEN, dk_grid_iq2_xxs[256] DK_HIDDEN;
extern const uint64_t dk_grid_iq2_xs[512] DK_HIDDEN, dk_grid_iq2_s[1024] DK_HIDDEN;
extern const uint32_t dk_grid_iq3_xxs[256] DK_HIDDEN, dk_grid_iq3_s[512] DK_HIDDEN;

/* dk_grid_iq2_xxs in two bits per value, which say 8, 25 or 43: of each entry the first four values in a byte,
 * then, 256 bytes on, the last four. */
extern const uint8_t dk_codes_iq2_xxs[512] DK_HIDDEN;

/* One block of 256 elements. */
typedef struct {
    const uint8_t *bytes;          /* the 8-bit indices as stored; NULL: they are in `index` */
    int gap;                       /* bytes between four indices and the next four */
    DK_ALIGNED uint16_t index[64]; /* 32 entries of 8 values, or 64 of 4 */
    DK_ALIGNED uint8_t sign[32];   /* bit i set: element i of eight is negative */
    DK_ALIGNED float scale[16];    /* per 32 elements, or 16 in IQ2_XS, IQ2_S and IQ1_M */
} dk_iq_fields;

/* One block of IQ1_S or IQ1_M. */
typedef struct {
    DK_ALIGNED uint16_t index[32];
    DK_ALIGNED float delta[32]; /* per 8 elements */
    DK_ALIGNED float scale[16];
} dk_iq1_fields;

/* Four 7-bit sign patterns and four more bits in a word: each pattern in its byte, completed by the eighth
 * bit that makes the number of minus signs even. */
DK_INLINE uint32_t dk_even_signs(uint32_t word)
{
    uint32_t seven =
        (word & 0x7f) | (word << 1 & 0x7f00) | (word << 2 & 0x7f0000) | (word << 3 & 0x7f000000);
    uint32_t parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return seven | (parity & 0x01010101) << 7;
}

/* Index of entry t. The branch is decided at compile time where everything is inlined. */
DK_INLINE uint32_t dk_index(const dk_iq_fields *f, int t)
{
    return f->bytes != NULL ? f->bytes[t + t / 4 * f->gap] : f->index[t];
}

/* Eight values of a grid (all positive, at most `bias`) with their signs, plus bias: unsigned bytes. */
DK_INLINE uint64_t dk_biased_eight(uint64_t values, uint8_t sign, uint64_t bias)
{
    const uint64_t every_byte = 0x0101010101010101;
    uint64_t bits = sign * every_byte & 0x8040201008040201; /* bit i in byte i */
    uint64_t negative = ((bits + 0x7f * every_byte) >> 7 & every_byte) * 0xff;
    return bias * every_byte + (values & ~negative) - (values & negative);
}

DK_INLINE void dk_stored_indices(dk_iq_fields *f, const uint8_t *bytes, int gap)
{
    f->bytes = bytes;
    f->gap = gap;
}

DK_INLINE void dk_iq2_xxs_fields(dk_iq_fields *restrict f, const uint8_t *p, float d)
{
    uint32_t signs[8];
    for (int j = 0; j < 8; j++) {
        uint32_t word = dk_load32(p + 6 + 8 * j);
        signs[j] = dk_even_signs(word);
        f->scale[j] = ((float)(int)(word >> 28) + 0.5f) * d * 0.25f;
    }
    memcpy(f->sign, signs, sizeof signs);
    dk_stored_indices(f, p + 2, 4);
}

DK_INLINE void dk_iq3_xxs_fields(dk_iq_fields *restrict f, const uint8_t *p, float d)
{
    uint32_t signs[8];
    for (int j = 0; j < 8; j++) {
        uint32_t word = dk_load32(p + 66 + 4 * j);
        signs[j] = dk_even_signs(word);
        f->scale[j] = ((float)(int)(word >> 28) + 0.5f) * d * 0.5f;
    }
    memcpy(f->sign, signs, sizeof signs);
    dk_stored_indices(f, p + 2, 0);
}

/* Sixteen 4-bit scales, low nibble first. */
DK_INLINE void dk_nibble_scales(dk_iq_fields *restrict f, const uint8_t *packed, float d)
{
    for (int j = 0; j < 8; j++) {
        f->scale[2 * j] = ((float)(packed[j] & 15) + 0.5f) * d * 0.25f;
        f->scale[2 * j + 1] = ((float)(packed[j] >> 4) + 0.5f) * d * 0.25f;
    }
}

DK_INLINE void dk_iq2_xs_fields(dk_iq_fields *restrict f, const uint8_t *p, float d)
{
    f->bytes = NULL;
    for (int i = 0; i < 32; i++) {
        uint16_t word = dk_load16(p + 2 + 2 * i);
        uint16_t seven = word >> 9, parity = seven ^ seven >> 4;
        parity ^= parity >> 2;
        parity ^= parity >> 1;
        f->index[i] = word & 511;
        f->sign[i] = (uint8_t)(seven | (parity & 1) << 7);
    }
    dk_nibble_scales(f, p + 66, d);
}

DK_INLINE void dk_iq2_s_fields(dk_iq_fields *restrict f, const uint8_t *p, float d)
{
    f->bytes = NULL;
    for (int i = 0; i < 32; i++)
        f->index[i] = (uint16_t)(p[2 + i] | (p[66 + (i >> 2)] >> 2 * (i & 3) & 3) << 8);
    memcpy(f->sign, p + 34, 32);
    dk_nibble_scales(f, p + 74, d);
}

DK_INLINE void dk_iq3_s_fields(dk_iq_fields *restrict f, const uint8_t *p, float d)
{
    f->bytes = NULL;
    for (int i = 0; i < 64; i++)
        f->index[i] = (uint16_t)(p[2 + i] | (p[66 + (i >> 3)] >> (i & 7) & 1) << 8);
    memcpy(f->sign, p + 74, 32);
    for (int j = 0; j < 8; j++) {
        int s = p[106 + (j >> 1)] >> 4 * (j & 1) & 15;
        f->scale[j] = (float)(2 * s + 1) * d;
    }
}

/* ---- IQ1: (grid + delta) * scale ---- */

/* Words of three upper index bits for each of four entries, a 3-bit scale, and the sign of delta. */
DK_INLINE void dk_iq1_s_fields(dk_iq1_fields *restrict f, const uint8_t *p, float d)
{
    for (int j = 0; j < 8; j++) {
        uint32_t word = dk_load16(p + 34 + 2 * j);
        f->scale[j] = (float)(int)(2 * (word >> 12 & 7) + 1) * d;
        for (int i = 0; i < 4; i++) {
            f->index[4 * j + i] = (uint16_t)(p[2 + 4 * j + i] | (word >> 3 * i & 7) << 8);
            f->delta[4 * j + i] = word >> 15 ? -0.125f : 0.125f;
        }
    }
}

/* The half float whose nibbles are the top bits of the last four words. */
DK_INLINE uint16_t dk_iq1_m_scale(const uint8_t *p)
{
    uint64_t words = dk_load64(p + 48);
    return (uint16_t)((words >> 12 & 0xf) | (words >> 24 & 0xf0) | (words >> 36 & 0xf00) |
                      (words >> 48 & 0xf000));
}

DK_INLINE void dk_iq1_m_fields(dk_iq1_fields *restrict f, const uint8_t *p, float d)
{
    for (int j = 0; j < 16; j++)
        f->scale[j] = (float)(2 * (dk_load16(p + 48 + 2 * (j >> 2)) >> 3 * (j & 3) & 7) + 1) * d;
    for (int i = 0; i < 32; i++) {
        uint32_t nibble = p[32 + (i >> 1)] >> 4 * (i & 1) & 15;
        f->index[i] = (uint16_t)(p[i] | (nibble & 7) << 8);
        f->delta[i] = nibble >> 3 ? -0.125f : 0.125f;
    }
}

#endif

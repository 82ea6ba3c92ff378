/* Decoders of stored blocks to float32: the table of them, and what they are made of.
 *
 * A type has a plain block function that the compiler vectorises for each instruction set, or hand-written
 * ones. All give the same bits: the decoders of kernels/dequantize/ are the definition. Fused multiply-add
 * is harmless in them, because every product that is added to has at most 24 significant bits. */
#ifndef EDGEDSV4_DECODE_H
#define EDGEDSV4_DECODE_H

#include "native.h"

/* Elements [first_column, first_column + columns) of a row, scales and factor applied. */
typedef void (*dk_decode_fn)(float *y, const dk_matrix *w, int64_t row, int64_t first_column,
                             int64_t columns);

typedef struct {
    int32_t block_elements;
    int32_t block_bytes;
    dk_decode_fn scalar;
    dk_decode_fn avx2; /* NULL on other machines; also below */
    dk_decode_fn avx512;
} dk_decoder;

/* The function to use for a type at dk_level; NULL for a number that is no type. */
dk_decode_fn dk_decode_fn_of(int type);
/* Block sizes and functions of a type, or NULL. */
const dk_decoder *dk_decoder_of(int type);

extern const dk_decoder dk_decode_f32, dk_decode_f16, dk_decode_bf16, dk_decode_f64;
extern const dk_decoder dk_decode_fp8_e4m3, dk_decode_fp8_e5m2, dk_decode_e8m0, dk_decode_fp4_e2m1;
extern const dk_decoder dk_decode_q8_0, dk_decode_q4_0, dk_decode_q4_1, dk_decode_q5_0, dk_decode_q5_1;
extern const dk_decoder dk_decode_iq4_nl, dk_decode_tq1_0, dk_decode_tq2_0, dk_decode_mxfp4, dk_decode_nvfp4;
extern const dk_decoder dk_decode_q2_k, dk_decode_q3_k, dk_decode_q4_k, dk_decode_q5_k, dk_decode_q6_k;
extern const dk_decoder dk_decode_iq4_xs, dk_decode_iq2_xxs, dk_decode_iq2_xs, dk_decode_iq2_s;
extern const dk_decoder dk_decode_iq3_xxs, dk_decode_iq3_s, dk_decode_iq1_s, dk_decode_iq1_m;

/* Code book of IQ4_NL and IQ4_XS. */
extern const int8_t dk_iq4_values[16] __attribute__((visibility("hidden")));

/* Multiply a decoded row by w->factor, unless it is 1. */
void dk_apply_factor(float *y, const dk_matrix *w, int64_t columns);

/* First byte of the block that holds a column. */
DK_INLINE const uint8_t *dk_block_at(const dk_matrix *w, int64_t row, int64_t column, int64_t elements,
                                  int64_t bytes)
{
    return w->data + row * w->row_bytes + column / elements * bytes;
}

/* Scale and offset of sub-block j of Q4_K and Q5_K, from its 12 packed bytes: bytes 0-3 and 4-7 hold scales
 * and offsets 0-3 in their low six bits; bytes 8-11 the low four bits of scales and offsets 4-7, whose upper
 * two bits are on top of the first eight bytes. */
DK_INLINE uint8_t dk_six_bit_scale(const uint8_t *packed, int j)
{
    return j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
}

DK_INLINE uint8_t dk_six_bit_offset(const uint8_t *packed, int j)
{
    return j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
}

/* All eight of each in one word, lowest byte first. */
DK_INLINE void dk_six_bit_words(const uint8_t *packed, uint64_t *scales, uint64_t *offsets)
{
    uint32_t first = dk_load32(packed), second = dk_load32(packed + 4), third = dk_load32(packed + 8);
    uint32_t upper_scales = (third & 0x0f0f0f0f) | ((first >> 2) & 0x30303030);
    uint32_t upper_offsets = ((third >> 4) & 0x0f0f0f0f) | ((second >> 2) & 0x30303030);
    *scales = (first & 0x3f3f3f3f) | (uint64_t)upper_scales << 32;
    *offsets = (second & 0x3f3f3f3f) | (uint64_t)upper_offsets << 32;
}

/* The sixteen 6-bit scales of Q3_K plus 32: eight bytes of low nibbles, then four of upper bit pairs. */
DK_INLINE void dk_q3_k_words(const uint8_t *packed, uint64_t words[2])
{
    uint64_t low = dk_load64(packed), upper = dk_load32(packed + 8);
    uint64_t first = (upper << 4 & 0x30303030) | (upper << 34 & 0x3030303000000000);
    uint64_t second = (upper & 0x30303030) | (upper << 30 & 0x3030303000000000);
    words[0] = (low & 0x0f0f0f0f0f0f0f0f) | first;
    words[1] = (low >> 4 & 0x0f0f0f0f0f0f0f0f) | second;
}

DK_INLINE float dk_half(const uint8_t *p) { return dk_f16(dk_load16(p)); }

/* A decoder NAME with the given attribute: CALL, which decodes block p to out, for every block. */
#define DK_ROW_FUNCTION(NAME, ATTRIBUTE, ELEMENTS, BYTES, CALL)                                            \
    ATTRIBUTE static void NAME(float *restrict y, const dk_matrix *w, int64_t row, int64_t first_column,   \
                               int64_t columns)                                                            \
    {                                                                                                      \
        const uint8_t *p = dk_block_at(w, row, first_column, ELEMENTS, BYTES);                             \
        for (float *out = y, *end = y + columns; out < end; out += ELEMENTS, p += BYTES)                   \
            CALL;                                                                                          \
        dk_apply_factor(y, w, columns);                                                                    \
    }

#ifdef DK_X86

DK_AVX2 DK_INLINE float dk_half_avx2(const uint8_t *p) { return _cvtsh_ss(dk_load16(p)); }

/* The table entry of a type, and its three functions, from the block functions named. */
#define DK_DECODER(TYPE, ELEMENTS, BYTES, SCALAR, AVX2, AVX512)                                            \
    DK_ROW_FUNCTION(TYPE##_scalar_row, , ELEMENTS, BYTES, SCALAR)                                          \
    DK_ROW_FUNCTION(TYPE##_avx2_row, DK_AVX2, ELEMENTS, BYTES, AVX2)                                       \
    DK_ROW_FUNCTION(TYPE##_avx512_row, DK_AVX512, ELEMENTS, BYTES, AVX512)                                 \
    const dk_decoder dk_decode_##TYPE = {ELEMENTS, BYTES, TYPE##_scalar_row, TYPE##_avx2_row,              \
                                         TYPE##_avx512_row};

#else

#define DK_DECODER(TYPE, ELEMENTS, BYTES, SCALAR, AVX2, AVX512)                                            \
    DK_ROW_FUNCTION(TYPE##_scalar_row, , ELEMENTS, BYTES, SCALAR)                                          \
    const dk_decoder dk_decode_##TYPE = {ELEMENTS, BYTES, TYPE##_scalar_row, NULL, NULL};

#endif

/* A call of the plain block function of a type, d and m being the half floats at bytes D and M. */
#define DK_PLAIN(TYPE, D, M) TYPE##_block(out, p, dk_half(p + (D)), dk_half(p + (M)))
#define DK_PLAIN_AVX2(TYPE, D, M) TYPE##_block(out, p, dk_half_avx2(p + (D)), dk_half_avx2(p + (M)))
/* A type whose plain block function the compiler vectorises for each instruction set. */
#define DK_PLAIN_DECODER(TYPE, ELEMENTS, BYTES, D, M)                                                      \
    DK_DECODER(TYPE, ELEMENTS, BYTES, DK_PLAIN(TYPE, D, M), DK_PLAIN_AVX2(TYPE, D, M),                     \
               DK_PLAIN_AVX2(TYPE, D, M))

#endif

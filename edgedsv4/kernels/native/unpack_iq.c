/* Groups of IQ types as unsigned bytes: IQ2_XXS, IQ2_XS, IQ3_XXS through their grids, IQ4_NL and IQ4_XS
 * through their code book. Formulas and field order: kernels/dequantize/iq_blocks.py and k_blocks.py;
 * contract: unpack.h. What makes the signed values unsigned is the largest of them: 43, 62, 127. */

#include "iq_fields_avx2.h"
#include "unpack_blocks.h"

/* Code book of IQ4_NL and IQ4_XS plus 127. */
const uint8_t dk_iq4_plus_127[16] DK_ALIGNED = {0,   23,  44,  62,  78,  92,  105, 117,
                                                    128, 140, 152, 165, 180, 196, 216, 240};

/* ---- plain ---- */

DK_INLINE void iq4_nl_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                            const uint8_t *p, float factor)
{
    *scale = dk_half(p) * factor;
    *offset = -127.0f * *scale;
    for (int i = 0; i < 16; i++) {
        u[i] = dk_iq4_plus_127[p[2 + i] & 15];
        u[16 + i] = dk_iq4_plus_127[p[2 + i] >> 4];
    }
}

DK_INLINE void iq4_xs_plain(uint8_t *restrict u, float *restrict scale, float *restrict offset,
                            const uint8_t *p, float factor)
{
    float d = dk_half(p) * factor;
    uint32_t lows = dk_load32(p + 4), uppers = dk_load16(p + 2);
    for (int j = 0; j < 8; j++) {
        scale[j] = (float)((int)((lows >> 4 * j & 15) | (uppers >> 2 * j & 3) << 4) - 32) * d;
        offset[j] = -127.0f * scale[j];
        for (int i = 0; i < 16; i++) {
            u[32 * j + i] = dk_iq4_plus_127[p[8 + 16 * j + i] & 15];
            u[32 * j + 16 + i] = dk_iq4_plus_127[p[8 + 16 * j + i] >> 4];
        }
    }
}

DK_INLINE void group_scales(float *restrict scale, float *restrict offset, const dk_iq_fields *f, int groups,
                            float bias)
{
    memcpy(scale, f->scale, (size_t)groups * sizeof *scale);
    for (int j = 0; j < groups; j++)
        offset[j] = -bias * f->scale[j];
}

DK_INLINE void eights(uint8_t *restrict u, const dk_iq_fields *f, const uint64_t *grid, int bias)
{
    for (int t = 0; t < 32; t++) {
        uint64_t biased = dk_biased_eight(grid[dk_index(f, t)], f->sign[t], (uint64_t)bias);
        memcpy(u + 8 * t, &biased, sizeof biased);
    }
}

DK_INLINE void fours(uint8_t *restrict u, const dk_iq_fields *f, const uint32_t *grid, int bias)
{
    for (int t = 0; t < 32; t++) {
        uint64_t values = grid[dk_index(f, 2 * t)] | (uint64_t)grid[dk_index(f, 2 * t + 1)] << 32;
        uint64_t biased = dk_biased_eight(values, f->sign[t], (uint64_t)bias);
        memcpy(u + 8 * t, &biased, sizeof biased);
    }
}

#ifdef DK_X86

/* ---- AVX2 ---- */

DK_AVX2 DK_INLINE void iq4_bytes_avx2(uint8_t *u, const uint8_t *q)
{
    __m128i table = _mm_load_si128((const __m128i *)dk_iq4_plus_127), nibble = _mm_set1_epi8(15);
    __m128i packed = _mm_loadu_si128((const __m128i *)q);
    __m128i upper = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    _mm_storeu_si128((__m128i *)u, _mm_shuffle_epi8(table, _mm_and_si128(packed, nibble)));
    _mm_storeu_si128((__m128i *)(u + 16), _mm_shuffle_epi8(table, upper));
}

DK_AVX2 DK_INLINE void iq4_nl_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    *scale = dk_half_avx2(p) * factor;
    *offset = -127.0f * *scale;
    iq4_bytes_avx2(u, p + 2);
}

DK_AVX2 DK_INLINE void iq4_xs_scales(float *scale, float *offset, const uint8_t *p, float factor)
{
    float d = dk_half_avx2(p) * factor;
    const __m256i steps = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i low = _mm256_set1_epi32((int)dk_load32(p + 4)), upper = _mm256_set1_epi32(dk_load16(p + 2));
    low = _mm256_and_si256(_mm256_srlv_epi32(low, _mm256_slli_epi32(steps, 2)), _mm256_set1_epi32(15));
    upper = _mm256_and_si256(_mm256_srlv_epi32(upper, _mm256_slli_epi32(steps, 1)), _mm256_set1_epi32(3));
    __m256i s = _mm256_or_si256(low, _mm256_slli_epi32(upper, 4));
    s = _mm256_sub_epi32(s, _mm256_set1_epi32(32));
    dk_store_scaled8(scale, s, d);
    dk_store_scaled8(offset, s, -127.0f * d);
}

DK_AVX2 DK_INLINE void iq4_xs_avx2(uint8_t *u, float *scale, float *offset, const uint8_t *p, float factor)
{
    iq4_xs_scales(scale, offset, p, factor);
    for (int j = 0; j < 8; j++)
        iq4_bytes_avx2(u + 32 * j, p + 8 + 16 * j);
}

/* 32 bytes, negative where the bits of `sign` say so, plus the bias. */
DK_AVX2 DK_INLINE void store_signed32(uint8_t *u, __m256i values, const uint8_t *sign, int bias)
{
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m256i mask = _mm256_shuffle_epi8(_mm256_set1_epi32((int)dk_load32(sign)), spread);
    mask = _mm256_cmpeq_epi8(_mm256_and_si256(mask, bits), bits);
    values = _mm256_sub_epi8(_mm256_xor_si256(values, mask), mask);
    _mm256_storeu_si256((__m256i *)u, _mm256_add_epi8(values, _mm256_set1_epi8((char)bias)));
}

DK_AVX2 DK_INLINE int64_t eight_at(const dk_iq_fields *f, const uint64_t *grid, int t)
{
    return (int64_t)grid[dk_index(f, t)];
}

DK_AVX2 DK_INLINE int four_at(const dk_iq_fields *f, const uint32_t *grid, int t)
{
    return (int)grid[dk_index(f, t)];
}

DK_AVX2 DK_INLINE __m256i four_eights(const dk_iq_fields *f, const uint64_t *grid, int t)
{
    return _mm256_setr_epi64x(eight_at(f, grid, t), eight_at(f, grid, t + 1), eight_at(f, grid, t + 2),
                              eight_at(f, grid, t + 3));
}

DK_AVX2 DK_INLINE __m256i eight_fours(const dk_iq_fields *f, const uint32_t *grid, int t)
{
    return _mm256_setr_epi32(four_at(f, grid, t), four_at(f, grid, t + 1), four_at(f, grid, t + 2),
                             four_at(f, grid, t + 3), four_at(f, grid, t + 4), four_at(f, grid, t + 5),
                             four_at(f, grid, t + 6), four_at(f, grid, t + 7));
}

DK_AVX2 DK_INLINE void eights_avx2(uint8_t *u, const dk_iq_fields *f, const uint64_t *grid, int bias)
{
    for (int t = 0; t < 32; t += 4)
        store_signed32(u + 8 * t, four_eights(f, grid, t), f->sign + t, bias);
}

DK_AVX2 DK_INLINE void fours_avx2(uint8_t *u, const dk_iq_fields *f, const uint32_t *grid, int bias)
{
    for (int t = 0; t < 32; t += 4)
        store_signed32(u + 8 * t, eight_fours(f, grid, 2 * t), f->sign + t, bias);
}

/* ---- AVX-512 ---- */

#define iq4_nl_avx512 iq4_nl_avx2

DK_AVX512 DK_INLINE void iq4_xs_avx512(uint8_t *u, float *scale, float *offset, const uint8_t *p,
                                       float factor)
{
    const __m512i twice = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
    const __m512i shifts = _mm512_maskz_set1_epi16(0xff00ff00, 4);
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)dk_iq4_plus_127));
    iq4_xs_scales(scale, offset, p, factor);
    for (int j = 0; j < 4; j++) {
        __m256i packed = _mm256_loadu_si256((const __m256i *)(p + 8 + 32 * j));
        __m512i codes = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(packed));
        codes = _mm512_and_si512(_mm512_srlv_epi16(codes, shifts), _mm512_set1_epi8(15));
        _mm512_storeu_si512(u + 64 * j, _mm512_shuffle_epi8(table, codes));
    }
}

DK_AVX512 DK_INLINE void store_signed64(uint8_t *u, __m512i values, const uint8_t *sign, int bias)
{
    values = _mm512_mask_sub_epi8(values, dk_load64(sign), _mm512_setzero_si512(), values);
    _mm512_storeu_si512(u, _mm512_add_epi8(values, _mm512_set1_epi8((char)bias)));
}

DK_AVX512 DK_INLINE void eights_avx512(uint8_t *u, const dk_iq_fields *f, const uint64_t *grid, int bias)
{
    for (int t = 0; t < 32; t += 8) {
        __m512i values = _mm512_castsi256_si512(four_eights(f, grid, t));
        values = _mm512_inserti64x4(values, four_eights(f, grid, t + 4), 1);
        store_signed64(u + 8 * t, values, f->sign + t, bias);
    }
}

DK_AVX512 DK_INLINE void fours_avx512(uint8_t *u, const dk_iq_fields *f, const uint32_t *grid, int bias)
{
    for (int t = 0; t < 32; t += 8) {
        __m512i values = _mm512_castsi256_si512(eight_fours(f, grid, 2 * t));
        values = _mm512_inserti64x4(values, eight_fours(f, grid, 2 * t + 8), 1);
        store_signed64(u + 8 * t, values, f->sign + t, bias);
    }
}

#endif

/* A block function through the fields of a type: EXPAND looks its grid up. */
#define GRID_BLOCK(NAME, ATTRIBUTE, FIELDS, GROUPS, HALF, EXPAND, GRID, BIAS)                              \
    ATTRIBUTE DK_INLINE void NAME(uint8_t *restrict u, float *restrict scale, float *restrict offset,      \
                                  const uint8_t *p, float factor)                                          \
    {                                                                                                      \
        dk_iq_fields f;                                                                                    \
        FIELDS(&f, p, HALF(p) * factor);                                                                   \
        group_scales(scale, offset, &f, GROUPS, BIAS);                                                     \
        EXPAND(u, &f, GRID, BIAS);                                                                         \
    }

#ifdef DK_X86
#define GRID_UNPACKER(TYPE, GROUP, BYTES, EXPAND, GRID, BIAS)                                              \
    GRID_BLOCK(TYPE##_plain, , dk_##TYPE##_fields, 256 / GROUP, dk_half, EXPAND, GRID, BIAS)               \
    GRID_BLOCK(TYPE##_avx2, DK_AVX2, dk_##TYPE##_fields_avx2, 256 / GROUP, dk_half_avx2, EXPAND##_avx2,    \
               GRID, BIAS)                                                                                 \
    GRID_BLOCK(TYPE##_avx512, DK_AVX512, dk_##TYPE##_fields_avx2, 256 / GROUP, dk_half_avx2,               \
               EXPAND##_avx512, GRID, BIAS)                                                                \
    DK_UNPACKER(TYPE, GROUP, 256, BYTES)
#else
#define GRID_UNPACKER(TYPE, GROUP, BYTES, EXPAND, GRID, BIAS)                                              \
    GRID_BLOCK(TYPE##_plain, , dk_##TYPE##_fields, 256 / GROUP, dk_half, EXPAND, GRID, BIAS)               \
    DK_UNPACKER(TYPE, GROUP, 256, BYTES)
#endif

GRID_UNPACKER(iq2_xxs, 32, 66, eights, dk_grid_iq2_xxs, 43)
GRID_UNPACKER(iq2_xs, 16, 74, eights, dk_grid_iq2_xs, 43)
GRID_UNPACKER(iq3_xxs, 32, 98, fours, dk_grid_iq3_xxs, 62)
DK_UNPACKER(iq4_nl, 32, 32, 18)
DK_UNPACKER(iq4_xs, 32, 256, 136)

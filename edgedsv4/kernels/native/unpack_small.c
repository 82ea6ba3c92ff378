/* Groups of the types with small blocks as unsigned bytes: Q8_0, Q4_0, MXFP4, NVFP4, FP4_E2M1.
 *
 * E2M1 codes are taken doubled (0 1 2 3 4 6 8 12 and negatives), so that all are integers; 12 is added to
 * make them unsigned, and the scale is halved.
 *
 * Source: block structs of ggml; OCP Microscaling specification.
 */

#include "unpack.h"
#include "unpack_avx512.h"

const uint8_t dk_e2m1_plus_12[16] DK_ALIGNED = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Half of 2^(byte - 127), 0xff included, as ggml has it. */
DK_INLINE float half_e8m0(uint32_t byte)
{
    return dk_float_of_bits(byte < 2 ? 0x00200000u << byte : (byte - 1) << 23);
}

/* Half of an NVFP4 scale: E4M3 whose top bit is ignored, but 0x7f, and not 0xff, is 0. */
DK_INLINE float half_ue4m3(uint32_t byte)
{
    return byte == 0x7f ? 0.0f : dk_float_of_bits((byte & 0x7f) << 20) * 0x1p119f;
}

DK_INLINE const uint8_t *block_at(const dk_matrix *w, int64_t row, int64_t block, int64_t bytes)
{
    return w->data + row * w->row_bytes + block * bytes;
}

DK_INLINE const uint8_t *fp4_scales(const dk_matrix *w, int64_t row, int64_t column)
{
    return w->scale + row / w->scale_height * w->scale_stride + column / 32;
}

static void q8_0_scalar(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                        int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 34);
    for (int64_t g = 0; g < columns / 32; g++, block += 34, u += 32) {
        scale[g] = dk_f16(dk_load16(block)) * w->factor;
        offset[g] = -128.0f * scale[g];
        for (int i = 0; i < 32; i++)
            u[i] = block[2 + i] ^ 0x80;
    }
}

static void q4_0_scalar(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                        int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 18);
    for (int64_t g = 0; g < columns / 32; g++, block += 18, u += 32) {
        scale[g] = dk_f16(dk_load16(block)) * w->factor;
        offset[g] = -8.0f * scale[g];
        for (int i = 0; i < 16; i++) {
            u[i] = block[2 + i] & 15;
            u[16 + i] = block[2 + i] >> 4;
        }
    }
}

static void mxfp4_scalar(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                         int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 17);
    for (int64_t g = 0; g < columns / 32; g++, block += 17, u += 32) {
        scale[g] = half_e8m0(block[0]) * w->factor;
        offset[g] = -12.0f * scale[g];
        for (int i = 0; i < 16; i++) {
            u[i] = dk_e2m1_plus_12[block[1 + i] & 15];
            u[16 + i] = dk_e2m1_plus_12[block[1 + i] >> 4];
        }
    }
}

static void nvfp4_scalar(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                         int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 64, 36);
    for (int64_t b = 0; b < columns / 64; b++, block += 36) {
        for (int s = 0; s < 4; s++, u += 16, scale++, offset++) {
            *scale = half_ue4m3(block[s]) * w->factor;
            *offset = -12.0f * *scale;
            for (int i = 0; i < 8; i++) {
                u[i] = dk_e2m1_plus_12[block[4 + 8 * s + i] & 15];
                u[8 + i] = dk_e2m1_plus_12[block[4 + 8 * s + i] >> 4];
            }
        }
    }
}

static void fp4_scalar(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                       int64_t column, int64_t columns)
{
    const uint8_t *codes = block_at(w, row, column / 2, 1), *powers = fp4_scales(w, row, column);
    for (int64_t g = 0; g < columns / 32; g++) {
        scale[g] = dk_e8m0(powers[g]) * 0.5f * w->factor;
        offset[g] = -12.0f * scale[g];
    }
    for (int64_t i = 0; i < columns / 2; i++) {
        u[2 * i] = dk_e2m1_plus_12[codes[i] & 15];
        u[2 * i + 1] = dk_e2m1_plus_12[codes[i] >> 4];
    }
}

#if defined(DK_X86)

/* ---- AVX2 ---- */

/* Scales get the factor, offsets are scales times `middle`. */
DK_AVX2 DK_INLINE void finish_avx2(float *scale, float *offset, int64_t groups, float factor, float middle)
{
    for (int64_t g = 0; g < groups; g++) {
        scale[g] *= factor;
        offset[g] = middle * scale[g];
    }
}

/* Low nibbles of 16 bytes, then the high ones. */
DK_AVX2 DK_INLINE __m256i nibbles_avx2(const uint8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

DK_AVX2 DK_INLINE __m256i e2m1_avx2(__m256i codes)
{
    __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)dk_e2m1_plus_12));
    return _mm256_shuffle_epi8(table, codes);
}

DK_AVX2 static void q8_0_avx2(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                              int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 34);
    for (int64_t g = 0; g < columns / 32; g++, block += 34) {
        scale[g] = _cvtsh_ss(dk_load16(block));
        __m256i q = _mm256_loadu_si256((const __m256i *)(block + 2));
        _mm256_store_si256((__m256i *)(u + 32 * g), _mm256_xor_si256(q, _mm256_set1_epi8(-128)));
    }
    finish_avx2(scale, offset, columns / 32, w->factor, -128.0f);
}

DK_AVX2 static void q4_0_avx2(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                              int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 18);
    for (int64_t g = 0; g < columns / 32; g++, block += 18) {
        scale[g] = _cvtsh_ss(dk_load16(block));
        _mm256_store_si256((__m256i *)(u + 32 * g), nibbles_avx2(block + 2));
    }
    finish_avx2(scale, offset, columns / 32, w->factor, -8.0f);
}

DK_AVX2 static void mxfp4_avx2(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                               int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 17);
    for (int64_t g = 0; g < columns / 32; g++, block += 17) {
        scale[g] = half_e8m0(block[0]);
        _mm256_store_si256((__m256i *)(u + 32 * g), e2m1_avx2(nibbles_avx2(block + 1)));
    }
    finish_avx2(scale, offset, columns / 32, w->factor, -12.0f);
}

DK_AVX2 static void nvfp4_avx2(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                               int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 64, 36);
    for (int64_t b = 0; b < columns / 64; b++, block += 36, u += 64) {
        for (int s = 0; s < 4; s++)
            scale[4 * b + s] = half_ue4m3(block[s]);
        for (int half = 0; half < 2; half++) {
            /* lo, hi of 16 bytes: quarters 0 2 1 3 are the groups' order. */
            __m256i codes = nibbles_avx2(block + 4 + 16 * half);
            codes = _mm256_permute4x64_epi64(e2m1_avx2(codes), 0xd8);
            _mm256_store_si256((__m256i *)(u + 32 * half), codes);
        }
    }
    finish_avx2(scale, offset, columns / 16, w->factor, -12.0f);
}

DK_AVX2 static void fp4_avx2(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                             int64_t column, int64_t columns)
{
    const uint8_t *codes = block_at(w, row, column / 2, 1), *powers = fp4_scales(w, row, column);
    for (int64_t g = 0; g < columns / 32; g++) {
        scale[g] = dk_e8m0(powers[g]) * 0.5f;
        __m256i word = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + 16 * g)));
        word = _mm256_or_si256(word, _mm256_slli_epi16(word, 4));
        word = _mm256_and_si256(word, _mm256_set1_epi8(15));
        _mm256_store_si256((__m256i *)(u + 32 * g), e2m1_avx2(word));
    }
    finish_avx2(scale, offset, columns / 32, w->factor, -12.0f);
}

/* ---- AVX-512 ---- */

/* Sixteen scales and offsets at once. */
DK_AVX512 DK_INLINE void store_16(float *scale, float *offset, __m512 scales, float factor, float middle)
{
    scales = _mm512_mul_ps(scales, _mm512_set1_ps(factor));
    _mm512_storeu_ps(scale, scales);
    _mm512_storeu_ps(offset, _mm512_mul_ps(scales, _mm512_set1_ps(middle)));
}

/* Scales in the first two bytes of blocks. */
DK_AVX512 DK_INLINE void half_scales(float *scale, float *offset, const uint8_t *block, int64_t groups,
                                     const int bytes, const dk_matrix *w, float middle)
{
    int64_t g = 0;
    for (; g + 16 <= groups; g += 16, block += 16 * bytes)
        store_16(scale + g, offset + g, dk_sixteen_halves(block, bytes), w->factor, middle);
    for (; g < groups; g++, block += bytes) {
        scale[g] = _cvtsh_ss(dk_load16(block)) * w->factor;
        offset[g] = middle * scale[g];
    }
}

DK_AVX512 static void q8_0_avx512(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                                  int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 34);
    int64_t groups = columns / 32, g = 0;
    half_scales(scale, offset, block, groups, 34, w, -128.0f);
    for (; g + 1 < groups; g += 2, block += 68)
        _mm512_store_si512(u + 32 * g, dk_two_q8_0(block));
    if (g < groups) {
        __m256i q = _mm256_loadu_si256((const __m256i *)(block + 2));
        _mm256_store_si256((__m256i *)(u + 32 * g), _mm256_xor_si256(q, _mm256_set1_epi8(-128)));
    }
}

DK_AVX512 static void q4_0_avx512(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                                  int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 18);
    int64_t groups = columns / 32, g = 0;
    half_scales(scale, offset, block, groups, 18, w, -8.0f);
    for (; g + 1 < groups; g += 2, block += 36)
        _mm512_store_si512(u + 32 * g, dk_two_q4_0(block));
    if (g < groups)
        _mm256_store_si256((__m256i *)(u + 32 * g), nibbles_avx2(block + 2));
}

DK_AVX512 static void mxfp4_avx512(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                                   int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 32, 17);
    int64_t groups = columns / 32, g = 0;
    for (; g + 16 <= groups; g += 16)
        store_16(scale + g, offset + g, dk_sixteen_powers(block + 17 * g), w->factor, -12.0f);
    for (; g < groups; g++) {
        scale[g] = half_e8m0(block[17 * g]) * w->factor;
        offset[g] = -12.0f * scale[g];
    }
    for (g = 0; g + 1 < groups; g += 2, block += 34)
        _mm512_store_si512(u + 32 * g, dk_two_mxfp4(block));
    if (g < groups)
        _mm256_store_si256((__m256i *)(u + 32 * g), e2m1_avx2(nibbles_avx2(block + 1)));
}

DK_AVX512 DK_INLINE void finish_avx512(float *scale, float *offset, int64_t groups, float factor,
                                       float middle)
{
    for (int64_t g = 0; g < groups; g += 16) {
        __mmask16 kept = groups - g >= 16 ? 0xffff : (__mmask16)((1u << (groups - g)) - 1);
        __m512 scales = _mm512_mul_ps(_mm512_maskz_loadu_ps(kept, scale + g), _mm512_set1_ps(factor));
        _mm512_mask_storeu_ps(scale + g, kept, scales);
        _mm512_mask_storeu_ps(offset + g, kept, _mm512_mul_ps(scales, _mm512_set1_ps(middle)));
    }
}

DK_AVX512 static void fp4_avx512(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                                 int64_t column, int64_t columns)
{
    const uint8_t *codes = block_at(w, row, column / 2, 1), *powers = fp4_scales(w, row, column);
    const __m512i nibble = _mm512_set1_epi8(15);
    int64_t groups = columns / 32, g = 0;
    for (; g < groups; g += 16) {
        __mmask16 kept = groups - g >= 16 ? 0xffff : (__mmask16)((1u << (groups - g)) - 1);
        __m512i byte = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(kept, powers + g));
        __m512 scales = dk_half_powers_avx512(byte);
        scales = _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(255)), scales,
                                      _mm512_set1_ps(NAN));
        scales = _mm512_mul_ps(scales, _mm512_set1_ps(w->factor));
        _mm512_mask_storeu_ps(scale + g, kept, scales);
        _mm512_mask_storeu_ps(offset + g, kept, _mm512_mul_ps(scales, _mm512_set1_ps(-12.0f)));
    }
    for (g = 0; g < groups; g += 2) {
        __mmask32 kept = groups - g >= 2 ? 0xffffffff : 0x0000ffff;
        __m512i words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(kept, codes + 16 * g));
        words = _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), nibble);
        _mm512_store_si512(u + 32 * g, dk_e2m1_avx512(words));
    }
}

DK_AVX512 static void nvfp4_avx512(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                                   int64_t column, int64_t columns)
{
    const uint8_t *block = block_at(w, row, column / 64, 36);
    const __m512i twice = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i counts = _mm512_set_epi64(0x0004000400040004, 0, 0x0004000400040004, 0, 0x0004000400040004,
                                            0, 0x0004000400040004, 0);
    for (int64_t b = 0; b < columns / 64; b++, block += 36) {
        __m128i byte = _mm_cvtepu8_epi32(_mm_cvtsi32_si128((int32_t)dk_load32(block)));
        __mmask8 kept = _mm_cmpneq_epi32_mask(byte, _mm_set1_epi32(0x7f));
        byte = _mm_and_si128(byte, _mm_set1_epi32(0x7f));
        __m128 tiny = _mm_castsi128_ps(_mm_maskz_slli_epi32(kept, byte, 20));
        _mm_storeu_ps(scale + 4 * b, _mm_mul_ps(tiny, _mm_set1_ps(0x1p119f)));
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(block + 4));
        __m512i codes = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(bytes));
        codes = _mm512_and_si512(_mm512_srlv_epi16(codes, counts), _mm512_set1_epi8(15));
        _mm512_store_si512(u + 64 * b, dk_e2m1_avx512(codes));
    }
    finish_avx512(scale, offset, columns / 16, w->factor, -12.0f);
}

#define ON_X86(function) function
#else
#define ON_X86(function) NULL
#endif

const dk_unpacker dk_unpack_q8_0 = {32, q8_0_scalar, ON_X86(q8_0_avx2), ON_X86(q8_0_avx512)};
const dk_unpacker dk_unpack_q4_0 = {32, q4_0_scalar, ON_X86(q4_0_avx2), ON_X86(q4_0_avx512)};
const dk_unpacker dk_unpack_mxfp4 = {32, mxfp4_scalar, ON_X86(mxfp4_avx2), ON_X86(mxfp4_avx512)};
const dk_unpacker dk_unpack_nvfp4 = {16, nvfp4_scalar, ON_X86(nvfp4_avx2), ON_X86(nvfp4_avx512)};
const dk_unpacker dk_unpack_fp4_e2m1 = {32, fp4_scalar, ON_X86(fp4_avx2), ON_X86(fp4_avx512)};

const dk_unpacker *dk_unpacker_of(int type)
{
    switch (type) {
    case DK_Q8_0: return &dk_unpack_q8_0;
    case DK_Q4_0: return &dk_unpack_q4_0;
    case DK_MXFP4: return &dk_unpack_mxfp4;
    case DK_NVFP4: return &dk_unpack_nvfp4;
    case DK_FP4_E2M1: return &dk_unpack_fp4_e2m1;
    case DK_Q2_K: return &dk_unpack_q2_k;
    case DK_Q3_K: return &dk_unpack_q3_k;
    case DK_Q4_K: return &dk_unpack_q4_k;
    case DK_Q5_K: return &dk_unpack_q5_k;
    case DK_Q6_K: return &dk_unpack_q6_k;
    case DK_IQ2_XXS: return &dk_unpack_iq2_xxs;
    case DK_IQ2_XS: return &dk_unpack_iq2_xs;
    case DK_IQ3_XXS: return &dk_unpack_iq3_xxs;
    case DK_IQ4_NL: return &dk_unpack_iq4_nl;
    case DK_IQ4_XS: return &dk_unpack_iq4_xs;
    default: return NULL;
    }
}

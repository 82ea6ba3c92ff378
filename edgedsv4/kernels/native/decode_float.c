/* Decoders of the IEEE types and of the small floats that stand alone: FP8, packed E2M1, E8M0. Source of the
 * small ones: OCP 8-bit floating point and Microscaling (MX) specifications. */

#include "decode.h"

/* ---- plain elements ---- */

DK_INLINE void f32_one(float *y, const uint8_t *p) { memcpy(y, p, sizeof *y); }

DK_INLINE void bf16_one(float *y, const uint8_t *p) { *y = dk_bf16(dk_load16(p)); }

DK_INLINE void e8m0_one(float *y, const uint8_t *p) { *y = dk_e8m0(*p); }

/* The factor is applied before the rounding to float32. */
DK_INLINE void f64_one(float *y, const uint8_t *p, double factor)
{
    double value;
    memcpy(&value, p, sizeof value);
    *y = (float)(value * factor);
}

/* ---- runs of elements with one scale (1 for types without) ---- */

/* The conversions of native.h by masks in place of branches, so that loops become vectors. */
DK_INLINE float f16_value(uint16_t half)
{
    uint32_t magnitude = half & 0x7fff, small = dk_bits_of_float((float)(int)magnitude * 0x1p-24f);
    uint32_t is_small = -(uint32_t)(magnitude < 0x400), is_special = -(uint32_t)(magnitude >= 0x7c00);
    uint32_t bits = (magnitude << 13) + 0x38000000u + (is_special & 0x38000000u);
    return dk_float_of_bits((small & is_small) | (bits & ~is_small) | (uint32_t)(half & 0x8000) << 16);
}

DK_INLINE float e4m3_value(uint8_t byte)
{
    uint32_t magnitude = byte & 0x7f, small = dk_bits_of_float((float)(int)magnitude * 0x1p-9f);
    uint32_t is_small = -(uint32_t)(magnitude < 8), is_nan = -(uint32_t)(magnitude == 0x7f);
    uint32_t bits = ((magnitude << 20) + (120u << 23)) | (is_nan & 0x7fc00000u);
    return dk_float_of_bits((small & is_small) | (bits & ~is_small) | (uint32_t)(byte & 0x80) << 24);
}

static const float E2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

DK_INLINE void f16_run(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    (void)scale;
    for (int64_t i = 0; i < n; i++)
        y[i] = f16_value(dk_load16(p + 2 * i));
}

/* E5M2 is the upper byte of a half float. */
DK_INLINE void fp8_e5m2_run(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    (void)scale;
    for (int64_t i = 0; i < n; i++)
        y[i] = f16_value((uint16_t)(p[i] << 8));
}

DK_INLINE void fp8_e4m3_run(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = e4m3_value(p[i]) * scale;
}

DK_INLINE void fp4_e2m1_run(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i += 2) {
        y[i] = E2M1[p[i >> 1] & 15] * scale;
        y[i + 1] = E2M1[p[i >> 1] >> 4] * scale;
    }
}

/* A row function that calls RUN(y, p, n, scale) for the columns of each scale. */
#define RUN_ROW_FUNCTION(NAME, ATTRIBUTE, ELEMENTS, BYTES, RUN)                                            \
    ATTRIBUTE static void NAME(float *restrict y, const dk_matrix *w, int64_t row, int64_t first_column,   \
                               int64_t columns)                                                            \
    {                                                                                                      \
        const uint8_t *p = dk_block_at(w, row, first_column, ELEMENTS, BYTES);                             \
        if (w->scale == NULL) {                                                                            \
            RUN(y, p, columns, 1.0f);                                                                      \
        } else {                                                                                           \
            int64_t width = w->scale_width, group = first_column / width;                                  \
            const uint8_t *scale = w->scale + row / w->scale_height * w->scale_stride + group;             \
            int64_t first = 0, next = (group + 1) * width - first_column;                                  \
            for (; first < columns; first = next, next += width) {                                         \
                int64_t n = dk_min(next, columns) - first;                                                 \
                if (n == 32)                                                                               \
                    RUN(y + first, p + first / ELEMENTS * BYTES, 32, dk_e8m0(*scale++));                   \
                else                                                                                       \
                    RUN(y + first, p + first / ELEMENTS * BYTES, n, dk_e8m0(*scale++));                    \
            }                                                                                              \
        }                                                                                                  \
        dk_apply_factor(y, w, columns);                                                                    \
    }

#ifdef DK_X86

/* ---- AVX2 ---- */

/* Up to this scale 256 times the scale is a float, so that one factor will do. */
static const float LARGEST_SINGLE_FACTOR = 0x1p119f;

/* Sixteen E4M3 codes as half floats 2^-8 as large, NaN codes as NaN. Shifting the sign-extended code leaves
 * the sign in bits 14 and 15. */
DK_AVX2 DK_INLINE __m256i e4m3_halves_avx2(__m128i codes)
{
    const __m128i magnitude = _mm_set1_epi8(0x7f);
    __m128i is_nan = _mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude);
    __m256i nan = _mm256_and_si256(_mm256_cvtepi8_epi16(is_nan), _mm256_set1_epi16(0x7e00));
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm256_or_si256(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff)), nan);
}

DK_AVX2 DK_INLINE void fp8_e4m3_run_avx2(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    const __m256 factor = _mm256_set1_ps(256.0f * scale);
    int64_t i = 0;
    for (; i + 16 <= n && scale <= LARGEST_SINGLE_FACTOR; i += 16) {
        __m256i halves = e4m3_halves_avx2(_mm_loadu_si128((const __m128i *)(p + i)));
        __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(low, factor));
        _mm256_storeu_ps(y + i + 8, _mm256_mul_ps(high, factor));
    }
    fp8_e4m3_run(y + i, p + i, n - i, scale);
}

DK_AVX2 DK_INLINE void fp4_e2m1_run_avx2(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    const __m256 table = _mm256_mul_ps(_mm256_loadu_ps(E2M1), _mm256_set1_ps(scale));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(p + (i >> 1)));
        for (int k = 0; k < 2; k++) { /* four bytes, eight elements; bit 3 of a code is the sign */
            __m256i codes = _mm256_cvtepu8_epi64(k == 0 ? bytes : _mm_srli_si128(bytes, 4));
            codes = _mm256_or_si256(codes, _mm256_slli_epi64(codes, 28));
            __m256 values = _mm256_permutevar8x32_ps(table, codes);
            __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
            _mm256_storeu_ps(y + i + 8 * k, _mm256_xor_ps(values, _mm256_castsi256_ps(sign)));
        }
    }
    fp4_e2m1_run(y + i, p + (i >> 1), n - i, scale);
}

DK_AVX2 DK_INLINE void f16_run_avx2(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    (void)scale;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * i))));
    for (; i < n; i++)
        y[i] = dk_half_avx2(p + 2 * i);
}

DK_AVX2 DK_INLINE void fp8_e5m2_run_avx2(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i halves = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)(p + i)));
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(halves));
    }
    fp8_e5m2_run(y + i, p + i, n - i, scale);
}

/* ---- AVX-512 ---- */

/* 32 E4M3 codes as half floats 2^-8 as large, NaN codes as NaN. */
DK_AVX512 DK_INLINE __m512i e4m3_halves_avx512(__m256i codes)
{
    const __m256i magnitude = _mm256_set1_epi8(0x7f);
    __mmask32 is_nan = _mm256_cmpeq_epi8_mask(_mm256_and_si256(codes, magnitude), magnitude);
    __m512i halves = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    halves = _mm512_and_si512(halves, _mm512_set1_epi16((short)0xbfff));
    return _mm512_mask_mov_epi16(halves, is_nan, _mm512_set1_epi16(0x7e00));
}

DK_AVX512 DK_INLINE void fp8_e4m3_run_avx512(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    const __m512 factor = _mm512_set1_ps(256.0f * scale);
    int64_t i = 0;
    for (; i + 32 <= n && scale <= LARGEST_SINGLE_FACTOR; i += 32) {
        __m512i halves = e4m3_halves_avx512(_mm256_loadu_si256((const __m256i *)(p + i)));
        __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
        _mm512_storeu_ps(y + i, _mm512_mul_ps(low, factor));
        _mm512_storeu_ps(y + i + 16, _mm512_mul_ps(high, factor));
    }
    fp8_e4m3_run_avx2(y + i, p + i, n - i, scale);
}

DK_AVX512 DK_INLINE void fp4_e2m1_run_avx512(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(E2M1), _mm512_set1_ps(scale));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i codes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(p + (i >> 1))));
        codes = _mm512_or_si512(codes, _mm512_slli_epi64(codes, 28)); /* only four bits of a lane count */
        _mm512_storeu_ps(y + i, _mm512_permutexvar_ps(codes, table));
    }
    fp4_e2m1_run(y + i, p + (i >> 1), n - i, scale);
}

DK_AVX512 DK_INLINE void f16_run_avx512(float *restrict y, const uint8_t *p, int64_t n, float scale)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 2 * i))));
    f16_run_avx2(y + i, p + 2 * i, n - i, scale);
}

#define fp8_e5m2_run_avx512 fp8_e5m2_run_avx2

#define RUN_DECODER(TYPE, ELEMENTS, BYTES)                                                                 \
    RUN_ROW_FUNCTION(TYPE##_scalar_row, , ELEMENTS, BYTES, TYPE##_run)                                     \
    RUN_ROW_FUNCTION(TYPE##_avx2_row, DK_AVX2, ELEMENTS, BYTES, TYPE##_run_avx2)                           \
    RUN_ROW_FUNCTION(TYPE##_avx512_row, DK_AVX512, ELEMENTS, BYTES, TYPE##_run_avx512)                     \
    const dk_decoder dk_decode_##TYPE = {ELEMENTS, BYTES, TYPE##_scalar_row, TYPE##_avx2_row,              \
                                         TYPE##_avx512_row};

#else

#define RUN_DECODER(TYPE, ELEMENTS, BYTES)                                                                 \
    RUN_ROW_FUNCTION(TYPE##_scalar_row, , ELEMENTS, BYTES, TYPE##_run)                                     \
    const dk_decoder dk_decode_##TYPE = {ELEMENTS, BYTES, TYPE##_scalar_row, NULL, NULL};

#endif

DK_DECODER(f32, 1, 4, f32_one(out, p), f32_one(out, p), f32_one(out, p))
DK_DECODER(bf16, 1, 2, bf16_one(out, p), bf16_one(out, p), bf16_one(out, p))
DK_DECODER(e8m0, 1, 1, e8m0_one(out, p), e8m0_one(out, p), e8m0_one(out, p))
DK_DECODER(f64, 1, 8, f64_one(out, p, w->factor), f64_one(out, p, w->factor), f64_one(out, p, w->factor))
RUN_DECODER(f16, 1, 2)
RUN_DECODER(fp8_e5m2, 1, 1)
RUN_DECODER(fp8_e4m3, 1, 1)
RUN_DECODER(fp4_e2m1, 2, 1)

/* Rows at rest: float32, FP8 key/value rows, FP4 index keys (kernels/kv_quant.py says what they are).
 *
 * Encoding is plain integer arithmetic on whole groups, which compilers turn into vector code; it is
 * compiled once per instruction set. A NaN becomes the bfloat16 0xffff, whose codes are e4m3 0xff and
 * e2m1 15; a group with a NaN or an infinity gets the scale 1, as frexp has it. */

#include "rows.h"

enum { STORE_ROWS_PER_TASK = 16, ROUND_ELEMENTS_PER_TASK = 8192 };

/* ---- rounding ---- */

#define INFINITE 0x7f800000
#define MAGNITUDE 0x7fffffff

/* Round to bfloat16, to nearest even; returns the largest magnitude as bits (NaN is the largest). */
DK_INLINE int32_t round_bf16(uint32_t *bits, const float *x, int count)
{
    int32_t top = 0;
    for (int i = 0; i < count; i++) {
        uint32_t u = dk_bits_of_float(x[i]);
        int32_t is_nan = (int32_t)(u & MAGNITUDE) > INFINITE;
        uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
        bits[i] = is_nan ? 0xffff0000u : rounded;
        int32_t magnitude = (int32_t)(bits[i] & MAGNITUDE);
        top = magnitude > top ? magnitude : top;
    }
    return top;
}

/* Scale byte of a group: ceil(log2(max(largest, floor) / code_max)) + 127. */
DK_INLINE uint8_t scale_byte(int32_t top, float floor, float code_max)
{
    if (top >= INFINITE)
        return 127;
    float largest = dk_float_of_bits((uint32_t)top);
    uint32_t ratio = dk_bits_of_float((largest > floor ? largest : floor) / code_max);
    return (uint8_t)((ratio >> 23) + ((ratio & 0x7fffff) != 0));
}

/* 2^-(byte - 127); no group has a byte of 254. */
DK_INLINE float inverse_scale(uint8_t byte) { return dk_float_of_bits((uint32_t)(254 - byte) << 23); }

/* Code of each bits[i] * inverse among small floats with `mantissa` bits: numbers below `smallest` (normal)
 * are rounded by adding `magic`, whose last place is the smallest step. */
DK_INLINE void small_float_codes(uint8_t *codes, const uint32_t *bits, int count, float inverse, int mantissa,
                                 float largest, float smallest, float magic, int32_t nan_code)
{
    int shift = 23 - mantissa;
    int32_t limit = (int32_t)dk_bits_of_float(largest);
    int32_t normal = (int32_t)dk_bits_of_float(smallest);
    int32_t bias = (normal >> shift) - (1 << mantissa);
    int32_t half = (1 << (shift - 1)) - 1;
    int sign_shift = nan_code > 15 ? 24 : 28;
    for (int i = 0; i < count; i++) {
        uint32_t u = dk_bits_of_float(dk_float_of_bits(bits[i]) * inverse);
        int32_t magnitude = (int32_t)(u & MAGNITUDE);
        int32_t is_nan = magnitude > INFINITE;
        magnitude = magnitude > limit ? limit : magnitude;
        int32_t coarse = ((magnitude + half + ((magnitude >> shift) & 1)) >> shift) - bias;
        float sum = dk_float_of_bits((uint32_t)magnitude) + magic;
        int32_t fine = (int32_t)(dk_bits_of_float(sum) - dk_bits_of_float(magic));
        int32_t code = magnitude < normal ? fine : coarse;
        code = is_nan ? nan_code : code;
        codes[i] = (uint8_t)((uint32_t)code | ((u >> 31) << (31 - sign_shift)));
    }
}

DK_INLINE int fp8_group(uint8_t *codes, uint8_t *scale, const float *x, int64_t count)
{
    float padded[DK_FP8_GROUP] DK_ALIGNED = {0};
    uint32_t bits[DK_FP8_GROUP] DK_ALIGNED;
    uint8_t all[DK_FP8_GROUP] DK_ALIGNED;
    memcpy(padded, x, (size_t)count * sizeof *x);
    int32_t top = round_bf16(bits, padded, DK_FP8_GROUP);
    *scale = scale_byte(top, 1e-4f, 448.0f);
    small_float_codes(all, bits, DK_FP8_GROUP, inverse_scale(*scale), 3, 448.0f, 0x1p-6f, 0x1p14f, 0x7f);
    memcpy(codes, all, (size_t)count);
    return top >= INFINITE;
}

/* e2m1 codes of a group, one per byte. */
DK_INLINE int fp4_group(uint8_t *codes, uint8_t *scale, const float *x, int64_t count)
{
    float padded[DK_FP4_GROUP] DK_ALIGNED = {0};
    uint32_t bits[DK_FP4_GROUP] DK_ALIGNED;
    memcpy(padded, x, (size_t)count * sizeof *x);
    int32_t top = round_bf16(bits, padded, DK_FP4_GROUP);
    *scale = scale_byte(top, 6 * 0x1p-126f, 6.0f);
    small_float_codes(codes, bits, DK_FP4_GROUP, inverse_scale(*scale), 1, 6.0f, 1.0f, 0x1p22f, 7);
    return top >= INFINITE;
}

/* ---- encoding rows; each returns whether a value was NaN or infinite ---- */

DK_INLINE int encode_fp8(const dk_rows *rows, int64_t row, const float *x)
{
    uint8_t *codes = rows->data + row * rows->data_stride;
    uint8_t *scales = rows->scales + row * rows->scale_stride;
    int64_t plain = rows->width - rows->rope;
    int64_t groups = (plain + DK_FP8_GROUP - 1) / DK_FP8_GROUP;
    int64_t stored = dk_min((groups + 7) / 8 * 8, rows->scale_stride);
    int is_bad = 0;
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * DK_FP8_GROUP;
        is_bad |= fp8_group(codes + first, scales + g, x + first, dk_min(DK_FP8_GROUP, plain - first));
    }
    for (int64_t g = groups; g < stored; g++)
        scales[g] = 0;
    for (int64_t i = 0; i < rows->rope; i++) {
        uint32_t bits;
        is_bad |= round_bf16(&bits, x + plain + i, 1) >= INFINITE;
        uint16_t upper = (uint16_t)(bits >> 16);
        memcpy(codes + plain + 2 * i, &upper, sizeof upper);
    }
    return is_bad;
}

DK_INLINE int encode_fp4(const dk_rows *rows, int64_t row, const float *x)
{
    uint8_t *data = rows->data + row * rows->data_stride;
    uint8_t *scales = rows->scales + row * rows->scale_stride;
    int is_bad = 0;
    for (int64_t first = 0; first < rows->width; first += DK_FP4_GROUP) {
        uint8_t codes[DK_FP4_GROUP] DK_ALIGNED;
        int64_t count = dk_min(DK_FP4_GROUP, rows->width - first);
        is_bad |= fp4_group(codes, scales + first / DK_FP4_GROUP, x + first, count);
        for (int64_t i = 0; i < count / 2; i++)
            data[first / 2 + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
    return is_bad;
}

static const float e2m1_values[16] DK_ALIGNED = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

DK_INLINE int round_row_fp4(float *x, int64_t n)
{
    int is_bad = 0;
    for (int64_t first = 0; first < n; first += DK_FP4_GROUP) {
        uint8_t codes[DK_FP4_GROUP] DK_ALIGNED, scale;
        int64_t count = dk_min(DK_FP4_GROUP, n - first);
        is_bad |= fp4_group(codes, &scale, x + first, count);
        for (int64_t i = 0; i < count; i++)
            x[first + i] = e2m1_values[codes[i]] * dk_e8m0(scale);
    }
    return is_bad;
}

#define ENCODERS(level, attribute)                                                                          \
    static attribute int encode_row_##level(const dk_rows *rows, int64_t row, const float *x)              \
    {                                                                                                       \
        return rows->format == DK_ROWS_FP8 ? encode_fp8(rows, row, x) : encode_fp4(rows, row, x);           \
    }                                                                                                       \
    static attribute int round_row_##level(float *x, int64_t n) { return round_row_fp4(x, n); }

ENCODERS(scalar, )
#ifdef DK_X86
ENCODERS(avx2, DK_AVX2)
ENCODERS(avx512, DK_AVX512)
#endif

static int encode_row(const dk_rows *rows, int64_t row, const float *x)
{
    if (rows->format == DK_ROWS_F32) {
        memcpy(rows->data + row * rows->data_stride, x, (size_t)rows->width * sizeof *x);
        return 0;
    }
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512)
        return encode_row_avx512(rows, row, x);
    if (dk_level >= DK_LEVEL_AVX2)
        return encode_row_avx2(rows, row, x);
#endif
    return encode_row_scalar(rows, row, x);
}

static int round_row(float *x, int64_t n)
{
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512)
        return round_row_avx512(x, n);
    if (dk_level >= DK_LEVEL_AVX2)
        return round_row_avx2(x, n);
#endif
    return round_row_scalar(x, n);
}

/* ---- decoding rows ---- */

/* Elements [from, width) of a row, where `from` starts a group or lies inside one. */
static void decode_fp8_scalar(float *y, const dk_rows *rows, int64_t row, int64_t from)
{
    const uint8_t *data = rows->data + row * rows->data_stride;
    const uint8_t *scales = rows->scales + row * rows->scale_stride;
    int64_t plain = rows->width - rows->rope;
    for (int64_t i = from; i < plain; i++)
        y[i] = dk_e4m3(data[i]) * dk_e8m0(scales[i / DK_FP8_GROUP]);
    for (int64_t i = dk_max(from, plain); i < rows->width; i++)
        y[i] = dk_bf16(dk_load16(data + plain + 2 * (i - plain)));
}

static void decode_fp4_scalar(float *y, const dk_rows *rows, int64_t row, int64_t from)
{
    const uint8_t *data = rows->data + row * rows->data_stride;
    const uint8_t *scales = rows->scales + row * rows->scale_stride;
    for (int64_t i = from; i < rows->width; i++)
        y[i] = e2m1_values[data[i / 2] >> (i & 1) * 4 & 15] * dk_e8m0(scales[i / DK_FP4_GROUP]);
}

#ifdef DK_X86

/* An e4m3 code moved into a half float stands for a number 2^8 times smaller, subnormals included. */
DK_INLINE DK_AVX512 __m512 e4m3_as_half(__m128i codes)
{
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff)));
}

DK_INLINE uint16_t first_lanes(int64_t count) { return (uint16_t)(count >= 16 ? 0xffff : (1 << count) - 1); }

/* Part of a group, whatever it holds. */
static DK_AVX512 void decode_e4m3_avx512(float *y, const uint8_t *data, int64_t count, uint8_t scale)
{
    const __m512 nan = _mm512_set1_ps(dk_float_of_bits(0x7fc00000u)), up = _mm512_set1_ps(256.0f);
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = first_lanes(count - i);
        __m128i codes = _mm_maskz_loadu_epi8(mask, data + i);
        __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi8(0x7f));
        __mmask16 is_nan = _mm_cmpeq_epi8_mask(magnitude, _mm_set1_epi8(0x7f));
        __m512 values = _mm512_mask_mov_ps(_mm512_mul_ps(e4m3_as_half(codes), up), is_nan, nan);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(values, _mm512_set1_ps(dk_e8m0(scale))));
    }
}

static DK_AVX512 void decode_fp8_avx512(float *y, const dk_rows *rows, int64_t row)
{
    const uint8_t *data = rows->data + row * rows->data_stride;
    const uint8_t *scales = rows->scales + row * rows->scale_stride;
    const __m512i seven = _mm512_set1_epi8(0x7f);
    int64_t plain = rows->width - rows->rope, i = 0;
    for (; i < plain; i += DK_FP8_GROUP) {
        uint8_t scale = scales[i / DK_FP8_GROUP];
        int is_whole = plain - i >= DK_FP8_GROUP && scale > 0 && scale < 247; /* 256 * scale is a float32 */
        if (is_whole) {
            __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(data + i), seven);
            is_whole = _mm512_cmpeq_epi8_mask(magnitudes, seven) == 0;
        }
        if (!is_whole) {
            decode_e4m3_avx512(y + i, data + i, dk_min(DK_FP8_GROUP, plain - i), scale);
            continue;
        }
        const __m512 factor = _mm512_set1_ps(dk_float_of_bits((uint32_t)(scale + 8) << 23));
        for (int64_t j = i; j < i + DK_FP8_GROUP; j += 16) {
            __m128i codes = _mm_loadu_si128((const __m128i *)(data + j));
            _mm512_storeu_ps(y + j, _mm512_mul_ps(e4m3_as_half(codes), factor));
        }
    }
    for (i = 0; i + 16 <= rows->rope; i += 16) {
        __m256i upper = _mm256_loadu_si256((const __m256i *)(data + plain + 2 * i));
        __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16);
        _mm512_storeu_ps(y + plain + i, _mm512_castsi512_ps(bits));
    }
    for (; i < rows->rope; i++)
        y[plain + i] = dk_bf16(dk_load16(data + plain + 2 * i));
}

static DK_AVX512 void decode_fp4_avx512(float *y, const dk_rows *rows, int64_t row)
{
    const uint8_t *data = rows->data + row * rows->data_stride;
    const uint8_t *scales = rows->scales + row * rows->scale_stride;
    const __m512 table = _mm512_load_ps(e2m1_values);
    int64_t i = 0;
    for (; i + 16 <= rows->width; i += 16) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(data + i / 2));
        __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
        __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
        __m512i codes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
        __m512 scale = _mm512_set1_ps(dk_e8m0(scales[i / DK_FP4_GROUP]));
        _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale));
    }
    decode_fp4_scalar(y, rows, row, i);
}

static DK_AVX2 void decode_fp8_avx2(float *y, const dk_rows *rows, int64_t row)
{
    const uint8_t *data = rows->data + row * rows->data_stride;
    const uint8_t *scales = rows->scales + row * rows->scale_stride;
    const __m256 nan = _mm256_set1_ps(dk_float_of_bits(0x7fc00000u)), up = _mm256_set1_ps(256.0f);
    const __m256i seven = _mm256_set1_epi32(0x7f);
    int64_t plain = rows->width - rows->rope, i = 0;
    for (; i + 8 <= plain; i += 8) {
        __m128i codes = _mm_loadl_epi64((const __m128i *)(data + i));
        __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
        half = _mm_and_si128(half, _mm_set1_epi16((short)0xbfff));
        __m256i magnitude = _mm256_and_si256(_mm256_cvtepi8_epi32(codes), seven);
        __m256 is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, seven));
        __m256 values = _mm256_mul_ps(_mm256_cvtph_ps(half), up);
        values = _mm256_blendv_ps(values, nan, is_nan);
        __m256 scale = _mm256_set1_ps(dk_e8m0(scales[i / DK_FP8_GROUP]));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(values, scale));
    }
    if (i < plain || rows->rope % 8 != 0) {
        decode_fp8_scalar(y, rows, row, i);
        return;
    }
    for (i = 0; i < rows->rope; i += 8) {
        __m128i upper = _mm_loadu_si128((const __m128i *)(data + plain + 2 * i));
        __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16);
        _mm256_storeu_ps(y + plain + i, _mm256_castsi256_ps(bits));
    }
}

static DK_AVX2 void decode_fp4_avx2(float *y, const dk_rows *rows, int64_t row)
{
    const uint8_t *data = rows->data + row * rows->data_stride;
    const uint8_t *scales = rows->scales + row * rows->scale_stride;
    const __m256 table = _mm256_load_ps(e2m1_values);
    int64_t i = 0;
    for (; i + 8 <= rows->width; i += 8) {
        __m128i bytes = _mm_cvtsi32_si128((int)dk_load32(data + i / 2));
        __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
        __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
        __m256i codes = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
        __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
        __m256 values = _mm256_permutevar8x32_ps(table, codes); /* by the lower three bits */
        values = _mm256_xor_ps(values, _mm256_castsi256_ps(sign));
        __m256 scale = _mm256_set1_ps(dk_e8m0(scales[i / DK_FP4_GROUP]));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(values, scale));
    }
    decode_fp4_scalar(y, rows, row, i);
}

#endif

static void decode_row(float *y, const dk_rows *rows, int64_t row)
{
    if (rows->format == DK_ROWS_F32) {
        memcpy(y, rows->data + row * rows->data_stride, (size_t)rows->width * sizeof *y);
        return;
    }
    int is_fp8 = rows->format == DK_ROWS_FP8;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512) {
        (is_fp8 ? decode_fp8_avx512 : decode_fp4_avx512)(y, rows, row);
        return;
    }
    if (dk_level >= DK_LEVEL_AVX2) {
        (is_fp8 ? decode_fp8_avx2 : decode_fp4_avx2)(y, rows, row);
        return;
    }
#endif
    (is_fp8 ? decode_fp8_scalar : decode_fp4_scalar)(y, rows, row, 0);
}

/* ---- interface ---- */

typedef struct {
    dk_run *run;
    const dk_rows *rows;
    int64_t first;
    const float *x;
    int64_t count;
} store_t;

static void store_task(void *arg, int64_t task)
{
    const store_t *store = arg;
    int64_t from = task * STORE_ROWS_PER_TASK;
    int64_t to = dk_min(from + STORE_ROWS_PER_TASK, store->count);
    int is_bad = 0;
    for (int64_t i = from; i < to; i++)
        is_bad |= encode_row(store->rows, store->first + i, store->x + i * store->rows->width);
    if (is_bad)
        dk_mark_bad(store->run);
}

int dk_rows_store(dk_run *run, const dk_rows *rows, int64_t first, const float *x, int64_t count)
{
    store_t store = {run, rows, first, x, count};
    return dk_parallel(run, (count + STORE_ROWS_PER_TASK - 1) / STORE_ROWS_PER_TASK, store_task, &store);
}

void dk_rows_read(float *y, int64_t stride, const dk_rows *rows, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        decode_row(y + i * stride, rows, first + i);
}

void dk_rows_load(float *y, const dk_rows *rows, int64_t first, int64_t count)
{
    dk_rows_read(y, rows->width, rows, first, count);
}

void dk_ring_commit(const dk_rows *ring, int64_t slots, const dk_rows *staged, int64_t start, int64_t count)
{
    int64_t width = ring->width, data_bytes = width * 4, scale_bytes = 0;
    if (ring->format == DK_ROWS_FP8) {
        data_bytes = width + ring->rope;
        scale_bytes = (width - ring->rope + DK_FP8_GROUP - 1) / DK_FP8_GROUP;
        scale_bytes = dk_min((scale_bytes + 7) / 8 * 8, dk_min(ring->scale_stride, staged->scale_stride));
    } else if (ring->format == DK_ROWS_FP4) {
        data_bytes = width / 2;
        scale_bytes = (width + DK_FP4_GROUP - 1) / DK_FP4_GROUP;
    }
    for (int64_t t = dk_max(0, count - slots); t < count; t++) {
        int64_t slot = (start + t) % slots;
        memcpy(ring->data + slot * ring->data_stride, staged->data + t * staged->data_stride,
               (size_t)data_bytes);
        if (scale_bytes > 0)
            memcpy(ring->scales + slot * ring->scale_stride, staged->scales + t * staged->scale_stride,
                   (size_t)scale_bytes);
    }
}

typedef struct {
    dk_run *run;
    float *x;
    int64_t count;
    int64_t n;
    int64_t rows_per_task;
} round_t;

static void round_task(void *arg, int64_t task)
{
    const round_t *job = arg;
    int64_t from = task * job->rows_per_task, to = dk_min(from + job->rows_per_task, job->count);
    int is_bad = 0;
    for (int64_t i = from; i < to; i++)
        is_bad |= round_row(job->x + i * job->n, job->n);
    if (is_bad)
        dk_mark_bad(job->run);
}

int dk_round_fp4(dk_run *run, float *x, int64_t count, int64_t n)
{
    round_t job = {run, x, count, n, dk_max(1, ROUND_ELEMENTS_PER_TASK / n)};
    return dk_parallel(run, (count + job.rows_per_task - 1) / job.rows_per_task, round_task, &job);
}

/* Activations as int8: groups of 32 with one float scale, and the sums that a product needs.
 *
 * scale = max |x| / 127, q = round_to_even(x * (127 / max |x|)). A group whose largest magnitude is below
 * 2^-110 is zero, so that 127 / max stays finite. The largest magnitude is found among the bit patterns
 * without their sign: there NaN and infinity are larger than every number.
 */

#include "expert_ffn.h"

enum { GROUP = 32, ELEMENTS_PER_TASK = 1 << 15 };
#define INFINITY_BITS 0x7f800000u
#define TINY_BITS (17u << 23) /* 2^-110 */

typedef struct {
    dk_input *input;
    int64_t tokens;
    int64_t columns;
    int64_t tokens_per_task;
} job;

static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t dk_quantized_bytes(int64_t tokens, int64_t columns)
{
    int64_t groups = tokens * (columns / GROUP);
    return padded(tokens * columns) + 2 * padded(groups * 4) + padded(groups * 8);
}

/* Scale and factor of a group from the bits of its largest magnitude. */
DK_INLINE float scale_of(uint32_t bits, float *factor)
{
    float largest = dk_float_of_bits(bits);
    if (bits >= INFINITY_BITS || bits < TINY_BITS) {
        *factor = 0.0f;
        return bits >= INFINITY_BITS ? NAN : 0.0f;
    }
    *factor = 127.0f / largest;
    return largest / 127.0f;
}

static void row_scalar(int8_t *q, float *scale, float *sum32, float *sum16, const float *x, int64_t columns)
{
    for (int64_t g = 0; g < columns / GROUP; g++, x += GROUP, q += GROUP) {
        uint32_t largest = 0;
        for (int i = 0; i < GROUP; i++) {
            uint32_t bits = dk_bits_of_float(x[i]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        float factor;
        scale[g] = scale_of(largest, &factor);
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            q[i] = factor == 0.0f ? 0 : (int8_t)lrintf(x[i] * factor);
            sums[i / 16] += q[i];
        }
        sum16[2 * g] = scale[g] * (float)sums[0];
        sum16[2 * g + 1] = scale[g] * (float)sums[1];
        sum32[g] = scale[g] * (float)(sums[0] + sums[1]);
    }
}

#if defined(DK_X86)

DK_AVX2 static int32_t sum_of_16(__m256i low, __m256i high)
{
    __m256i both = _mm256_add_epi32(low, high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

DK_AVX2 static uint32_t largest_of_8(__m256i bits)
{
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
}

DK_AVX2 static void row_avx2(int8_t *q, float *scale, float *sum32, float *sum16, const float *x,
                             int64_t columns)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t g = 0; g < columns / GROUP; g++, x += GROUP, q += GROUP) {
        __m256i largest = _mm256_setzero_si256(), n[4];
        for (int i = 0; i < 4; i++)
            largest = _mm256_max_epu32(
                largest, _mm256_and_si256(magnitude, _mm256_castps_si256(_mm256_loadu_ps(x + 8 * i))));
        float factor;
        scale[g] = scale_of(largest_of_8(largest), &factor);
        for (int i = 0; i < 4; i++) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(factor));
            n[i] = factor == 0.0f ? _mm256_setzero_si256() : _mm256_cvtps_epi32(scaled);
        }
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(bytes, order));
        int32_t low = sum_of_16(n[0], n[1]), high = sum_of_16(n[2], n[3]);
        sum16[2 * g] = scale[g] * (float)low;
        sum16[2 * g + 1] = scale[g] * (float)high;
        sum32[g] = scale[g] * (float)(low + high);
    }
}

DK_AVX512 static void row_avx512(int8_t *q, float *scale, float *sum32, float *sum16, const float *x,
                                 int64_t columns)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t g = 0; g < columns / GROUP; g++, x += GROUP, q += GROUP) {
        __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
        __m512i largest = _mm512_max_epu32(_mm512_and_si512(magnitude, _mm512_castps_si512(low)),
                                           _mm512_and_si512(magnitude, _mm512_castps_si512(high)));
        float factor;
        scale[g] = scale_of(_mm512_reduce_max_epu32(largest), &factor);
        __mmask16 kept = factor == 0.0f ? 0 : 0xffff;
        __m512 factors = _mm512_set1_ps(factor);
        __m512i low_n = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(low, factors));
        __m512i high_n = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(high, factors));
        _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(low_n));
        _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(high_n));
        int32_t low_sum = _mm512_reduce_add_epi32(low_n), high_sum = _mm512_reduce_add_epi32(high_n);
        sum16[2 * g] = scale[g] * (float)low_sum;
        sum16[2 * g + 1] = scale[g] * (float)high_sum;
        sum32[g] = scale[g] * (float)(low_sum + high_sum);
    }
}

#endif

void dk_quantize_columns(const dk_input *in, int64_t token, int64_t columns, int64_t first, int64_t count)
{
    int64_t at = token * columns + first, group = at / GROUP;
    void (*row)(int8_t *, float *, float *, float *, const float *, int64_t) = row_scalar;
#if defined(DK_X86)
    if (dk_level >= DK_LEVEL_AVX512)
        row = row_avx512;
    else if (dk_level >= DK_LEVEL_AVX2)
        row = row_avx2;
#endif
    row((int8_t *)in->q + at, (float *)in->scale + group, (float *)in->sum32 + group, (float *)in->sum16 + 2 * group,
        in->x + token * in->stride + first, count);
}

static void quantize_tokens(void *arg, int64_t task)
{
    const job *j = arg;
    int64_t first = task * j->tokens_per_task;
    for (int64_t t = first; t < dk_min(first + j->tokens_per_task, j->tokens); t++)
        dk_quantize_columns(j->input, t, j->columns, 0, j->columns);
}

void dk_place_quantized(dk_input *input, void *memory, int64_t tokens, int64_t columns)
{
    int64_t groups = tokens * (columns / GROUP);
    uint8_t *next = memory;
    input->q = (int8_t *)next;
    next += padded(tokens * columns);
    input->scale = (float *)next;
    next += padded(groups * 4);
    input->sum32 = (float *)next;
    next += padded(groups * 4);
    input->sum16 = (float *)next;
}

int dk_quantize_rows(dk_run *run, dk_input *input, void *memory, int64_t tokens, int64_t columns)
{
    dk_place_quantized(input, memory, tokens, columns);
    job j = {input, tokens, columns, dk_max(1, ELEMENTS_PER_TASK / dk_max(1, columns))};
    int64_t tasks = (tokens + j.tokens_per_task - 1) / j.tokens_per_task;
    return tasks ? dk_parallel(run, tasks, quantize_tokens, &j) : 0;
}

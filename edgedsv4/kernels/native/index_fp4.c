/* Scores of FP4 index keys in integers.
 *
 * Doubled, an e2m1 value is an integer of at most 12, so the dot of a group of 32 is an exact integer; scales
 * are powers of two, so only the sum over groups rounds, and all instruction sets agree on a dot. Sixteen
 * keys lie side by side, four dims of a key in each 32-bit lane, and a query is broadcast: no sum goes across
 * lanes. Keys are stored as bytes 0..24, as one factor must be unsigned. A packed word of a key holds dims
 * 8j, 8j + 2, 8j + 4, 8j + 6 in its low nibbles (step 2j) and those after them in the high ones (2j + 1). */

#include "index_fp4.h"

enum { OFFSET = 12, STEPS_PER_GROUP = DK_FP4_GROUP / 4 };

static const uint8_t doubled[64] DK_ALIGNED = {
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9,
    8,  6,  4,  0,  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24,
    12, 11, 10, 9,  8,  6,  4,  0};

/* ---- queries ---- */

DK_INLINE void split_group(int8_t *codes, float *scale, int32_t *start, const float *q)
{
    int32_t top = 0, sum = 0, plain[DK_FP4_GROUP];
    for (int i = 0; i < DK_FP4_GROUP; i++) {
        int32_t magnitude = (int32_t)(dk_bits_of_float(q[i]) & 0x7fffffff);
        top = magnitude > top ? magnitude : top;
    }
    /* The scale as the encoder chooses it; on values from its grid nothing is rounded. */
    uint32_t ratio = dk_bits_of_float(dk_float_of_bits((uint32_t)top) / 6.0f);
    int32_t exponent = (int32_t)(ratio >> 23) - 127 + ((ratio & 0x7fffff) != 0);
    exponent = exponent < -126 ? -126 : exponent;
    int is_finite = top < 0x7f800000;
    float inverse = is_finite ? dk_float_of_bits((uint32_t)(127 - exponent) << 23) * 2.0f : 0.0f;
    for (int i = 0; i < DK_FP4_GROUP; i++) {
        const float magic = 0x1.8p23f;
        float shifted = (is_finite ? q[i] * inverse : 0.0f) + magic;
        plain[i] = (int32_t)(dk_bits_of_float(shifted) - dk_bits_of_float(magic));
        sum += plain[i];
    }
    for (int i = 0; i < DK_FP4_GROUP; i++)
        codes[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = (int8_t)plain[i];
    *start = -OFFSET * sum;
    *scale = is_finite ? dk_float_of_bits((uint32_t)(127 + exponent) << 23) * 0.25f
                       : dk_float_of_bits(0x7fc00000u);
}

void dk_fp4_split_queries(const dk_fp4_queries *queries, const float *q, int64_t heads, int64_t dim)
{
    for (int64_t g = 0; g < heads * dim / DK_FP4_GROUP; g++)
        split_group(queries->codes + g * DK_FP4_GROUP, queries->scales + g, queries->starts + g,
                    q + g * DK_FP4_GROUP);
}

/* ---- keys ---- */

static void expand_block_scalar(uint8_t *bytes, const uint8_t *const *key, int64_t groups)
{
    for (int64_t j = 0; j < groups * STEPS_PER_GROUP / 2; j++)
        for (int k = 0; k < DK_INDEX_BLOCK; k++)
            for (int b = 0; b < 4; b++) {
                uint8_t packed = key[k][4 * j + b];
                bytes[128 * j + 4 * k + b] = doubled[packed & 15];
                bytes[128 * j + 64 + 4 * k + b] = doubled[packed >> 4];
            }
}

#ifdef DK_X86

/* Four words of four keys are transposed in each quarter: quarters hold keys 0-3, 4-7, 8-11, 12-15. */
static DK_AVX512 void expand_block_avx512(uint8_t *bytes, const uint8_t *const *key, int64_t groups)
{
    const __m512i table = _mm512_load_si512(doubled), low = _mm512_set1_epi8(15);
    for (int64_t g = 0; g < groups; g++) {
        __m512i a[4], words[4];
        for (int i = 0; i < 4; i++) {
            a[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(key[i] + 16 * g)));
            a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const __m128i *)(key[i + 4] + 16 * g)), 1);
            a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const __m128i *)(key[i + 8] + 16 * g)), 2);
            a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const __m128i *)(key[i + 12] + 16 * g)), 3);
        }
        __m512i low01 = _mm512_unpacklo_epi32(a[0], a[1]), high01 = _mm512_unpackhi_epi32(a[0], a[1]);
        __m512i low23 = _mm512_unpacklo_epi32(a[2], a[3]), high23 = _mm512_unpackhi_epi32(a[2], a[3]);
        words[0] = _mm512_unpacklo_epi64(low01, low23);
        words[1] = _mm512_unpackhi_epi64(low01, low23);
        words[2] = _mm512_unpacklo_epi64(high01, high23);
        words[3] = _mm512_unpackhi_epi64(high01, high23);
        for (int j = 0; j < 4; j++) {
            uint8_t *to = bytes + 512 * g + 128 * j;
            __m512i upper = _mm512_and_si512(_mm512_srli_epi16(words[j], 4), low);
            __m512i lower = _mm512_and_si512(words[j], low);
            _mm512_storeu_si512(to, _mm512_shuffle_epi8(table, lower));
            _mm512_storeu_si512(to + 64, _mm512_shuffle_epi8(table, upper));
        }
    }
}

/* The same with halves: keys 0-3 and 4-7, then 8-11 and 12-15. */
static DK_AVX2 void expand_block_avx2(uint8_t *bytes, const uint8_t *const *key, int64_t groups)
{
    const __m256i table = _mm256_load_si256((const __m256i *)doubled), low = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < 2 * groups; g++) {
        const uint8_t *const *four = key + 8 * (g & 1);
        __m256i a[4], words[4];
        for (int i = 0; i < 4; i++) {
            __m128i lower = _mm_loadu_si128((const __m128i *)(four[i] + 16 * (g / 2)));
            __m128i upper = _mm_loadu_si128((const __m128i *)(four[i + 4] + 16 * (g / 2)));
            a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1);
        }
        __m256i low01 = _mm256_unpacklo_epi32(a[0], a[1]), high01 = _mm256_unpackhi_epi32(a[0], a[1]);
        __m256i low23 = _mm256_unpacklo_epi32(a[2], a[3]), high23 = _mm256_unpackhi_epi32(a[2], a[3]);
        words[0] = _mm256_unpacklo_epi64(low01, low23);
        words[1] = _mm256_unpackhi_epi64(low01, low23);
        words[2] = _mm256_unpacklo_epi64(high01, high23);
        words[3] = _mm256_unpackhi_epi64(high01, high23);
        for (int j = 0; j < 4; j++) {
            uint8_t *to = bytes + 512 * (g / 2) + 128 * j + 32 * (g & 1);
            __m256i upper = _mm256_and_si256(_mm256_srli_epi16(words[j], 4), low);
            __m256i lower = _mm256_and_si256(words[j], low);
            _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(table, lower));
            _mm256_storeu_si256((__m256i *)(to + 64), _mm256_shuffle_epi8(table, upper));
        }
    }
}

#endif

/* Scales of 16 keys, group by group. */
static void expand_scales(float *scales, const uint8_t *const *key, int64_t groups)
{
    for (int64_t g = 0; g < groups; g++) {
        uint8_t bytes[DK_INDEX_BLOCK];
        for (int k = 0; k < DK_INDEX_BLOCK; k++)
            bytes[k] = key[k][g];
        for (int k = 0; k < DK_INDEX_BLOCK; k++) { /* dk_e8m0 without branches */
            uint32_t bits = (uint32_t)bytes[k] << 23;
            bits = bytes[k] == 0 ? 0x00400000u : bits;
            bits = bytes[k] == 0xff ? 0x7fc00000u : bits;
            scales[g * DK_INDEX_BLOCK + k] = dk_float_of_bits(bits);
        }
    }
}

#ifdef DK_X86
/* Four groups at a time: the four bytes of a key make one lane. */
static DK_AVX512 void expand_scales_avx512(float *scales, const uint8_t *const *key, int64_t groups)
{
    if (groups % 4 != 0) {
        expand_scales(scales, key, groups);
        return;
    }
    const __m512i byte = _mm512_set1_epi32(0xff), smallest = _mm512_set1_epi32(0x00400000);
    const __m512i nan = _mm512_set1_epi32(0x7fc00000);
    for (int64_t g = 0; g < groups; g += 4) {
        uint32_t words[DK_INDEX_BLOCK] DK_ALIGNED;
        for (int k = 0; k < DK_INDEX_BLOCK; k++)
            words[k] = dk_load32(key[k] + g);
        __m512i four = _mm512_load_si512(words);
        for (int j = 0; j < 4; j++) {
            __m512i exponent = _mm512_and_si512(_mm512_srli_epi32(four, 8 * j), byte);
            __m512i bits = _mm512_slli_epi32(exponent, 23);
            bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(exponent, exponent), smallest);
            bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(exponent, byte), nan);
            _mm512_storeu_ps(scales + (g + j) * DK_INDEX_BLOCK, _mm512_castsi512_ps(bits));
        }
    }
}
#endif

void dk_fp4_expand(uint8_t *bytes, float *scales, const dk_rows *keys, int64_t first, int64_t count)
{
    void (*expand_block)(uint8_t *, const uint8_t *const *, int64_t) = expand_block_scalar;
    void (*expand_block_scales)(float *, const uint8_t *const *, int64_t) = expand_scales;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512) {
        expand_block = expand_block_avx512;
        expand_block_scales = expand_scales_avx512;
    } else if (dk_level >= DK_LEVEL_AVX2)
        expand_block = expand_block_avx2;
#endif
    int64_t groups = keys->width / DK_FP4_GROUP;
    for (int64_t block = 0; block < count; block += DK_INDEX_BLOCK) {
        const uint8_t *key[DK_INDEX_BLOCK], *key_scales[DK_INDEX_BLOCK];
        for (int k = 0; k < DK_INDEX_BLOCK; k++) {
            int64_t row = first + dk_min(block + k, count - 1);
            key[k] = keys->data + row * keys->data_stride;
            key_scales[k] = keys->scales + row * keys->scale_stride;
        }
        expand_block(bytes + block * keys->width, key, groups);
        expand_block_scales(scales + block * groups, key_scales, groups);
    }
}

/* ---- scores ---- */

typedef uint8_t bytes_t __attribute__((vector_size(8)));
typedef int16_t shorts_t __attribute__((vector_size(16)));

/* Dots of one head with a block of keys. */
static void block_dots(float *dot, const uint8_t *bytes, const float *key_scales, const int8_t *q,
                       const float *scales, const int32_t *starts, int64_t groups)
{
    for (int k = 0; k < DK_INDEX_BLOCK; k++)
        dot[k] = 0.0f;
    for (int64_t g = 0; g < groups; g++, key_scales += DK_INDEX_BLOCK) {
        shorts_t pairs[8] = {0}; /* at most 8 steps of 24 * 12; two keys each */
        for (int s = 0; s < STEPS_PER_GROUP; s++, bytes += 64, q += 4) {
            const shorts_t four = {q[0], q[1], q[2], q[3], q[0], q[1], q[2], q[3]};
            for (int i = 0; i < 8; i++) {
                bytes_t eight;
                memcpy(&eight, bytes + 8 * i, sizeof eight);
                pairs[i] += __builtin_convertvector(eight, shorts_t) * four;
            }
        }
        for (int k = 0; k < DK_INDEX_BLOCK; k++) {
            const shorts_t pair = pairs[k / 2];
            int at = k % 2 * 4;
            int32_t sum = pair[at] + pair[at + 1] + pair[at + 2] + pair[at + 3] + starts[g];
            dot[k] += (float)sum * scales[g] * key_scales[k];
        }
    }
}

static void scores_scalar(float *scores, const uint8_t *bytes, const float *key_scales, int64_t blocks,
                          const dk_fp4_queries *queries, const float *weights, int64_t heads, int64_t groups)
{
    for (int64_t b = 0; b < blocks; b++, scores += DK_INDEX_BLOCK) {
        for (int k = 0; k < DK_INDEX_BLOCK; k++)
            scores[k] = 0.0f;
        for (int64_t h = 0; h < heads; h++) {
            float dot[DK_INDEX_BLOCK];
            block_dots(dot, bytes + b * groups * STEPS_PER_GROUP * 64,
                       key_scales + b * groups * DK_INDEX_BLOCK, queries->codes + h * groups * DK_FP4_GROUP,
                       queries->scales + h * groups, queries->starts + h * groups, groups);
            for (int k = 0; k < DK_INDEX_BLOCK; k++)
                scores[k] += weights[h] * (dot[k] < 0.0f ? 0.0f : dot[k]); /* NaN stays */
        }
    }
}

#ifdef DK_X86

/* `heads` by `blocks` (constants) dots; max(0, dot) gives its second operand for NaN. */
DK_INLINE DK_VNNI void add_heads_vnni(__m512 *score, const uint8_t *bytes, const float *key_scales,
                                      const dk_fp4_queries *queries, const float *weights, int64_t head,
                                      int64_t groups, int heads, int blocks)
{
    __m512 dot[4][2];
    for (int h = 0; h < heads; h++)
        for (int b = 0; b < blocks; b++)
            dot[h][b] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i sum[4][2];
        for (int h = 0; h < heads; h++)
            for (int b = 0; b < blocks; b++)
                sum[h][b] = _mm512_set1_epi32(queries->starts[(head + h) * groups + g]);
        const int8_t *q = queries->codes + (head * groups + g) * DK_FP4_GROUP;
        for (int s = 0; s < STEPS_PER_GROUP; s++) {
            __m512i key[2];
            for (int b = 0; b < blocks; b++)
                key[b] = _mm512_loadu_si512(bytes + ((b * groups + g) * STEPS_PER_GROUP + s) * 64);
            for (int h = 0; h < heads; h++) {
                int32_t four;
                memcpy(&four, q + h * groups * DK_FP4_GROUP + 4 * s, sizeof four);
                for (int b = 0; b < blocks; b++)
                    sum[h][b] = _mm512_dpbusd_epi32(sum[h][b], key[b], _mm512_set1_epi32(four));
            }
        }
        for (int h = 0; h < heads; h++)
            for (int b = 0; b < blocks; b++) {
                __m512 scale = _mm512_set1_ps(queries->scales[(head + h) * groups + g]);
                __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[h][b]), scale);
                __m512 key_scale = _mm512_loadu_ps(key_scales + (b * groups + g) * DK_INDEX_BLOCK);
                dot[h][b] = _mm512_fmadd_ps(part, key_scale, dot[h][b]);
            }
    }
    for (int h = 0; h < heads; h++)
        for (int b = 0; b < blocks; b++) {
            __m512 positive = _mm512_max_ps(_mm512_setzero_ps(), dot[h][b]);
            score[b] = _mm512_fmadd_ps(_mm512_set1_ps(weights[head + h]), positive, score[b]);
        }
}

static DK_VNNI void scores_vnni(float *scores, const uint8_t *bytes, const float *key_scales, int64_t blocks,
                                const dk_fp4_queries *queries, const float *weights, int64_t heads,
                                int64_t groups)
{
    for (int64_t b = 0; b < blocks; b += 2) {
        int is_pair = b + 2 <= blocks;
        const uint8_t *keys = bytes + b * groups * STEPS_PER_GROUP * 64;
        const float *scales = key_scales + b * groups * DK_INDEX_BLOCK;
        __m512 score[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        int64_t h = 0;
        for (; is_pair && h + 4 <= heads; h += 4)
            add_heads_vnni(score, keys, scales, queries, weights, h, groups, 4, 2);
        for (; is_pair && h < heads; h++)
            add_heads_vnni(score, keys, scales, queries, weights, h, groups, 1, 2);
        for (; h < heads; h++)
            add_heads_vnni(score, keys, scales, queries, weights, h, groups, 1, 1);
        _mm512_storeu_ps(scores + b * DK_INDEX_BLOCK, score[0]);
        if (is_pair)
            _mm512_storeu_ps(scores + (b + 1) * DK_INDEX_BLOCK, score[1]);
    }
}

/* One block, as two halves; sums of a group fit 16 bits: 8 steps of 2 * 24 * 12. */
DK_INLINE DK_AVX2 void add_heads_avx2(__m256 *score, const uint8_t *bytes, const float *key_scales,
                                      const dk_fp4_queries *queries, const float *weights, int64_t head,
                                      int64_t groups, int heads)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 dot[2][2];
    for (int h = 0; h < heads; h++)
        dot[h][0] = dot[h][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m256i sum[2][2];
        for (int h = 0; h < heads; h++)
            sum[h][0] = sum[h][1] = _mm256_setzero_si256();
        const int8_t *q = queries->codes + (head * groups + g) * DK_FP4_GROUP;
        for (int s = 0; s < STEPS_PER_GROUP; s++)
            for (int h = 0; h < heads; h++) {
                int32_t four;
                memcpy(&four, q + h * groups * DK_FP4_GROUP + 4 * s, sizeof four);
                for (int i = 0; i < 2; i++) {
                    const uint8_t *at = bytes + (g * STEPS_PER_GROUP + s) * 64 + 32 * i;
                    __m256i key = _mm256_loadu_si256((const __m256i *)at);
                    __m256i pairs = _mm256_maddubs_epi16(key, _mm256_set1_epi32(four));
                    sum[h][i] = _mm256_add_epi16(sum[h][i], pairs);
                }
            }
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < 2; i++) {
                __m256i start = _mm256_set1_epi32(queries->starts[(head + h) * groups + g]);
                __m256i whole = _mm256_add_epi32(_mm256_madd_epi16(sum[h][i], ones), start);
                __m256 scale = _mm256_set1_ps(queries->scales[(head + h) * groups + g]);
                __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale);
                __m256 key_scale = _mm256_loadu_ps(key_scales + g * DK_INDEX_BLOCK + 8 * i);
                dot[h][i] = _mm256_fmadd_ps(part, key_scale, dot[h][i]);
            }
    }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < 2; i++) {
            __m256 positive = _mm256_max_ps(_mm256_setzero_ps(), dot[h][i]);
            score[i] = _mm256_fmadd_ps(_mm256_set1_ps(weights[head + h]), positive, score[i]);
        }
}

static DK_AVX2 void scores_avx2(float *scores, const uint8_t *bytes, const float *key_scales, int64_t blocks,
                                const dk_fp4_queries *queries, const float *weights, int64_t heads,
                                int64_t groups)
{
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *keys = bytes + b * groups * STEPS_PER_GROUP * 64;
        const float *scales = key_scales + b * groups * DK_INDEX_BLOCK;
        __m256 score[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        int64_t h = 0;
        for (; h + 2 <= heads; h += 2)
            add_heads_avx2(score, keys, scales, queries, weights, h, groups, 2);
        for (; h < heads; h++)
            add_heads_avx2(score, keys, scales, queries, weights, h, groups, 1);
        _mm256_storeu_ps(scores + b * DK_INDEX_BLOCK, score[0]);
        _mm256_storeu_ps(scores + b * DK_INDEX_BLOCK + 8, score[1]);
    }
}

#endif

void dk_fp4_scores(float *scores, const uint8_t *bytes, const float *key_scales, int64_t blocks,
                   const dk_fp4_queries *queries, const float *weights, int64_t heads, int64_t dim)
{
    int64_t groups = dim / DK_FP4_GROUP;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_VNNI) {
        scores_vnni(scores, bytes, key_scales, blocks, queries, weights, heads, groups);
        return;
    }
    if (dk_level >= DK_LEVEL_AVX2) {
        scores_avx2(scores, bytes, key_scales, blocks, queries, weights, heads, groups);
        return;
    }
#endif
    scores_scalar(scores, bytes, key_scales, blocks, queries, weights, heads, groups);
}

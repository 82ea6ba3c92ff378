/* What attention does with a tile of decoded rows: dots, softmax, weighted sum (attend_tile.h).
 *
 * Several heads go over several rows at once, so that a loaded vector serves several products. The sum of an
 * element is the same whatever else is in its block. */

#include "attend_tile.h"
#include "vector_exp.h"

/* ---- softmax over a tile: scores [heads][DK_TILE_ROWS] become weights ---- */

/* 16 running maxima and sums, folded in a fixed order. */
DK_INLINE float fold_max(const float *lanes, float top)
{
    for (int j = 0; j < 16; j++)
        top = lanes[j] > top ? lanes[j] : top;
    return top;
}

DK_INLINE float fold_sum(const float *lanes)
{
    float half[8], quarter[4];
    for (int j = 0; j < 8; j++)
        half[j] = lanes[j] + lanes[j + 8];
    for (int j = 0; j < 4; j++)
        quarter[j] = half[j] + half[j + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

DK_INLINE void soften_heads(float *scores, float *top, float *sum, float *factor, int64_t count,
                            int64_t heads, float scale)
{
    int64_t padded = (count + 15) / 16 * 16;
    for (int64_t h = 0; h < heads; h++, scores += DK_TILE_ROWS) {
        float lanes[16] DK_ALIGNED, sums[16] DK_ALIGNED = {0};
        for (int64_t i = count; i < padded; i++)
            scores[i] = DK_MINUS_INFINITY;
        for (int j = 0; j < 16; j++)
            lanes[j] = DK_MINUS_INFINITY;
        for (int64_t i = 0; i < padded; i += 16)
            for (int j = 0; j < 16; j++) {
                scores[i + j] *= scale;
                lanes[j] = scores[i + j] > lanes[j] ? scores[i + j] : lanes[j];
            }
        float best = fold_max(lanes, top[h]);
        factor[h] = best == top[h] ? 1.0f : dk_exp(top[h] - best);
        for (int64_t i = 0; i < padded; i += 16)
            for (int j = 0; j < 16; j++) {
                scores[i + j] = dk_exp(scores[i + j] - best);
                sums[j] += scores[i + j];
            }
        sum[h] = sum[h] * factor[h] + fold_sum(sums);
        top[h] = best;
    }
}

#define SOFTENER(level, attribute)                                                                          \
    static attribute void soften_##level(float *scores, float *top, float *sum, float *factor,              \
                                         int64_t count, int64_t heads, float scale)                         \
    {                                                                                                       \
        soften_heads(scores, top, sum, factor, count, heads, scale);                                        \
    }

/* ---- plain C ---- */

static void dots_scalar(float *scores, const float *q, int64_t dim, const float *rows, int64_t row_stride,
                        int64_t count, int64_t heads)
{
    for (int64_t r = 0; r < count; r++)
        for (int64_t h = 0; h < heads; h++) {
            const float *a = q + h * dim, *b = rows + r * row_stride;
            float lanes[16] = {0};
            int64_t k = 0;
            for (; k + 16 <= dim; k += 16)
                for (int j = 0; j < 16; j++)
                    lanes[j] += a[k + j] * b[k + j];
            for (int j = 0; k < dim; k++, j++)
                lanes[j] += a[k] * b[k];
            scores[h * DK_TILE_ROWS + r] = fold_sum(lanes);
        }
}

static void mix_scalar(float *out, const float *weights, const float *factor, int64_t dim, const float *rows,
                       int64_t row_stride, int64_t count, int64_t heads, int is_first)
{
    for (int64_t h = 0; h < heads; h++) {
        float *y = out + h * dim;
        for (int64_t k = 0; k < dim; k++)
            y[k] = is_first ? 0.0f : y[k] * factor[h];
        for (int64_t r = 0; r < count; r++) {
            float weight = weights[h * DK_TILE_ROWS + r];
            const float *row = rows + r * row_stride;
            for (int64_t k = 0; k < dim; k++)
                y[k] += weight * row[k];
        }
    }
}

SOFTENER(scalar, )
static const dk_tile_kernels scalar_kernels = {dots_scalar, soften_scalar, mix_scalar};

/* ---- AVX-512 and AVX2: dim is a multiple of 16 ---- */

#ifdef DK_X86

SOFTENER(avx2, DK_AVX2)
SOFTENER(avx512, DK_AVX512)

/* Sums over each of four vectors of partial sums. */
DK_INLINE DK_AVX512 __m128 fold4_avx512(const __m512 *a)
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

DK_INLINE DK_AVX2 __m128 fold4_avx2(const __m256 *a)
{
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

/* Dots of `heads` (a constant) heads with four rows. */
DK_INLINE DK_AVX512 void dots_block_avx512(float *scores, const float *q, int64_t dim,
                                           const float *const *row, int heads)
{
    __m512 sum[4][4];
    for (int h = 0; h < heads; h++)
        for (int r = 0; r < 4; r++)
            sum[h][r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < dim; k += 16) {
        __m512 b[4];
        for (int r = 0; r < 4; r++)
            b[r] = _mm512_loadu_ps(row[r] + k);
        for (int h = 0; h < heads; h++) {
            __m512 a = _mm512_loadu_ps(q + h * dim + k);
            for (int r = 0; r < 4; r++)
                sum[h][r] = _mm512_fmadd_ps(a, b[r], sum[h][r]);
        }
    }
    for (int h = 0; h < heads; h++)
        _mm_storeu_ps(scores + h * DK_TILE_ROWS, fold4_avx512(sum[h]));
}

DK_INLINE DK_AVX2 void dots_block_avx2(float *scores, const float *q, int64_t dim, const float *const *row,
                                       int heads)
{
    __m256 sum[2][4];
    for (int h = 0; h < heads; h++)
        for (int r = 0; r < 4; r++)
            sum[h][r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < dim; k += 8) {
        __m256 b[4];
        for (int r = 0; r < 4; r++)
            b[r] = _mm256_loadu_ps(row[r] + k);
        for (int h = 0; h < heads; h++) {
            __m256 a = _mm256_loadu_ps(q + h * dim + k);
            for (int r = 0; r < 4; r++)
                sum[h][r] = _mm256_fmadd_ps(a, b[r], sum[h][r]);
        }
    }
    for (int h = 0; h < heads; h++)
        _mm_storeu_ps(scores + h * DK_TILE_ROWS, fold4_avx2(sum[h]));
}

/* The last rows of a tile may be fewer than four: the last one is then taken again, and the surplus scores
 * are overwritten by soften_heads. */
#define FOUR_ROWS(row, r, count)                                                                            \
    const float *row[4];                                                                                    \
    for (int i = 0; i < 4; i++)                                                                             \
        row[i] = rows + dk_min(r + i, count - 1) * row_stride

static DK_AVX512 void dots_avx512(float *scores, const float *q, int64_t dim, const float *rows,
                                  int64_t row_stride, int64_t count, int64_t heads)
{
    for (int64_t r = 0; r < count; r += 4) {
        FOUR_ROWS(row, r, count);
        int64_t h = 0;
        for (; h + 4 <= heads; h += 4)
            dots_block_avx512(scores + h * DK_TILE_ROWS + r, q + h * dim, dim, row, 4);
        for (; h < heads; h++)
            dots_block_avx512(scores + h * DK_TILE_ROWS + r, q + h * dim, dim, row, 1);
    }
}

static DK_AVX2 void dots_avx2(float *scores, const float *q, int64_t dim, const float *rows,
                              int64_t row_stride, int64_t count, int64_t heads)
{
    for (int64_t r = 0; r < count; r += 4) {
        FOUR_ROWS(row, r, count);
        int64_t h = 0;
        for (; h + 2 <= heads; h += 2)
            dots_block_avx2(scores + h * DK_TILE_ROWS + r, q + h * dim, dim, row, 2);
        for (; h < heads; h++)
            dots_block_avx2(scores + h * DK_TILE_ROWS + r, q + h * dim, dim, row, 1);
    }
}

/* `heads` by `vectors` (constants) accumulators over all rows of a tile. */
DK_INLINE DK_AVX512 void mix_block_avx512(float *out, const float *weights, const float *factor, int64_t dim,
                                          const float *rows, int64_t row_stride, int64_t count, int is_first,
                                          int heads, int vectors)
{
    __m512 sum[4][4];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) {
            __m512 scaled = _mm512_setzero_ps();
            if (!is_first)
                scaled = _mm512_mul_ps(_mm512_loadu_ps(out + h * dim + 16 * v), _mm512_set1_ps(factor[h]));
            sum[h][v] = scaled;
        }
    for (int64_t r = 0; r < count; r++) {
        __m512 row[4];
        for (int v = 0; v < vectors; v++)
            row[v] = _mm512_loadu_ps(rows + r * row_stride + 16 * v);
        for (int h = 0; h < heads; h++) {
            __m512 weight = _mm512_set1_ps(weights[h * DK_TILE_ROWS + r]);
            for (int v = 0; v < vectors; v++)
                sum[h][v] = _mm512_fmadd_ps(weight, row[v], sum[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(out + h * dim + 16 * v, sum[h][v]);
}

DK_INLINE DK_AVX2 void mix_block_avx2(float *out, const float *weights, const float *factor, int64_t dim,
                                      const float *rows, int64_t row_stride, int64_t count, int is_first,
                                      int heads, int vectors)
{
    __m256 sum[2][4];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) {
            __m256 scaled = _mm256_setzero_ps();
            if (!is_first)
                scaled = _mm256_mul_ps(_mm256_loadu_ps(out + h * dim + 8 * v), _mm256_set1_ps(factor[h]));
            sum[h][v] = scaled;
        }
    for (int64_t r = 0; r < count; r++) {
        __m256 row[4];
        for (int v = 0; v < vectors; v++)
            row[v] = _mm256_loadu_ps(rows + r * row_stride + 8 * v);
        for (int h = 0; h < heads; h++) {
            __m256 weight = _mm256_set1_ps(weights[h * DK_TILE_ROWS + r]);
            for (int v = 0; v < vectors; v++)
                sum[h][v] = _mm256_fmadd_ps(weight, row[v], sum[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(out + h * dim + 8 * v, sum[h][v]);
}

static DK_AVX512 void mix_avx512(float *out, const float *weights, const float *factor, int64_t dim,
                                 const float *rows, int64_t row_stride, int64_t count, int64_t heads,
                                 int is_first)
{
#define BLOCK(hs, vs)                                                                                       \
    mix_block_avx512(out + h * dim + k, weights + h * DK_TILE_ROWS, factor + h, dim, rows + k,              \
                     row_stride, count, is_first, hs, vs)
    int64_t k = 0, h;
    for (; k + 64 <= dim; k += 64) {
        for (h = 0; h + 4 <= heads; h += 4)
            BLOCK(4, 4);
        for (; h < heads; h++)
            BLOCK(1, 4);
    }
    for (; k < dim; k += 16) {
        for (h = 0; h + 4 <= heads; h += 4)
            BLOCK(4, 1);
        for (; h < heads; h++)
            BLOCK(1, 1);
    }
#undef BLOCK
}

static DK_AVX2 void mix_avx2(float *out, const float *weights, const float *factor, int64_t dim,
                             const float *rows, int64_t row_stride, int64_t count, int64_t heads,
                             int is_first)
{
#define BLOCK(hs, vs)                                                                                       \
    mix_block_avx2(out + h * dim + k, weights + h * DK_TILE_ROWS, factor + h, dim, rows + k,                \
                   row_stride, count, is_first, hs, vs)
    int64_t k = 0, h;
    for (; k + 32 <= dim; k += 32) {
        for (h = 0; h + 2 <= heads; h += 2)
            BLOCK(2, 4);
        for (; h < heads; h++)
            BLOCK(1, 4);
    }
    for (; k < dim; k += 16)
        for (h = 0; h < heads; h++)
            BLOCK(1, 2);
#undef BLOCK
}

static const dk_tile_kernels avx2_kernels = {dots_avx2, soften_avx2, mix_avx2};
static const dk_tile_kernels avx512_kernels = {dots_avx512, soften_avx512, mix_avx512};

#endif

const dk_tile_kernels *dk_choose_tile_kernels(int64_t dim)
{
#ifdef DK_X86
    if (dim % 16 == 0 && dk_level >= DK_LEVEL_AVX512)
        return &avx512_kernels;
    if (dim % 16 == 0 && dk_level >= DK_LEVEL_AVX2)
        return &avx2_kernels;
#endif
    (void)dim;
    return &scalar_kernels;
}

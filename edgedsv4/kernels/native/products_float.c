/* float32 products: a slab of eight rows is decoded to a cache-resident scratch and multiplied with all
 * tokens of the block.
 *
 * Sixteen lanes per (row, token): lane i adds, in order, the products of columns i, i + 16, i + 32 ... That
 * order is the same for every shape of tile, so a result does not depend on what else is computed. AVX2 holds
 * the lanes in two registers and gives the bits of AVX-512.
 */

#include "products.h"

enum { ROWS = DK_FLOAT_ROWS, LANES = 16, WIDTH = 512 };
/* Rows of scratch lie this far apart: at a power of two they would share few sets of the cache. */
enum { STRIDE = WIDTH + LANES, FEW_TOKENS = 4 };

typedef struct {
    float w[ROWS][STRIDE] DK_ALIGNED;
    float lanes[DK_FLOAT_TOKENS][ROWS][LANES] DK_ALIGNED;
} scratch;

/* What a tile works on: rows at w, tokens at x, both `columns` wide, sums in lanes[token][row]. */
typedef struct {
    float (*lanes)[ROWS][LANES];
    const float *w;
    int64_t w_stride;
    const float *x;
    int64_t x_stride;
    int64_t columns;
} tile;

/* Decode columns of `rows` rows and return where they stand; float32 is used in place for few tokens. */
static tile tile_at(scratch *s, const dk_product *p, const dk_block *b, int64_t first, int64_t rows,
                    int64_t column)
{
    const dk_matrix *w = p->w;
    int64_t row = p->first_row + first, columns = dk_min(WIDTH, w->columns - column);
    for (int64_t r = 0; r < rows; r++)
        dk_prefetch_columns(w, row + ROWS + r, column, columns);
    const float *x = p->x->x + b->first_token * p->x->stride + column;
    tile t = {s->lanes, &s->w[0][0], STRIDE, x, p->x->stride, columns};
    int is_aligned = ((uintptr_t)w->data | (uintptr_t)w->row_bytes) % 4 == 0;
    if (w->type == DK_F32 && w->factor == 1.0f && is_aligned && b->tokens < FEW_TOKENS) {
        t.w = (const float *)(w->data + row * w->row_bytes) + column;
        t.w_stride = w->row_bytes / 4;
        return t;
    }
    for (int64_t r = 0; r < rows; r++)
        dk_decode_row(s->w[r], w, row + r, column, columns);
    return t;
}

static void one_scalar(float *lanes, const float *w, const float *x, int64_t columns)
{
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES)
        for (int i = 0; i < LANES; i++)
            lanes[i] += w[c + i] * x[c + i];
    for (int i = 0; c < columns; c++, i++)
        lanes[i] += w[c] * x[c];
}

static float total_scalar(const float *lanes)
{
    float sums[LANES / 2];
    for (int i = 0; i < 8; i++)
        sums[i] = lanes[i] + lanes[8 + i];
    for (int i = 0; i < 4; i++)
        sums[i] += sums[4 + i];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

void dk_float_scalar(const dk_product *p, const dk_block *b)
{
    scratch s;
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_min(ROWS, b->first_row + b->rows - first);
        memset(s.lanes, 0, (size_t)b->tokens * sizeof *s.lanes);
        for (int64_t c = 0; c < p->w->columns; c += WIDTH) {
            tile t = tile_at(&s, p, b, first, rows, c);
            for (int64_t k = 0; k < b->tokens; k++)
                for (int64_t r = 0; r < rows; r++)
                    one_scalar(s.lanes[k][r], t.w + r * t.w_stride, t.x + k * t.x_stride, t.columns);
        }
        for (int64_t k = 0; k < b->tokens; k++)
            for (int64_t r = 0; r < rows; r++)
                p->y[(b->first_token + k) * p->y_stride + first + r] = total_scalar(s.lanes[k][r]);
    }
}

#if defined(DK_X86)

/* ---- AVX2 ---- */

/* `rows` x `tokens` sums, both constants: two registers each, at most 6 sums. */
DK_AVX2 DK_INLINE void add_avx2(const tile *a, int64_t row, int64_t token, const int rows, const int tokens)
{
    __m256 sum[6][2];
    const float *w = a->w + row * a->w_stride, *x = a->x + token * a->x_stride;
#pragma GCC unroll 6
    for (int i = 0; i < rows * tokens; i++)
        for (int h = 0; h < 2; h++)
            sum[i][h] = _mm256_load_ps(&a->lanes[token + i % tokens][row + i / tokens][8 * h]);
    int64_t c = 0;
    for (; c + LANES <= a->columns; c += LANES) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m256 values[3];
#pragma GCC unroll 3
            for (int t = 0; t < tokens; t++)
                values[t] = _mm256_loadu_ps(x + t * a->x_stride + c + 8 * h);
#pragma GCC unroll 6
            for (int i = 0; i < rows * tokens; i++)
                sum[i][h] = _mm256_fmadd_ps(_mm256_loadu_ps(w + i / tokens * a->w_stride + c + 8 * h),
                                            values[i % tokens], sum[i][h]);
        }
    }
    if (c < a->columns) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for (int h = 0; h < 2; h++) {
            __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)(a->columns - c) - 8 * h), lane);
#pragma GCC unroll 6
            for (int i = 0; i < rows * tokens; i++)
                sum[i][h] = _mm256_fmadd_ps(
                    _mm256_maskload_ps(w + i / tokens * a->w_stride + c + 8 * h, kept),
                    _mm256_maskload_ps(x + i % tokens * a->x_stride + c + 8 * h, kept), sum[i][h]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows * tokens; i++)
        for (int h = 0; h < 2; h++)
            _mm256_store_ps(&a->lanes[token + i % tokens][row + i / tokens][8 * h], sum[i][h]);
}

DK_AVX2 DK_INLINE float total_avx2(const float *lanes)
{
    __m256 eight = _mm256_add_ps(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

DK_AVX2 static void add_slab_avx2(const tile *a, int64_t rows, int64_t tokens)
{
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) {
        int64_t t = 0;
        for (; t + 3 <= tokens; t += 3)
            add_avx2(a, r, t, 2, 3);
        for (; t < tokens; t++)
            add_avx2(a, r, t, 2, 1);
    }
    for (int64_t t = 0; r < rows && t < tokens; t++)
        add_avx2(a, r, t, 1, 1);
}

/* One token: more rows at once, so that their chains of sums overlap. */
DK_AVX2 static void add_token_avx2(const tile *a, int64_t rows)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        add_avx2(a, r, 0, 4, 1);
    for (; r < rows; r++)
        add_avx2(a, r, 0, 1, 1);
}

DK_AVX2 void dk_float_avx2(const dk_product *p, const dk_block *b)
{
    scratch s;
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_min(ROWS, b->first_row + b->rows - first);
        memset(s.lanes, 0, (size_t)b->tokens * sizeof *s.lanes);
        for (int64_t c = 0; c < p->w->columns; c += WIDTH) {
            tile a = tile_at(&s, p, b, first, rows, c);
            if (b->tokens == 1)
                add_token_avx2(&a, rows);
            else
                add_slab_avx2(&a, rows, b->tokens);
        }
        for (int64_t t = 0; t < b->tokens; t++)
            for (int64_t r = 0; r < rows; r++)
                p->y[(b->first_token + t) * p->y_stride + first + r] = total_avx2(s.lanes[t][r]);
    }
}

/* ---- AVX-512 ---- */

/* `rows` x `tokens` sums, both constants, at most 24. */
DK_AVX512 DK_INLINE void add_avx512(const tile *a, int64_t row, int64_t token, const int rows,
                                    const int tokens)
{
    __m512 sum[24];
    const float *w = a->w + row * a->w_stride, *x = a->x + token * a->x_stride;
#pragma GCC unroll 24
    for (int i = 0; i < rows * tokens; i++)
        sum[i] = _mm512_load_ps(a->lanes[token + i % tokens][row + i / tokens]);
    int64_t c = 0;
    for (; c + LANES <= a->columns; c += LANES) {
        __m512 values[3];
#pragma GCC unroll 3
        for (int t = 0; t < tokens; t++)
            values[t] = _mm512_loadu_ps(x + t * a->x_stride + c);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 weight = _mm512_loadu_ps(w + r * a->w_stride + c);
#pragma GCC unroll 3
            for (int t = 0; t < tokens; t++)
                sum[r * tokens + t] = _mm512_fmadd_ps(weight, values[t], sum[r * tokens + t]);
        }
    }
    if (c < a->columns) {
        __mmask16 kept = (__mmask16)((1u << (a->columns - c)) - 1);
#pragma GCC unroll 24
        for (int i = 0; i < rows * tokens; i++)
            sum[i] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(kept, w + i / tokens * a->w_stride + c),
                                     _mm512_maskz_loadu_ps(kept, x + i % tokens * a->x_stride + c), sum[i]);
    }
#pragma GCC unroll 24
    for (int i = 0; i < rows * tokens; i++)
        _mm512_store_ps(a->lanes[token + i % tokens][row + i / tokens], sum[i]);
}

DK_AVX512 static void add_slab_avx512(const tile *a, int64_t rows, int64_t tokens)
{
    int64_t t = 0;
    if (rows == ROWS) {
        for (; t + 3 <= tokens; t += 3)
            add_avx512(a, 0, t, ROWS, 3);
        for (; t < tokens; t++)
            add_avx512(a, 0, t, ROWS, 1);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        for (t = 0; t + 3 <= tokens; t += 3)
            add_avx512(a, r, t, 1, 3);
        for (; t < tokens; t++)
            add_avx512(a, r, t, 1, 1);
    }
}

DK_AVX512 void dk_float_avx512(const dk_product *p, const dk_block *b)
{
    scratch s;
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_min(ROWS, b->first_row + b->rows - first);
        memset(s.lanes, 0, (size_t)b->tokens * sizeof *s.lanes);
        for (int64_t c = 0; c < p->w->columns; c += WIDTH) {
            tile a = tile_at(&s, p, b, first, rows, c);
            add_slab_avx512(&a, rows, b->tokens);
        }
        for (int64_t t = 0; t < b->tokens; t++)
            for (int64_t r = 0; r < rows; r++)
                p->y[(b->first_token + t) * p->y_stride + first + r] = total_avx2(s.lanes[t][r]);
    }
}

#endif

/* Products of many tokens: sixteen rows are interleaved by fours of columns, [columns / 4][row][4], as in
 * products_wide.c; two registers of eight rows meet four tokens at a time. A part of products_256.h.
 *
 * Without an instruction for dot products codes up to 15 are added eight at a time before their sums are widened,
 * larger ones four, two or one at a time; codes that need bit 7 are cut into two planes of four bits.
 *
 * Sums of a (token, row): groups in order, each offset * sum, then scale * dot * token scale.
 */
#ifndef EDGEDSV4_WIDE_256_H
#define EDGEDSV4_WIDE_256_H

#include "products.h"

enum { WIDE_ROWS = DK_WIDE_ROWS, WIDE_COLUMNS = 512, WIDE_GROUPS = WIDE_COLUMNS / 16, WIDE_MOST = 4 };

typedef struct {
    uint8_t u[WIDE_ROWS][WIDE_COLUMNS + 64] DK_ALIGNED;
    float scale[WIDE_ROWS][WIDE_GROUPS + 16] DK_ALIGNED;
    float offset[WIDE_ROWS][WIDE_GROUPS + 16] DK_ALIGNED;
} wide_unpacked;

/* u[1]: the upper halves of codes, where they are cut. */
typedef struct {
    uint8_t u[2][WIDE_COLUMNS / 4][WIDE_ROWS][4] DK_ALIGNED;
    float scale[WIDE_GROUPS][WIDE_ROWS] DK_ALIGNED;
    float offset[WIDE_GROUPS][WIDE_ROWS] DK_ALIGNED;
} wide_slab;

/* How a type is computed: columns of a group, sums that are added before they are widened, planes of codes. */
typedef struct {
    int group, most, planes;
} wide_form;

/* Eight rows of eight words of 32 bits: to[column] is a column of them. */
DK_256 DK_INLINE void transpose_8(__m256i *to, const void *from, int64_t stride)
{
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
        a[r] = _mm256_load_si256((const __m256i *)((const uint8_t *)from + r * stride));
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
    /* a[4 k + j]: rows 4 k .. 4 k + 3 of columns j and j + 4. */
#pragma GCC unroll 2
    for (int k = 0; k < 8; k += 4) {
        a[k] = _mm256_unpacklo_epi64(b[k], b[k + 2]);
        a[k + 1] = _mm256_unpackhi_epi64(b[k], b[k + 2]);
        a[k + 2] = _mm256_unpacklo_epi64(b[k + 1], b[k + 3]);
        a[k + 3] = _mm256_unpackhi_epi64(b[k + 1], b[k + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        to[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
        to[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
}

DK_256 DK_INLINE void store_column(void *to, __m256i column) { _mm256_store_si256((__m256i *)to, column); }

DK_256 DK_INLINE void interleave_codes(wide_slab *to, const wide_unpacked *from, int64_t columns, const int planes)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int64_t c = 0; c < columns; c += 32) {
        for (int r = 0; r < WIDE_ROWS; r += 8) {
            __m256i column[8];
            transpose_8(column, &from->u[r][c], sizeof from->u[0]);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                if (planes == 2) {
                    __m256i upper = _mm256_and_si256(_mm256_srli_epi16(column[k], 4), nibble);
                    store_column(to->u[1][c / 4 + k][r], upper);
                    column[k] = _mm256_and_si256(column[k], nibble);
                }
                store_column(to->u[0][c / 4 + k][r], column[k]);
            }
        }
    }
}

DK_256 DK_INLINE void interleave_floats(float (*to)[WIDE_ROWS], const float *from, int64_t stride, int64_t groups)
{
    for (int64_t g = 0; g < groups; g += 8) {
        for (int r = 0; r < WIDE_ROWS; r += 8) {
            __m256i column[8];
            transpose_8(column, from + r * stride + g, stride * (int64_t)sizeof *from);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++)
                store_column(&to[g + k][r], column[k]);
        }
    }
}

DK_256 static void interleave(wide_slab *to, const wide_unpacked *from, int64_t columns, const wide_form f)
{
    if (f.planes == 2)
        interleave_codes(to, from, columns, 2);
    else
        interleave_codes(to, from, columns, 1);
    interleave_floats(to->scale, from->scale[0], WIDE_GROUPS + 16, columns / f.group);
    interleave_floats(to->offset, from->offset[0], WIDE_GROUPS + 16, columns / f.group);
}

/* Values of the first of some tokens at the first column of a group. */
typedef struct {
    const int8_t *q;
    const float *x, *sum;
    int64_t columns, sums;   /* from token to token */
} wide_tokens;

/* Keep a sum as it was written: compilers reorder additions of integers, and run out of registers. */
#define IN_ORDER(sum) __asm__("" : "+x"(sum))

/* Dot products of a group with two registers of codes, from u and u2 on, [register][token]. */
DK_256 DK_INLINE void group_dots(__m256i (*dot)[WIDE_MOST], const uint8_t *u, const uint8_t *u2, const wide_tokens *a,
                                 const wide_form f, const int tokens)
{
    const int steps = f.group / 4;
#if DK_256_HAS_DPBUSD
#pragma GCC unroll 8
    for (int i = 0; i < steps; i++) {
        __m256i w = load_32(u + 64 * i), w2 = load_32(u2 + 64 * i);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m256i q = _mm256_set1_epi32((int32_t)dk_load32((const uint8_t *)a->q + t * a->columns + 4 * i));
            dot[0][t] = dk_dpbusd(i ? dot[0][t] : _mm256_setzero_si256(), w, q);
            dot[1][t] = dk_dpbusd(i ? dot[1][t] : _mm256_setzero_si256(), w2, q);
        }
    }
#else
    const __m256i one = _mm256_set1_epi16(1), weight = f.planes == 2 ? _mm256_set1_epi16(16) : one;
#pragma GCC unroll 8
    for (int first = 0; first < steps; first += f.most) {
        __m256i part[2][WIDE_MOST];
#pragma GCC unroll 8
        for (int i = 0; i < f.most; i++) {
            __m256i w = load_32(u + 64 * (first + i)), w2 = load_32(u2 + 64 * (first + i));
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                const uint8_t *place = (const uint8_t *)a->q + t * a->columns + 4 * (first + i);
                __m256i q = _mm256_set1_epi32((int32_t)dk_load32(place));
                __m256i pairs = _mm256_maddubs_epi16(w, q), pairs2 = _mm256_maddubs_epi16(w2, q);
                part[0][t] = i ? _mm256_add_epi16(part[0][t], pairs) : pairs;
                part[1][t] = i ? _mm256_add_epi16(part[1][t], pairs2) : pairs2;
                IN_ORDER(part[0][t]);
                IN_ORDER(part[1][t]);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m256i sum = _mm256_madd_epi16(part[0][t], one), sum2 = _mm256_madd_epi16(part[1][t], weight);
            dot[0][t] = first ? _mm256_add_epi32(dot[0][t], sum) : sum;
            dot[1][t] = first ? _mm256_add_epi32(dot[1][t], sum2) : sum2;
        }
    }
#endif
}

/* Add a group's dot products with eight rows to their sums. */
DK_256 DK_INLINE void add_dot(float *acc, __m256i dot, __m256 scale, __m256 offset, float x, float total)
{
    __m256 sum = _mm256_fmadd_ps(offset, _mm256_set1_ps(total), _mm256_load_ps(acc));
    __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
    _mm256_store_ps(acc, _mm256_fmadd_ps(part, _mm256_set1_ps(x), sum));
}

/* Add group g of the slab, c columns into it; x32 is the group of the tokens' scales. */
DK_256 DK_INLINE void add_group(float (*acc)[WIDE_ROWS], const wide_slab *s, int64_t c, const wide_tokens *a,
                                const wide_form f, const int tokens)
{
    __m256i dot[2][WIDE_MOST];
    const float *scale = s->scale[c / f.group], *offset = s->offset[c / f.group];
    const uint8_t *u = s->u[0][c / 4][0], *upper = s->u[1][c / 4][0];
    if (f.planes == 1) {
        group_dots(dot, u, u + 32, a, f, tokens);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++)
                add_dot(&acc[t][8 * v], dot[v][t], _mm256_load_ps(scale + 8 * v), _mm256_load_ps(offset + 8 * v),
                        a->x[t * (a->columns / 32)], a->sum[t * a->sums]);
        return;
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
        group_dots(dot, u + 32 * v, upper + 32 * v, a, f, tokens);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            add_dot(&acc[t][8 * v], _mm256_add_epi32(dot[0][t], dot[1][t]), _mm256_load_ps(scale + 8 * v),
                    _mm256_load_ps(offset + 8 * v), a->x[t * (a->columns / 32)], a->sum[t * a->sums]);
    }
}

DK_256 DK_INLINE void add_tokens(float (*acc)[WIDE_ROWS], const wide_slab *s, wide_tokens a, int64_t columns,
                                 const wide_form f, const int tokens)
{
    for (int64_t c = 0; c < columns; c += 32) {
        add_group(acc, s, c, &a, f, tokens);
        a.q += f.group;
        a.sum += 1;
        if (f.group == 16) {
            add_group(acc, s, c + 16, &a, f, tokens);
            a.q += f.group;
            a.sum += 1;
        }
        a.x += 1;
    }
}

/* All tokens of the block. The same columns of the next sixteen rows are asked for meanwhile. */
DK_256 DK_INLINE void add_slab(float (*acc)[WIDE_ROWS], const wide_slab *s, const dk_product *p, const dk_block *b,
                               int64_t next, int64_t column, int64_t columns, const wide_form f)
{
    int64_t all = p->w->columns, place = b->first_token * all + column, t = 0, ahead = 0;
    int64_t step = dk_parts(WIDE_ROWS * WIDE_MOST, b->tokens);
    wide_tokens a = {p->x->q + place, p->x->scale + place / 32, NULL, all, all / f.group};
    a.sum = (f.group == 32 ? p->x->sum32 : p->x->sum16) + place / f.group;
    while (t < b->tokens) {
        int64_t count = b->tokens - t >= WIDE_MOST ? WIDE_MOST : b->tokens - t >= 2 ? 2 : 1;
        for (int64_t end = dk_min(ahead + step, WIDE_ROWS); ahead < end; ahead++)
            dk_prefetch_columns(p->w, next + ahead, column, columns);
        if (count == WIDE_MOST)
            add_tokens(acc + t, s, a, columns, f, WIDE_MOST);
        else if (count == 2)
            add_tokens(acc + t, s, a, columns, f, 2);
        else
            add_tokens(acc + t, s, a, columns, f, 1);
        a.q += count * all;
        a.x += count * (all / 32);
        a.sum += count * a.sums;
        t += count;
    }
}

#define WIDE_FORMS(CASE)                                                                                   \
    CASE(32, 8, 1) CASE(32, 4, 1) CASE(32, 1, 1) CASE(32, 8, 2) CASE(16, 4, 1) CASE(16, 2, 1) CASE(16, 1, 1)
#define WIDE_FUNCTION(GROUP, MOST, PLANES)                                                                 \
    DK_256 static void add_slab_##GROUP##_##MOST##_##PLANES(                                               \
        float (*acc)[WIDE_ROWS], const wide_slab *s, const dk_product *p, const dk_block *b, int64_t next, \
        int64_t column, int64_t columns)                                                                   \
    {                                                                                                      \
        add_slab(acc, s, p, b, next, column, columns, (wide_form){GROUP, MOST, PLANES});                   \
    }
#define WIDE_CASE(GROUP, MOST, PLANES)                                                                     \
    if (f.group == GROUP && f.most == MOST && f.planes == PLANES)                                          \
        return add_slab_##GROUP##_##MOST##_##PLANES;

typedef void (*wide_fn)(float (*acc)[WIDE_ROWS], const wide_slab *s, const dk_product *p, const dk_block *b,
                        int64_t next, int64_t column, int64_t columns);

#if DK_256_HAS_DPBUSD

WIDE_FUNCTION(32, 8, 1)
WIDE_FUNCTION(16, 4, 1)

static wide_form form_of(int type, int group)
{
    (void)type;
    return (wide_form){group, group / 4, 1};
}

static wide_fn slab_fn(const wide_form f) { return f.group == 32 ? add_slab_32_8_1 : add_slab_16_4_1; }

#else

WIDE_FORMS(WIDE_FUNCTION)

/* Sums of two products of a code with at most 127 that fit into 16 bits together. */
static wide_form form_of(int type, int group)
{
    int code = dk_largest_code(type), most = group / 4;
    if (code > 128)
        return (wide_form){group, most, 2};
    while (most * 2 * code * 127 > INT16_MAX)
        most /= 2;
    return (wide_form){group, most, 1};
}

static wide_fn slab_fn(const wide_form f)
{
    WIDE_FORMS(WIDE_CASE)
    return NULL;
}

#endif

DK_256 static void store_rows(float *y, const float *sums, int64_t rows)
{
    for (int64_t r = 0; r < rows; r += 8) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)(rows - r)), lane);
        _mm256_maskstore_ps(y + r, kept, _mm256_load_ps(sums + r));
    }
}

DK_256 void DK_256_NAME(dk_wide)(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    dk_unpack_fn unpack = dk_unpack_of(unpacker);
    const wide_form f = form_of(p->w->type, unpacker->group);
    wide_fn add = slab_fn(f);
    float acc[DK_WIDE_TOKENS][WIDE_ROWS] DK_ALIGNED;
    wide_unpacked raw;
    wide_slab s;
    memset(&raw, 0, sizeof raw);
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += WIDE_ROWS) {
        int64_t rows = dk_min(WIDE_ROWS, b->first_row + b->rows - first), columns = p->w->columns;
        memset(acc, 0, (size_t)b->tokens * sizeof *acc);
        for (int64_t c = 0; c < columns; c += WIDE_COLUMNS) {
            int64_t width = dk_min(WIDE_COLUMNS, columns - c);
            for (int64_t r = 0; r < rows; r++)
                unpack(raw.u[r], raw.scale[r], raw.offset[r], p->w, p->first_row + first + r, c, width);
            interleave(&s, &raw, width, f);
            add(acc, &s, p, b, p->first_row + first + WIDE_ROWS, c, width);
        }
        for (int64_t t = 0; t < b->tokens; t++)
            store_rows(p->y + (b->first_token + t) * p->y_stride + first, acc[t], rows);
    }
}

#endif

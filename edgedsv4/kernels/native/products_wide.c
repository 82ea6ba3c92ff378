/* int8 products of many tokens: sixteen rows are interleaved by fours of columns, [columns / 4][row][4], and
 * stay in registers for 64 columns while all tokens pass by; a lane is a row.
 *
 * Sums of a (token, row): slabs and groups in order, each group scale * dot * token scale, then offsets.
 * With fewer than sixteen rows left the missing ones are zeros that are not stored. On tiles: products_amx.c.
 */

#include "products_wide.h"

#if defined(DK_X86)

enum { ROWS = DK_WIDE_ROWS, WIDTH = DK_SLAB, GROUPS = DK_SLAB_GROUPS, SHIFTS = WIDTH / 32 };

typedef struct {
    uint8_t u[WIDTH / 4][ROWS][4] DK_ALIGNED;
    float scale[GROUPS][ROWS] DK_ALIGNED;
    float offset[GROUPS][ROWS] DK_ALIGNED;
} interleaved;

/* ---- AVX-512 with VNNI ---- */

DK_VNNI static void interleave_vnni(interleaved *to, const dk_unpacked *from, int64_t columns, int group)
{
    const __m512i none = _mm512_setzero_si512();
    for (int64_t c = 0; c < columns; c += 64)
        dk_transpose_16(to->u[c / 4], &from->u[0][c], sizeof from->u[0], 256, 512, 768, none);
    for (int64_t g = 0; g < columns / group; g += 16) {
        dk_transpose_16(to->scale[g], &from->scale[0][g], sizeof from->scale[0], 256, 512, 768, none);
        dk_transpose_16(to->offset[g], &from->offset[0][g], sizeof from->offset[0], 256, 512, 768, none);
    }
}

/* One token's word of four bytes to all rows. */
DK_VNNI DK_INLINE __m512i word_of(const int8_t *q)
{
    int32_t word;
    memcpy(&word, q, sizeof word);
    return _mm512_set1_epi32(word);
}

/* Add 32 columns from column c of the slab on, for tokens whose values start at q, x and sums. */
DK_VNNI DK_INLINE void add_half(float (*acc)[ROWS], const interleaved *s, int64_t c, const dk_product *p,
                                int64_t token, int64_t tokens, int64_t column, int group)
{
    int64_t columns = p->w->columns;
    const int8_t *q = p->x->q + token * columns + column;
    const float *x = p->x->scale + (token * columns + column) / 32;
    const float *sums = (group == 32 ? p->x->sum32 : p->x->sum16) + (token * columns + column) / group;
    __m512i w[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        w[k] = _mm512_load_si512(s->u[c / 4 + k]);
    const __m512 scale = _mm512_load_ps(s->scale[c / group]), offset = _mm512_load_ps(s->offset[c / group]);
    const __m512 scale2 = group == 16 ? _mm512_load_ps(s->scale[c / 16 + 1]) : scale;
    const __m512 offset2 = group == 16 ? _mm512_load_ps(s->offset[c / 16 + 1]) : offset;
    for (int64_t t = 0; t < tokens; t++, q += columns, x += columns / 32, sums += columns / group) {
        __m512i dot = _mm512_setzero_si512(), dot2 = dot;
        __m512 sum = _mm512_load_ps(acc[t]), part;
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            dot = _mm512_dpbusd_epi32(dot, w[k], word_of(q + 4 * k));
            dot2 = _mm512_dpbusd_epi32(dot2, w[4 + k], word_of(q + 16 + 4 * k));
        }
        if (group == 32) {
            part = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(dot, dot2)), scale);
        } else {
            part = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
            part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot2), scale2, part);
            sum = _mm512_fmadd_ps(offset2, _mm512_set1_ps(sums[1]), sum);
        }
        sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[0]), sum);
        _mm512_store_ps(acc[t], _mm512_fmadd_ps(part, _mm512_set1_ps(*x), sum));
    }
}

/* 64 columns whose groups are 32 wide: half the traffic of the sums. With `has_middle`, offsets are a
 * constant times the scales and `shifts` that constant times the token's sums: one multiplication less per
 * group. */
DK_VNNI DK_INLINE void add_64(float (*acc)[ROWS], const interleaved *s, int64_t c, const dk_product *p,
                              int64_t token, int64_t tokens, int64_t column, const float *shifts,
                              const int has_middle)
{
    int64_t columns = p->w->columns, groups = columns / 32, step = has_middle ? SHIFTS : groups;
    const int8_t *q = p->x->q + token * columns + column;
    const float *x = p->x->scale + token * groups + column / 32;
    const float *sums = has_middle ? shifts + c / 32 : p->x->sum32 + token * groups + column / 32;
    __m512i w[16];
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++)
        w[k] = _mm512_load_si512(s->u[c / 4 + k]);
    const __m512 scale = _mm512_load_ps(s->scale[c / 32]), scale2 = _mm512_load_ps(s->scale[c / 32 + 1]);
    const __m512 offset = _mm512_load_ps(s->offset[c / 32]), offset2 = _mm512_load_ps(s->offset[c / 32 + 1]);
    for (int64_t t = 0; t < tokens; t++, q += columns, x += groups, sums += step) {
        __builtin_prefetch(q + 6 * columns, 0, 3);
        __m512i dot = _mm512_setzero_si512(), dot2 = dot;
        __m512 sum = _mm512_load_ps(acc[t]), first = _mm512_set1_ps(sums[0]),
               second = _mm512_set1_ps(sums[1]);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            dot = _mm512_dpbusd_epi32(dot, w[k], word_of(q + 4 * k));
            dot2 = _mm512_dpbusd_epi32(dot2, w[8 + k], word_of(q + 32 + 4 * k));
        }
        if (has_middle) {
            first = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x[0]), first);
            second = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot2), _mm512_set1_ps(x[1]), second);
            sum = _mm512_fmadd_ps(second, scale2, _mm512_fmadd_ps(first, scale, sum));
        } else {
            __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
            __m512 part2 = _mm512_mul_ps(_mm512_cvtepi32_ps(dot2), scale2);
            sum = _mm512_fmadd_ps(part, _mm512_set1_ps(x[0]), _mm512_fmadd_ps(offset, first, sum));
            sum = _mm512_fmadd_ps(part2, _mm512_set1_ps(x[1]), _mm512_fmadd_ps(offset2, second, sum));
        }
        _mm512_store_ps(acc[t], sum);
    }
}

DK_VNNI static void shift_sums(float (*shifts)[SHIFTS], const dk_product *p, const dk_block *b,
                               int64_t column, int64_t columns, float middle)
{
    int64_t groups = p->w->columns / 32;
    for (int64_t t = 0; t < b->tokens; t++) {
        const float *sums = p->x->sum32 + (b->first_token + t) * groups + column / 32;
        for (int64_t g = 0; g < columns / 32; g++)
            shifts[t][g] = middle * sums[g];
    }
}

/* The same columns of the next sixteen rows are asked for meanwhile, a row for every 64 columns: all at once
 * they would wait for each other. */
DK_VNNI DK_INLINE void add_slab(float (*acc)[ROWS], const interleaved *s, const dk_product *p,
                                const dk_block *b, int64_t next, int64_t column, int64_t columns,
                                const float *shifts, int group, int has_middle)
{
    int64_t step = group == 32 ? 64 : 32;
    for (int64_t c = 0; c < columns; c += step) {
        if (c % 64 == 0)
            dk_prefetch_columns(p->w, next + c / 64, column, columns);
        if (group == 32 && c + 64 <= columns)
            add_64(acc, s, c, p, b->first_token, b->tokens, column + c, shifts, has_middle);
        else
            add_half(acc, s, c, p, b->first_token, b->tokens, column + c, group);
    }
}

DK_VNNI void dk_wide_vnni(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    dk_unpack_fn unpack = dk_unpack_of(unpacker);
    float acc[DK_WIDE_TOKENS][ROWS] DK_ALIGNED, shifts[DK_WIDE_TOKENS][SHIFTS] DK_ALIGNED;
    float middle = unpacker->group == 32 ? dk_middle_of(p->w->type) : 0.0f;
    dk_unpacked raw;
    interleaved s;
    memset(&raw, 0, sizeof raw);
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_rows_at(b, first), columns = p->w->columns;
        memset(acc, 0, (size_t)b->tokens * sizeof *acc);
        for (int64_t c = 0; c < columns; c += WIDTH) {
            int64_t width = dk_min(WIDTH, columns - c);
            dk_unpack_rows(&raw, p, unpack, first, rows, c, width);
            interleave_vnni(&s, &raw, width, unpacker->group);
            int64_t next = p->first_row + first + ROWS;
            if (middle != 0.0f) {
                shift_sums(shifts, p, b, c, width, middle);
                add_slab(acc, &s, p, b, next, c, width, shifts[0], 32, 1);
            } else if (unpacker->group == 32) {
                add_slab(acc, &s, p, b, next, c, width, NULL, 32, 0);
            } else {
                add_slab(acc, &s, p, b, next, c, width, NULL, 16, 0);
            }
        }
        __mmask16 kept = (__mmask16)((1u << rows) - 1);
        for (int64_t t = 0; t < b->tokens; t++)
            _mm512_mask_storeu_ps(p->y + (b->first_token + t) * p->y_stride + first, kept,
                                  _mm512_load_ps(acc[t]));
    }
}

#endif

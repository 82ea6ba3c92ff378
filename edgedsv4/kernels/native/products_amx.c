/* int8 products of many tokens on tiles (AMX): a tile of sixteen tokens times one of sixteen rows, whose
 * columns are interleaved by fours as in products_wide.c.
 *
 * A tile step adds up 64 columns, but scales belong to groups of 32 or 16. So every group has its own step:
 * two groups lie side by side in the tile of tokens, and zeros take the other's place in the tile of rows. A
 * step of half the columns would take as long, and read the tokens twice. The dot products of a group go
 * through memory to be scaled and summed up in float32, which is what takes most of the time; those of the
 * next two groups are under way meanwhile. (Tiles of bfloat16 with the scales multiplied into the weights need
 * none of that. Measured: slower below 64 tokens, 1 to 2.9 times as fast at 256. But then the rounding of a
 * token would depend on how many others are in the call, which that of int8 does not.)
 *
 * Where a type's offsets are a constant times its scales, the constant is added to the bytes, which then are
 * signed. Sums of a (token, row): groups in order. */

#include "products_wide.h"

#if defined(DK_TILES)

#if defined(DK_TILES_IN_SOFTWARE)
#include "software_tiles.h"
#endif

enum { ROWS = DK_WIDE_ROWS, TOKENS = 16, MIDDLE_GAP = 512, BYTES_64 = 1536 };

/* Tiles by number: tokens, two groups of rows and their products, and the same of the last few tokens. */
#define ALL_TOKENS 0
#define ROWS_1 1
#define ROWS_2 2
#define ALL_1 3
#define ALL_2 4
#define LAST_TOKENS 5
#define LAST_1 6
#define LAST_2 7

typedef struct {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Two groups: data of the first [group / 4][row][4], as many zeros, data of the second. */
typedef struct {
    uint8_t u[DK_SLAB / 64 * BYTES_64] DK_ALIGNED;
    float scale[DK_SLAB_GROUPS][ROWS] DK_ALIGNED;
    float offset[DK_SLAB_GROUPS][ROWS] DK_ALIGNED;
} slab;

typedef int32_t dots_of_group[TOKENS][ROWS];

/* Tokens from the first of a tile on, from the first column of a slab on. */
typedef struct {
    const int8_t *q;
    const float *x;
    const float *sums;
    int64_t columns;
    int64_t x_step;
    int64_t sums_step;
} tile_input;

/* What is the same for all of a block: the type's group, and whether it has offsets. */
typedef struct {
    int group;
    int has_offset;
} form;

DK_AMX static void shape_tiles(int group, int64_t last)
{
    tile_shapes shapes DK_ALIGNED;
    memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = 64;
        shapes.rows[tile] = tile >= LAST_TOKENS ? (uint8_t)last : TOKENS;
    }
    shapes.bytes[ALL_TOKENS] = shapes.bytes[LAST_TOKENS] = (uint16_t)(2 * group);
    shapes.rows[ROWS_1] = shapes.rows[ROWS_2] = (uint8_t)(group / 2);
    /* gcc 12 takes the instruction to read eight bytes. */
    __asm__ volatile("" : "+m"(shapes));
    _tile_loadconfig(&shapes);
}

DK_AMX static void interleave(slab *to, const dk_unpacked *from, int64_t columns, form f, float middle)
{
    const __m512i none = _mm512_setzero_si512(), shift = _mm512_set1_epi8((char)(int)middle);
    for (int64_t c = 0; c < columns; c += 64) {
        uint8_t *u = to->u + c / 64 * BYTES_64;
        if (f.group == 32)
            dk_transpose_16(u, &from->u[0][c], sizeof from->u[0], 256, 1024, 1280, shift);
        else
            dk_transpose_16(u, &from->u[0][c], sizeof from->u[0], 512, 768, 1280, shift);
    }
    for (int64_t g = 0; g < columns / f.group; g += 16) {
        dk_transpose_16(to->scale[g], &from->scale[0][g], sizeof from->scale[0], 256, 512, 768, none);
        if (f.has_offset)
            dk_transpose_16(to->offset[g], &from->offset[0][g], sizeof from->offset[0], 256, 512, 768, none);
    }
    /* Loads of tiles are instructions that the compiler does not know to read memory. */
    __asm__ volatile("" ::: "memory");
}

/* Define `name`_first and `name`_second: dot products of the tokens at q with the two groups at u. */
#define DEFINE_DOTS(name, TOKENS_TILE, FIRST, SECOND)                                                      \
    DK_AMX DK_INLINE void name##_first(dots_of_group *dots, const uint8_t *u, const int8_t *q,             \
                                       int64_t stride, const form f)                                       \
    {                                                                                                      \
        _tile_loadd(TOKENS_TILE, q, stride);                                                               \
        _tile_loadd(ROWS_1, u, 64);                                                                        \
        _tile_zero(FIRST);                                                                                 \
        if (f.has_offset)                                                                                  \
            _tile_dpbsud(FIRST, TOKENS_TILE, ROWS_1);                                                      \
        else                                                                                               \
            _tile_dpbssd(FIRST, TOKENS_TILE, ROWS_1);                                                      \
        _tile_stored(FIRST, dots[0], 64);                                                                  \
    }                                                                                                      \
    DK_AMX DK_INLINE void name##_second(dots_of_group *dots, const uint8_t *u, const form f)               \
    {                                                                                                      \
        _tile_loadd(ROWS_2, u + 16 * f.group, 64);                                                         \
        _tile_zero(SECOND);                                                                                \
        if (f.has_offset)                                                                                  \
            _tile_dpbsud(SECOND, TOKENS_TILE, ROWS_2);                                                     \
        else                                                                                               \
            _tile_dpbssd(SECOND, TOKENS_TILE, ROWS_2);                                                     \
        _tile_stored(SECOND, dots[1], 64);                                                                 \
    }

DEFINE_DOTS(dots_of_all, ALL_TOKENS, ALL_1, ALL_2)
DEFINE_DOTS(dots_of_last, LAST_TOKENS, LAST_1, LAST_2)

/* Scales and offsets of two groups. */
typedef struct {
    __m512 scale[2];
    __m512 offset[2];
} factors;

DK_AMX DK_INLINE factors load_factors(const slab *s, int64_t g, const form f)
{
    factors at;
    at.scale[0] = _mm512_load_ps(s->scale[g]);
    at.scale[1] = _mm512_load_ps(s->scale[g + 1]);
    at.offset[0] = at.offset[1] = _mm512_setzero_ps();
    if (f.has_offset) {
        at.offset[0] = _mm512_load_ps(s->offset[g]);
        at.offset[1] = _mm512_load_ps(s->offset[g + 1]);
    }
    return at;
}

/* Add one token's dot products with two groups, or one, to its sum. */
DK_AMX DK_INLINE __m512 add_dots(__m512 sum, const int32_t *first, const int32_t *second, const factors *at,
                                 const float *x, const float *sums, const form f, const int count)
{
    __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(first)), dot2 = _mm512_setzero_ps();
    if (count == 2)
        dot2 = _mm512_cvtepi32_ps(_mm512_load_si512(second));
    if (f.has_offset) {
        sum = _mm512_fmadd_ps(at->offset[0], _mm512_set1_ps(sums[0]), sum);
        if (count == 2)
            sum = _mm512_fmadd_ps(at->offset[1], _mm512_set1_ps(sums[1]), sum);
    }
    if (f.group == 16) {
        dot = _mm512_mul_ps(dot, at->scale[0]);
        return _mm512_fmadd_ps(_mm512_fmadd_ps(dot2, at->scale[1], dot), _mm512_set1_ps(x[0]), sum);
    }
    sum = _mm512_fmadd_ps(_mm512_mul_ps(dot, _mm512_set1_ps(x[0])), at->scale[0], sum);
    if (count == 2)
        sum = _mm512_fmadd_ps(_mm512_mul_ps(dot2, _mm512_set1_ps(x[1])), at->scale[1], sum);
    return sum;
}

/* Where scales and sums of a tile's tokens are: each fourth token, and the way to the next. */
typedef struct {
    const float *x[4];
    const float *sums[4];
    int64_t x_step;
    int64_t sums_step;
} factors_of_tokens;

/* Eight tokens from the first on. */
DK_AMX DK_INLINE void add_eight(__m512 *sum, const dots_of_group *dots, const factors *at,
                                const factors_of_tokens *of, const int first, const form f)
{
#pragma GCC unroll 8
    for (int t = first; t < first + 8; t++)
        sum[t] = add_dots(sum[t], dots[0][t], dots[1][t], at, of->x[t / 4] + t % 4 * of->x_step,
                          of->sums[t / 4] + t % 4 * of->sums_step, f, 2);
}

/* Sixteen tokens, whose sums stay in registers. Between the two products of the next pair lies half of the work
 * on this pair where there are offsets, which is faster; without them it is not. */
DK_AMX DK_INLINE void add_all(float (*acc)[ROWS], const slab *s, const tile_input in, int64_t pairs, const form f)
{
    dots_of_group dots[2][2] DK_ALIGNED;
    __m512 sum[TOKENS];
    factors_of_tokens of = {.x_step = in.x_step, .sums_step = in.sums_step};
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        of.x[k] = in.x + 4 * k * in.x_step;
        of.sums[k] = in.sums + 4 * k * in.sums_step;
    }
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++)
        sum[t] = _mm512_load_ps(acc[t]);
    dots_of_all_first(dots[0], s->u, in.q, in.columns, f);
    dots_of_all_second(dots[0], s->u, f);
    for (int64_t i = 0; i < pairs; i++) {
        const uint8_t *next = s->u + (i + 1) * 48 * f.group;
        const int has_next = i + 1 < pairs;
        if (has_next)
            dots_of_all_first(dots[(i + 1) & 1], next, in.q + (i + 1) * 2 * f.group, in.columns, f);
        if (has_next && !f.has_offset)
            dots_of_all_second(dots[(i + 1) & 1], next, f);
        const factors at = load_factors(s, 2 * i, f);
        add_eight(sum, dots[i & 1], &at, &of, 0, f);
        if (has_next && f.has_offset)
            dots_of_all_second(dots[(i + 1) & 1], next, f);
        add_eight(sum, dots[i & 1], &at, &of, 8, f);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            of.x[k] += f.group / 16;
            of.sums[k] += 2;
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++)
        _mm512_store_ps(acc[t], sum[t]);
}

/* The same for the last tokens, fewer than sixteen. */
DK_AMX DK_INLINE void add_last(float (*acc)[ROWS], const slab *s, const tile_input in, int64_t tokens,
                               int64_t pairs, const form f)
{
    dots_of_group dots[2][2] DK_ALIGNED;
    dots_of_last_first(dots[0], s->u, in.q, in.columns, f);
    dots_of_last_second(dots[0], s->u, f);
    for (int64_t i = 0; i < pairs; i++) {
        if (i + 1 < pairs) {
            const uint8_t *next = s->u + (i + 1) * 48 * f.group;
            dots_of_last_first(dots[(i + 1) & 1], next, in.q + (i + 1) * 2 * f.group, in.columns, f);
            dots_of_last_second(dots[(i + 1) & 1], next, f);
        }
        const factors at = load_factors(s, 2 * i, f);
        const float *x = in.x + i * (f.group / 16), *sums = in.sums + 2 * i;
        for (int64_t t = 0; t < tokens; t++, x += in.x_step, sums += in.sums_step) {
            __m512 sum = _mm512_load_ps(acc[t]);
            sum = add_dots(sum, dots[i & 1][0][t], dots[i & 1][1][t], &at, x, sums, f, 2);
            _mm512_store_ps(acc[t], sum);
        }
    }
}

/* A group of 32 without a second one: the tokens are copied, so that nothing after it is read. */
DK_AMX DK_INLINE void add_single(float (*acc)[ROWS], const slab *s, const tile_input in, int64_t tokens,
                                 int64_t pairs, const form f)
{
    int8_t q[TOKENS][64] DK_ALIGNED;
    dots_of_group dots[1] DK_ALIGNED;
    memset(q, 0, sizeof q);
    for (int64_t t = 0; t < tokens; t++)
        memcpy(q[t], in.q + t * in.columns + 64 * pairs, 32);
    __asm__ volatile("" ::: "memory");
    dots_of_all_first(dots, s->u + pairs * 48 * 32, q[0], 64, f);
    const factors at = load_factors(s, 2 * pairs, f);
    for (int64_t t = 0; t < tokens; t++) {
        __m512 sum = _mm512_load_ps(acc[t]);
        sum = add_dots(sum, dots[0][t], dots[0][t], &at, in.x + t * in.x_step + 2 * pairs,
                       in.sums + t * in.sums_step + 2 * pairs, f, 1);
        _mm512_store_ps(acc[t], sum);
    }
}

/* All tokens of a block. The same columns of the next sixteen rows are asked for meanwhile, a few rows for
 * every tile: all at once they would wait for each other. */
DK_AMX DK_INLINE void add_slab(float (*acc)[ROWS], const slab *s, const dk_product *p, const dk_block *b,
                               int64_t next, int64_t column, int64_t columns, const form f)
{
    int64_t all = p->w->columns, pairs = columns / (2 * f.group), tiles = dk_parts(b->tokens, TOKENS);
    const float *sums = f.group == 32 ? p->x->sum32 : p->x->sum16;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = TOKENS * tile, token = b->first_token + first, tokens = dk_min(TOKENS, b->tokens - first);
        tile_input in = {p->x->q + token * all + column,
                         p->x->scale + (token * all + column) / 32,
                         sums + (token * all + column) / f.group,
                         all,
                         all / 32,
                         all / f.group};
        for (int64_t row = tile * ROWS / tiles; row < (tile + 1) * ROWS / tiles; row++)
            dk_prefetch_columns(p->w, next + row, column, columns);
        if (pairs == 0)
            ;
        else if (tokens < TOKENS)
            add_last(acc + first, s, in, tokens, pairs, f);
        else
            add_all(acc + first, s, in, pairs, f);
        if (f.group == 32 && columns % 64 != 0)
            add_single(acc + first, s, in, tokens, pairs, f);
    }
}

DK_AMX void dk_wide_amx(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    dk_unpack_fn unpack = dk_unpack_of(unpacker);
    float acc[DK_WIDE_TOKENS][ROWS] DK_ALIGNED, middle = dk_middle_of(p->w->type);
    const form f = {unpacker->group, middle == 0.0f};
    dk_unpacked raw;
    slab s;
    memset(&raw, 0, sizeof raw);
    memset(s.u, 0, sizeof s.u);
    shape_tiles(f.group, b->tokens % TOKENS ? b->tokens % TOKENS : TOKENS);
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_rows_at(b, first), columns = p->w->columns, next = p->first_row + first + ROWS;
        memset(acc, 0, (size_t)b->tokens * sizeof *acc);
        for (int64_t c = 0; c < columns; c += DK_SLAB) {
            int64_t width = dk_min(DK_SLAB, columns - c);
            dk_unpack_rows(&raw, p, unpack, first, rows, c, width);
            interleave(&s, &raw, width, f, middle);
            if (f.group == 32 && f.has_offset)
                add_slab(acc, &s, p, b, next, c, width, (form){32, 1});
            else if (f.group == 32)
                add_slab(acc, &s, p, b, next, c, width, (form){32, 0});
            else if (f.has_offset)
                add_slab(acc, &s, p, b, next, c, width, (form){16, 1});
            else
                add_slab(acc, &s, p, b, next, c, width, (form){16, 0});
        }
        __mmask16 kept = (__mmask16)((1u << rows) - 1);
        for (int64_t t = 0; t < b->tokens; t++)
            _mm512_mask_storeu_ps(p->y + (b->first_token + t) * p->y_stride + first, kept,
                                  _mm512_load_ps(acc[t]));
    }
    _tile_release();
}

#endif

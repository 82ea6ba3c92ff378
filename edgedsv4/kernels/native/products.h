/* Inside of dk_products: kernels for a block of rows and tokens of one product, one set per form.
 *
 * Rows and tokens count from p->first_row and from the first token. In the row-by-row and the float form the
 * sums of one (row, token) run in one fixed order, whatever the block; in the wide form too, but in another.
 */
#ifndef EDGEDSV4_PRODUCTS_H
#define EDGEDSV4_PRODUCTS_H

#include "native.h"
#include "unpack.h"

typedef struct {
    int64_t first_row;
    int64_t rows;
    int64_t first_token;
    int64_t tokens;
} dk_block;

typedef void (*dk_block_fn)(const dk_product *p, const dk_block *b);

/* What computes a product, and about how many nanoseconds a row of it takes. */
typedef struct {
    dk_block_fn fn;
    double cost;
} dk_kernel;

/* For a product whose tokens make one block (quant_matmul.c). */
dk_kernel dk_kernel_of(const dk_product *p, int is_small);

/* Most tokens of a block. */
enum {
    DK_NARROW_TOKENS = 32,
    DK_WIDE_TOKENS = 256,
    DK_DIRECT_TOKENS = 4,
    DK_FLOAT_TOKENS = 96
};
/* Rows that a kernel takes together; blocks are multiples of it but for the end of a matrix. */
enum { DK_NARROW_ROWS = 4, DK_WIDE_ROWS = 16, DK_FLOAT_ROWS = 8 };
/* int8, row by row (products_narrow.c): decode and chunks of few tokens. */
void dk_narrow_scalar(const dk_product *p, const dk_block *b);
void dk_narrow_avx2(const dk_product *p, const dk_block *b);
void dk_narrow_avx_vnni(const dk_product *p, const dk_block *b);
void dk_narrow_vnni(const dk_product *p, const dk_block *b);
void dk_narrow_neon_dot(const dk_product *p, const dk_block *b);
/* Without scratch (products_single.c), in another order of sums; NULL for other types and columns. */
dk_block_fn dk_single_of(const dk_product *p);
/* The same for AVX2 and AVX-VNNI (single_256.h). */
int dk_has_single_256(const dk_product *p);
void dk_single_avx2(const dk_product *p, const dk_block *b);
void dk_single_avx_vnni(const dk_product *p, const dk_block *b);
/* IQ2_XXS without scratch (iq2_xxs_256.h), and by permutations (products_vbmi.c) up to so many columns; the same
 * bits. */
enum { DK_VBMI_COLUMNS = 8192 };
void dk_iq2_xxs_avx2(const dk_product *p, const dk_block *b);
void dk_iq2_xxs_avx_vnni(const dk_product *p, const dk_block *b);
void dk_iq2_xxs_vbmi(const dk_product *p, const dk_block *b);
/* int8, 16 rows interleaved (products_wide.c, wide_256.h): many tokens. */
void dk_wide_avx2(const dk_product *p, const dk_block *b);
void dk_wide_avx_vnni(const dk_product *p, const dk_block *b);
void dk_wide_vnni(const dk_product *p, const dk_block *b);
/* The same on tiles (products_amx.c). */
void dk_wide_amx(const dk_product *p, const dk_block *b);
/* float32 (products_float.c). */
void dk_float_scalar(const dk_product *p, const dk_block *b);
void dk_float_avx2(const dk_product *p, const dk_block *b);
void dk_float_avx512(const dk_product *p, const dk_block *b);
/* The same for few tokens and types that need no scratch (products_direct.c); the same bits. */
int dk_has_direct(const dk_product *p);
void dk_direct_avx512(const dk_product *p, const dk_block *b);

/* The unpacker's best function for the level in use. */
DK_INLINE dk_unpack_fn dk_unpack_of(const dk_unpacker *unpacker)
{
#if defined(DK_X86)
    if (dk_level >= DK_LEVEL_AVX512 && unpacker->avx512)
        return unpacker->avx512;
    if (dk_level >= DK_LEVEL_AVX2 && unpacker->avx2)
        return unpacker->avx2;
#endif
    return unpacker->scalar;
}

/* Ask for columns of a row that will be needed soon, into the second level: filling the first stalled the
 * loads that were under way (Zen 4: 45 % of the memory rate instead of 85 %). Harmless past the end of the
 * matrix. */
DK_INLINE void dk_prefetch_columns(const dk_matrix *w, int64_t row, int64_t column, int64_t columns)
{
    /* 16.16 fixed point: bytes per column. */
    uint64_t step = ((uint64_t)w->row_bytes << 16) / (uint64_t)w->columns;
    const uint8_t *p = w->data + row * w->row_bytes + (int64_t)((uint64_t)column * step >> 16);
    int64_t bytes = (int64_t)((uint64_t)columns * step >> 16);
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(p + i, 0, 2);
}

#endif

/* The row-by-row form of products_narrow.c with the dot products of NEON, which take signed bytes on both sides:
 * codes that need bit 7 lose 128, and their offsets gain 128 scales.
 *
 * Four float lanes per (row, token): lane i of a group takes the dot products of its elements 4 i .. 4 i + 3,
 * and 16 later. Slabs come in order, in each the offsets (lane i: groups i, i + 4, ...) before the groups, so
 * nothing depends on how many rows or tokens are in hand.
 */

#include "narrow.h"

#if defined(DK_NEON)

/* As int8: what a slab holds when its codes were up to 255. */
static void make_signed(slab *s, int64_t columns, int group)
{
    for (int64_t c = 0; c < columns; c++)
        s->u[c] ^= 0x80;
    for (int64_t g = 0; g < columns / group; g++)
        s->offset[g] += 128.0f * s->scale[g];
}

DK_NEON_DOT DK_INLINE float32x4_t add_offsets(float32x4_t lanes, const float *offset, const float *sums,
                                              int64_t groups)
{
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4)
        lanes = vfmaq_f32(lanes, vld1q_f32(offset + g), vld1q_f32(sums + g));
    float rest[2][4] = {{0.0f}};
    for (int i = 0; g < groups; g++, i++) {
        rest[0][i] = offset[g];
        rest[1][i] = sums[g];
    }
    return vfmaq_f32(lanes, vld1q_f32(rest[0]), vld1q_f32(rest[1]));
}

/* A slab of `rows` (a constant) rows times a token. */
DK_NEON_DOT DK_INLINE void add_slab(float32x4_t *lanes, const slab *s, const activations *a, int64_t columns,
                                    const int group, const int rows)
{
    float32x4_t own[ROWS];
    for (int r = 0; r < rows; r++)
        own[r] = add_offsets(lanes[r], s[r].offset, a->sums, columns / group);
    for (int64_t c = 0; c < columns; c += 32) {
        int8x16_t q = vld1q_s8(a->q + c), q2 = vld1q_s8(a->q + c + 16);
        float x = a->scale[c / 32];
        for (int r = 0; r < rows; r++) {
            int8x16_t u = vreinterpretq_s8_u8(vld1q_u8(s[r].u + c));
            int8x16_t u2 = vreinterpretq_s8_u8(vld1q_u8(s[r].u + c + 16));
            const float *scale = s[r].scale + c / group;
            int32x4_t dot = vdotq_s32(vdupq_n_s32(0), u, q);
            if (group == 32) {
                own[r] = vfmaq_n_f32(own[r], vcvtq_f32_s32(vdotq_s32(dot, u2, q2)), scale[0] * x);
            } else {
                int32x4_t dot2 = vdotq_s32(vdupq_n_s32(0), u2, q2);
                own[r] = vfmaq_n_f32(own[r], vcvtq_f32_s32(dot), scale[0] * x);
                own[r] = vfmaq_n_f32(own[r], vcvtq_f32_s32(dot2), scale[1] * x);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        lanes[r] = own[r];
}

DK_NEON_DOT DK_INLINE void all_rows(const dk_product *p, const dk_block *b, dk_unpack_fn unpack, const int group)
{
    int64_t columns = p->w->columns;
    int is_signed = dk_largest_code(p->w->type) > 127;
    slab s[ROWS];
    float32x4_t lanes[DK_NARROW_TOKENS][ROWS];
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_min(ROWS, b->first_row + b->rows - first);
        memset(lanes, 0, (size_t)b->tokens * sizeof *lanes);
        for (int64_t c = 0; c < columns; c += WIDTH) {
            int64_t width = dk_min(WIDTH, columns - c);
            for (int64_t r = 0; r < rows; r++) {
                dk_prefetch_columns(p->w, p->first_row + first + r + ROWS, c, width);
                unpack(s[r].u, s[r].scale, s[r].offset, p->w, p->first_row + first + r, c, width);
                if (is_signed)
                    make_signed(&s[r], width, group);
            }
            for (int64_t t = 0; t < b->tokens; t++) {
                activations a = activations_at(p, b->first_token + t, c, group);
                if (rows == ROWS)
                    add_slab(lanes[t], s, &a, width, group, ROWS);
                else
                    for (int64_t r = 0; r < rows; r++)
                        add_slab(&lanes[t][r], &s[r], &a, width, group, 1);
            }
        }
        for (int64_t t = 0; t < b->tokens; t++)
            for (int64_t r = 0; r < rows; r++)
                p->y[(b->first_token + t) * p->y_stride + first + r] = vaddvq_f32(lanes[t][r]);
    }
}

DK_NEON_DOT void dk_narrow_neon_dot(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    if (unpacker->group == 32)
        all_rows(p, b, dk_unpack_of(unpacker), 32);
    else
        all_rows(p, b, dk_unpack_of(unpacker), 16);
}

#endif

/* int8 products row by row, for few tokens: slabs of four rows are unpacked to a cache-resident scratch and
 * multiplied with every token; rows are read in the order in which they lie in memory.
 *
 * Sixteen float lanes per (row, token): lane i of a chunk of 64 columns takes the dot product of its elements
 * 4i .. 4i + 3. Chunks come in order, before them the offsets of their sixteen groups (lane i: group i), so
 * nothing depends on how many rows or tokens are in hand. AVX2 keeps the same lanes in halves.
 */

#include "narrow.h"

static float dot_scalar(const slab *s, const activations *a, int64_t columns, int group, float sum)
{
    for (int64_t g = 0; g < columns / group; g++) {
        int32_t dot = 0;
        for (int i = 0; i < group; i++)
            dot += s->u[g * group + i] * a->q[g * group + i];
        sum += s->scale[g] * a->scale[g * group / 32] * (float)dot + s->offset[g] * a->sums[g];
    }
    return sum;
}

void dk_narrow_scalar(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    int64_t columns = p->w->columns;
    slab s;
    for (int64_t r = b->first_row; r < b->first_row + b->rows; r++) {
        float sums[DK_NARROW_TOKENS] = {0};
        for (int64_t c = 0; c < columns; c += WIDTH) {
            int64_t width = dk_min(WIDTH, columns - c);
            unpacker->scalar(s.u, s.scale, s.offset, p->w, p->first_row + r, c, width);
            for (int64_t t = 0; t < b->tokens; t++) {
                activations a = activations_at(p, b->first_token + t, c, unpacker->group);
                sums[t] = dot_scalar(&s, &a, width, unpacker->group, sums[t]);
            }
        }
        for (int64_t t = 0; t < b->tokens; t++)
            p->y[(b->first_token + t) * p->y_stride + r] = sums[t];
    }
}

#if defined(DK_X86)

/* ---- AVX-512 with VNNI ---- */

/* Positions in a register of sixteen group scales for the lanes of chunk i. */
DK_VNNI DK_INLINE __m512i places_of_chunk(int i, int group)
{
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i place = group == 32 ? _mm512_srli_epi32(lane, 3) : _mm512_srli_epi32(lane, 2);
    return _mm512_add_epi32(place, _mm512_set1_epi32(i * CHUNK / group));
}

/* Scales of sixteen groups of activations, or of the first of them: `kept` has a bit for each. */
DK_VNNI DK_INLINE __m512 token_scales(const float *scale, int group, __mmask16 kept)
{
    if (group == 32)
        return _mm512_maskz_loadu_ps(kept, scale);
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __mmask16 halves = (__mmask16)_pext_u32(kept, 0x5555);
    return _mm512_permutexvar_ps(twice, _mm512_maskz_loadu_ps(halves, scale));
}

DK_VNNI DK_INLINE __m512 add_chunk(__m512 lanes, __m512i u, __m512i q, __m512 scales, __m512i places)
{
    __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, q);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(places, scales), lanes);
}

/* Add `chunks` (a constant) whole chunks of `rows` (a constant) rows, from column c on. */
DK_VNNI DK_INLINE void add_chunks(__m512 *own, const slab *s, const activations *a, int64_t c,
                                  const int group, const int rows, const int chunks)
{
    const int groups = chunks * CHUNK / group;
    const __mmask16 kept = (__mmask16)((1u << groups) - 1);
    __m512 scales[ROWS];
    __m512 x = token_scales(a->scale + c / 32, group, kept),
           sums = _mm512_maskz_loadu_ps(kept, a->sums + c / group);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        scales[r] = _mm512_mul_ps(_mm512_maskz_loadu_ps(kept, s[r].scale + c / group), x);
        own[r] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(kept, s[r].offset + c / group), sums, own[r]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < chunks; i++) {
        __m512i q = _mm512_loadu_si512(a->q + c + CHUNK * i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            own[r] = add_chunk(own[r], _mm512_load_si512(s[r].u + c + CHUNK * i), q, scales[r],
                               places_of_chunk(i, group));
    }
}

/* The end of a slab, at most sixteen groups and perhaps half a chunk. */
DK_VNNI DK_INLINE void add_rest(__m512 *own, const slab *s, const activations *a, int64_t c,
                                int64_t columns, const int group, const int rows)
{
    __m512 scales[ROWS];
    __mmask16 kept = (__mmask16)((1u << ((columns - c) / group)) - 1);
    __m512 x = token_scales(a->scale + c / 32, group, kept),
           sums = _mm512_maskz_loadu_ps(kept, a->sums + c / group);
    for (int r = 0; r < rows; r++) {
        scales[r] = _mm512_mul_ps(_mm512_maskz_loadu_ps(kept, s[r].scale + c / group), x);
        own[r] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(kept, s[r].offset + c / group), sums, own[r]);
    }
    for (int i = 0; c < columns; c += CHUNK, i++) {
        __mmask64 bytes = columns - c >= CHUNK ? ~(__mmask64)0 : (__mmask64)0xffffffff;
        __m512i q = _mm512_maskz_loadu_epi8(bytes, a->q + c);
        for (int r = 0; r < rows; r++) {
            __m512i u = _mm512_load_si512(s[r].u + c);
            own[r] = add_chunk(own[r], u, q, scales[r], places_of_chunk(i, group));
        }
    }
}

/* Add a slab of `rows` (a constant) rows, s[0] .., to lanes[0] .. */
DK_VNNI DK_INLINE void dot_vnni(__m512 *lanes, const slab *s, const activations *a, int64_t columns,
                                const int group, const int rows)
{
    __m512 own[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        own[r] = lanes[r];
    int64_t c = 0;
    for (; c + 16 * group <= columns; c += 16 * group)
        add_chunks(own, s, a, c, group, rows, group / 4);
    if (columns - c == 8 * group)
        add_chunks(own, s, a, c, group, rows, group / 8);
    else if (c < columns)
        add_rest(own, s, a, c, columns, group, rows);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        lanes[r] = own[r];
}

DK_VNNI DK_INLINE __m128 quarters(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/* Totals of four times sixteen lanes: halves, quarters, and so on. */
DK_VNNI DK_INLINE __m128 totals(const __m512 *lanes)
{
    __m128 a = quarters(lanes[0]), b = quarters(lanes[1]), c = quarters(lanes[2]), d = quarters(lanes[3]);
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}

DK_VNNI DK_INLINE void rows_vnni(const dk_product *p, const dk_block *b, dk_unpack_fn unpack, int group)
{
    int64_t columns = p->w->columns;
    slab s[ROWS];
    __m512 lanes[DK_NARROW_TOKENS][ROWS];
    for (int64_t first = b->first_row; first < b->first_row + b->rows; first += ROWS) {
        int64_t rows = dk_min(ROWS, b->first_row + b->rows - first);
        for (int64_t t = 0; t < b->tokens; t++)
            for (int r = 0; r < ROWS; r++)
                lanes[t][r] = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += WIDTH) {
            int64_t width = dk_min(WIDTH, columns - c);
            for (int64_t r = 0; r < rows; r++) {
                int64_t row = p->first_row + first + r;
                dk_prefetch_columns(p->w, row + ROWS, c, width);
                unpack(s[r].u, s[r].scale, s[r].offset, p->w, row, c, width);
            }
            for (int64_t t = 0; t < b->tokens; t++) {
                activations a = activations_at(p, b->first_token + t, c, group);
                if (rows == ROWS)
                    dot_vnni(lanes[t], s, &a, width, group, ROWS);
                else
                    for (int64_t r = 0; r < rows; r++)
                        dot_vnni(&lanes[t][r], &s[r], &a, width, group, 1);
            }
        }
        __mmask8 kept = (__mmask8)((1u << rows) - 1);
        for (int64_t t = 0; t < b->tokens; t++)
            _mm_mask_storeu_ps(p->y + (b->first_token + t) * p->y_stride + first, kept, totals(lanes[t]));
    }
}

DK_VNNI void dk_narrow_vnni(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    if (unpacker->group == 32)
        rows_vnni(p, b, dk_unpack_of(unpacker), 32);
    else
        rows_vnni(p, b, dk_unpack_of(unpacker), 16);
}

#endif

/* int8 products row by row, for few tokens: a slab of one row is unpacked to a cache-resident scratch and
 * multiplied with every token; rows are read in the order in which they lie in memory.
 *
 * Sixteen float lanes, twice (even and odd chunks of 64 columns): lane i of a chunk takes the dot product of
 * its elements 4i .. 4i + 3. AVX2 keeps the same lanes in halves.
 */

#include "products.h"

enum { CHUNK = 64, AHEAD = 4096 };

typedef struct {
    uint8_t u[DK_SLAB + CHUNK] DK_ALIGNED;
    float scale[DK_SLAB / 16 + 16] DK_ALIGNED;
    float offset[DK_SLAB / 16 + 16] DK_ALIGNED;
} slab;

/* What a token adds to a slab: pointers at its first column. */
typedef struct {
    const int8_t *q;
    const float *scale;
    const float *sums;   /* of the size of the weight's groups */
} activations;

DK_INLINE activations activations_at(const dk_product *p, int64_t token, int64_t column, int group)
{
    const dk_input *x = p->x;
    int64_t columns = p->w->columns;
    activations a = {x->q + token * columns + column, x->scale + (token * columns + column) / 32, NULL};
    a.sums = group == 32 ? x->sum32 + (token * columns + column) / 32 : x->sum16 + (token * columns + column) / 16;
    return a;
}

/* Unpack columns of a row, and ask for what comes `AHEAD` bytes later. */
DK_INLINE void fill(slab *s, dk_unpack_fn unpack, const dk_matrix *w, int64_t row, int64_t column, int64_t columns)
{
    int64_t first = column * w->row_bytes / w->columns, bytes = columns * w->row_bytes / w->columns;
    dk_prefetch(w->data + row * w->row_bytes + first + AHEAD, bytes);
    unpack(s->u, s->scale, s->offset, w, row, column, columns);
}

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
        for (int64_t c = 0; c < columns; c += DK_SLAB) {
            int64_t width = dk_min(DK_SLAB, columns - c);
            fill(&s, unpacker->scalar, p->w, p->first_row + r, c, width);
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

/* ---- AVX2: the lanes of an even or odd chunk are two registers ---- */

typedef struct {
    __m256 lanes[4];   /* even chunk low, high; odd chunk low, high */
} lanes_avx2;

/* Dot products of four, exact: products of one byte pair are at most 2 * 127 * 128 in each half of u. */
DK_AVX2 DK_INLINE __m256 fours_avx2(__m256i u, __m256i q)
{
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(0x7f);
    __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(u, low), q), ones);
    __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_andnot_si256(low, u), q), ones);
    return _mm256_cvtepi32_ps(_mm256_add_epi32(a, b));
}

/* Scale of each lane of 32 columns from column c on. */
DK_AVX2 DK_INLINE __m256 scales_avx2(const slab *s, const activations *a, int64_t c, int group)
{
    float x = a->scale[c / 32];
    if (group == 32)
        return _mm256_set1_ps(s->scale[c / 32] * x);
    __m128 low = _mm_set1_ps(s->scale[c / 16] * x), high = _mm_set1_ps(s->scale[c / 16 + 1] * x);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
}

/* Offsets of sixteen groups times the sums: lane i takes group i. */
DK_AVX2 DK_INLINE void offsets_avx2(lanes_avx2 *l, const float *offset, const float *sums, int64_t groups)
{
    for (int half = 0; half < 2; half++) {
        int64_t left = groups - 8 * half;
        __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)left), lane);
        l->lanes[half] = _mm256_fmadd_ps(_mm256_maskload_ps(offset + 8 * half, kept),
                                         _mm256_maskload_ps(sums + 8 * half, kept), l->lanes[half]);
    }
}

DK_AVX2 DK_INLINE void dot_avx2(lanes_avx2 *l, const slab *s, const activations *a, int64_t columns, int group)
{
    for (int64_t c = 0; c < columns; c += 16 * group)
        offsets_avx2(l, s->offset + c / group, a->sums + c / group, dk_min(16, (columns - c) / group));
    int64_t c = 0;
    for (; c + 128 <= columns; c += 128)
        for (int i = 0; i < 4; i++) {
            __m256 dot = fours_avx2(_mm256_load_si256((const __m256i *)(s->u + c + 32 * i)),
                                    _mm256_loadu_si256((const __m256i *)(a->q + c + 32 * i)));
            l->lanes[i] = _mm256_fmadd_ps(dot, scales_avx2(s, a, c + 32 * i, group), l->lanes[i]);
        }
    for (int i = 0; c < columns; c += 32, i++) {
        __m256 dot = fours_avx2(_mm256_load_si256((const __m256i *)(s->u + c)),
                                _mm256_loadu_si256((const __m256i *)(a->q + c)));
        l->lanes[i] = _mm256_fmadd_ps(dot, scales_avx2(s, a, c, group), l->lanes[i]);
    }
}

/* Sum of the sixteen lanes: halves, then quarters, and so on. */
DK_AVX2 DK_INLINE float total_avx2(const lanes_avx2 *l)
{
    __m256 eight = _mm256_add_ps(_mm256_add_ps(l->lanes[0], l->lanes[2]), _mm256_add_ps(l->lanes[1], l->lanes[3]));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

DK_AVX2 DK_INLINE void rows_avx2(const dk_product *p, const dk_block *b, dk_unpack_fn unpack, int group)
{
    int64_t columns = p->w->columns;
    slab s;
    lanes_avx2 lanes[DK_NARROW_TOKENS];
    for (int64_t r = b->first_row; r < b->first_row + b->rows; r++) {
        memset(lanes, 0, (size_t)b->tokens * sizeof *lanes);
        for (int64_t c = 0; c < columns; c += DK_SLAB) {
            int64_t width = dk_min(DK_SLAB, columns - c);
            fill(&s, unpack, p->w, p->first_row + r, c, width);
            for (int64_t t = 0; t < b->tokens; t++) {
                activations a = activations_at(p, b->first_token + t, c, group);
                lanes_avx2 own = lanes[t];
                dot_avx2(&own, &s, &a, width, group);
                lanes[t] = own;
            }
        }
        for (int64_t t = 0; t < b->tokens; t++)
            p->y[(b->first_token + t) * p->y_stride + r] = total_avx2(&lanes[t]);
    }
}

DK_AVX2 void dk_narrow_avx2(const dk_product *p, const dk_block *b)
{
    const dk_unpacker *unpacker = dk_unpacker_of(p->w->type);
    if (unpacker->group == 32)
        rows_avx2(p, b, dk_unpack_of(unpacker), 32);
    else
        rows_avx2(p, b, dk_unpack_of(unpacker), 16);
}

/* ---- AVX-512 with VNNI ---- */

typedef struct {
    __m512 even, odd;
} lanes_vnni;

/* Positions in a register of sixteen group scales for the lanes of chunk i. */
DK_VNNI DK_INLINE __m512i places_of_chunk(int i, int group)
{
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i place = group == 32 ? _mm512_srli_epi32(lane, 3) : _mm512_srli_epi32(lane, 2);
    return _mm512_add_epi32(place, _mm512_set1_epi32(i * CHUNK / group));
}

/* Sixteen groups or, of them, the first `groups`: `kept` has a bit for each. */
DK_VNNI DK_INLINE __m512 scales_vnni(const slab *s, const activations *a, int64_t c, int group, __mmask16 kept)
{
    __m512 w = _mm512_maskz_loadu_ps(kept, s->scale + c / group);
    if (group == 32)
        return _mm512_mul_ps(w, _mm512_maskz_loadu_ps(kept, a->scale + c / 32));
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __mmask16 halves = (__mmask16)_pext_u32(kept, 0x5555);
    __m512 x = _mm512_permutexvar_ps(twice, _mm512_maskz_loadu_ps(halves, a->scale + c / 32));
    return _mm512_mul_ps(w, x);
}

DK_VNNI DK_INLINE void dot_vnni(lanes_vnni *l, const slab *s, const activations *a, int64_t columns, int group)
{
    const int chunks = group / 4; /* in sixteen groups */
    int64_t c = 0;
    for (; c + 16 * group <= columns; c += 16 * group) {
        __m512 scales = scales_vnni(s, a, c, group, 0xffff);
        l->even = _mm512_fmadd_ps(_mm512_load_ps(s->offset + c / group), _mm512_loadu_ps(a->sums + c / group),
                                  l->even);
#pragma GCC unroll 8
        for (int i = 0; i < chunks; i++) {
            __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_load_si512(s->u + c + CHUNK * i),
                                              _mm512_loadu_si512(a->q + c + CHUNK * i));
            __m512 *lane = i & 1 ? &l->odd : &l->even;
            __m512 scale = _mm512_permutexvar_ps(places_of_chunk(i, group), scales);
            *lane = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *lane);
        }
    }
    if (c == columns)
        return;
    __mmask16 kept = (__mmask16)((1u << ((columns - c) / group)) - 1);
    __m512 scales = scales_vnni(s, a, c, group, kept);
    l->even = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(kept, s->offset + c / group),
                              _mm512_maskz_loadu_ps(kept, a->sums + c / group), l->even);
    for (int i = 0; c < columns; c += CHUNK, i++) {
        __mmask64 bytes = columns - c >= CHUNK ? ~(__mmask64)0 : (__mmask64)0xffffffff;
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_load_si512(s->u + c),
                                          _mm512_maskz_loadu_epi8(bytes, a->q + c));
        __m512 *lane = i & 1 ? &l->odd : &l->even;
        __m512 scale = _mm512_permutexvar_ps(places_of_chunk(i, group), scales);
        *lane = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *lane);
    }
}

DK_VNNI DK_INLINE float total_vnni(const lanes_vnni *l)
{
    __m512 sixteen = _mm512_add_ps(l->even, l->odd);
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps(sixteen, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

DK_VNNI DK_INLINE void rows_vnni(const dk_product *p, const dk_block *b, dk_unpack_fn unpack, int group)
{
    int64_t columns = p->w->columns;
    slab s;
    lanes_vnni lanes[DK_NARROW_TOKENS];
    for (int64_t r = b->first_row; r < b->first_row + b->rows; r++) {
        for (int64_t t = 0; t < b->tokens; t++)
            lanes[t].even = lanes[t].odd = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += DK_SLAB) {
            int64_t width = dk_min(DK_SLAB, columns - c);
            fill(&s, unpack, p->w, p->first_row + r, c, width);
            for (int64_t t = 0; t < b->tokens; t++) {
                activations a = activations_at(p, b->first_token + t, c, group);
                lanes_vnni own = lanes[t];
                dot_vnni(&own, &s, &a, width, group);
                lanes[t] = own;
            }
        }
        for (int64_t t = 0; t < b->tokens; t++)
            p->y[(b->first_token + t) * p->y_stride + r] = total_vnni(&lanes[t]);
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

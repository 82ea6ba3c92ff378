/* The best rows by score, without sorting.
 *
 * Scores are turned into integers of the same order. The smallest one that is taken is found by bisection:
 * each step counts how many are at least as large, which is one compare per vector. One last pass writes the
 * rows above it, and of those that equal it the lowest. */

#include "select_top.h"

typedef struct {
    int32_t low;    /* smallest and largest key */
    int32_t high;
} range_t;

enum { NOT_TAKEN = (int32_t)0x807fffff }; /* key of -inf */

/* Floats to integers of the same order, in place. */
DK_INLINE range_t make_keys(int32_t *restrict keys, int64_t count)
{
    range_t range = {INT32_MAX, INT32_MIN};
    for (int64_t i = 0; i < count; i++) {
        float score = dk_float_of_bits((uint32_t)keys[i]) + 0.0f; /* -0 becomes 0 */
        int32_t bits = (int32_t)dk_bits_of_float(score);
        int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
        key = (bits & 0x7fffffff) > 0x7f800000 ? NOT_TAKEN : key;
        keys[i] = key;
        range.low = key < range.low ? key : range.low;
        range.high = key > range.high ? key : range.high;
    }
    return range;
}

DK_INLINE int64_t count_from(const int32_t *keys, int64_t count, int32_t least)
{
    int64_t total = 0;
    for (int64_t from = 0; from < count; from += 1 << 20) {
        int64_t to = dk_min(from + (1 << 20), count);
        int32_t found = 0;
        for (int64_t i = from; i < to; i++)
            found += keys[i] >= least;
        total += found;
    }
    return total;
}

DK_INLINE uint32_t find_from(const int32_t *keys, int count, int32_t least)
{
    uint32_t found = 0;
    for (int i = 0; i < count; i++)
        found |= (uint32_t)(keys[i] >= least) << i;
    return found;
}

#define PASSES(level, attribute)                                                                            \
    static attribute range_t make_keys_##level(int32_t *keys, int64_t count)                               \
    {                                                                                                       \
        return make_keys(keys, count);                                                                      \
    }                                                                                                       \
    static attribute int64_t count_from_##level(const int32_t *keys, int64_t count, int32_t least)         \
    {                                                                                                       \
        return count_from(keys, count, least);                                                              \
    }

PASSES(scalar, )
#ifdef DK_X86
PASSES(avx2, DK_AVX2)
PASSES(avx512, DK_AVX512)
#endif

typedef struct {
    int32_t *ids;
    int64_t written;
    int64_t top;
    int64_t ties; /* rows that equal the least key and are still wanted */
} output_t;

/* Write rows whose bit is set. */
DK_INLINE void write_rows(output_t *output, const int32_t *keys, int64_t first, uint32_t found, int32_t least)
{
    for (; found != 0 && output->written < output->top; found &= found - 1) {
        int64_t row = first + __builtin_ctz(found);
        if (keys[row] == least && output->ties-- <= 0)
            continue;
        output->ids[output->written++] = (int32_t)row;
    }
}

static void take_scalar(output_t *output, const int32_t *keys, int64_t count, int32_t least)
{
    for (int64_t i = 0; i < count; i += 16)
        write_rows(output, keys, i, find_from(keys + i, (int)dk_min(16, count - i), least), least);
}

#ifdef DK_X86
static DK_AVX512 void take_avx512(output_t *output, const int32_t *keys, int64_t count, int32_t least)
{
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __mmask16 found = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + i), _mm512_set1_epi32(least));
        write_rows(output, keys, i, found, least);
    }
    if (i < count)
        write_rows(output, keys, i, find_from(keys + i, (int)(count - i), least), least);
}
#endif

void dk_select_top(int32_t *ids, float *scores, int64_t count, int64_t top)
{
    range_t (*make)(int32_t *, int64_t) = make_keys_scalar;
    int64_t (*count_at_least)(const int32_t *, int64_t, int32_t) = count_from_scalar;
    void (*take)(output_t *, const int32_t *, int64_t, int32_t) = take_scalar;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512) {
        make = make_keys_avx512;
        count_at_least = count_from_avx512;
        take = take_avx512;
    } else if (dk_level >= DK_LEVEL_AVX2) {
        make = make_keys_avx2;
        count_at_least = count_from_avx2;
    }
#endif
    if (top == 0)
        return;
    int32_t *keys = (int32_t *)scores; /* same size; keys are read and written as bits only */
    range_t range = make(keys, count);
    int64_t low = dk_max(range.low, (int64_t)NOT_TAKEN + 1), high = range.high;
    /* Invariant: fewer than `top` lie above `high`. `low` ends as the least key that is taken; when fewer
     * than `top` can be taken at all, it stays where it is. */
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        int64_t found = count_at_least(keys, count, (int32_t)middle);
        if (found >= top)
            low = middle;
        if (found == top)
            break;
        if (found < top)
            high = middle - 1;
    }
    output_t output = {ids, 0, top, 0};
    if (range.high > NOT_TAKEN) {
        output.ties = low == INT32_MAX ? top : top - count_at_least(keys, count, (int32_t)low + 1);
        take(&output, keys, count, (int32_t)low);
    }
    for (int64_t i = output.written; i < top; i++)
        ids[i] = -1;
}

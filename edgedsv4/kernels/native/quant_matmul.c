/* Products y = x W^T with stored weights: sharing out a list of them among the threads.
 *
 * Every product is cut into blocks of rows and tokens that take about the same time, whatever their type;
 * blocks are handed out one after another, so that threads read memory in order. The kernels are in
 * products_narrow.c and products_single.c (int8, few tokens), products_wide.c and products_amx.c (int8, many),
 * products_float.c and products_direct.c; which one runs depends on the product alone, never on the threads.
 */

#include "products.h"

/* Longest list that is shared out at once, and most tokens of the row-by-row form. */
enum { LIST = 256, FEW_TOKENS = 8 };

/* Reading, as one of many threads. */
static const double NS_PER_BYTE = 0.15;

typedef struct {
    dk_block_fn fn;
    int64_t rows, tokens;    /* of a block */
    int64_t across;          /* blocks of tokens */
    int64_t end;             /* tasks up to here, of the whole list */
} share;

typedef struct {
    const dk_product *list;
    int64_t count;
    share shares[LIST];
} job;

int dk_type_has_int8(int type) { return dk_unpacker_of(type) != NULL; }

#if defined(DK_X86)

/* The int8 forms of AVX2 and AVX-VNNI; AVX-512 without VNNI has none of its own. */
static double choose_256(share *s, int64_t *row_step, const dk_product *p, int is_small)
{
    double columns = (double)p->w->columns;
    int has_dot = dk_level == DK_LEVEL_AVX_VNNI;
    if (!is_small && p->tokens > FEW_TOKENS) {
        s->fn = has_dot ? dk_wide_avx_vnni : dk_wide_avx2;
        s->tokens = dk_min(p->tokens, DK_WIDE_TOKENS);
        *row_step = DK_WIDE_ROWS;
        return columns * (0.1 + 0.01 * (double)s->tokens);
    }
    s->tokens = dk_min(p->tokens, DK_NARROW_TOKENS);
    *row_step = DK_NARROW_ROWS;
    if (p->w->type == DK_IQ2_XXS) {
        s->fn = has_dot ? dk_iq2_xxs_avx_vnni : dk_iq2_xxs_avx2;
        return columns * (0.025 + 0.025 * (double)s->tokens);
    }
    if (dk_has_single_256(p)) {
        s->fn = has_dot ? dk_single_avx_vnni : dk_single_avx2;
        return columns * (0.015 + 0.02 * (double)s->tokens);
    }
    s->fn = has_dot ? dk_narrow_avx_vnni : dk_narrow_avx2;
    return columns * (0.035 + 0.04 * (double)s->tokens);
}

#endif

/* Choose kernel and step; returns nanoseconds of arithmetic per row and token block, roughly. */
static double arithmetic(share *s, int64_t *row_step, const dk_product *p, int is_small)
{
    double columns = (double)p->w->columns;
    int is_int8 = p->x->q != NULL && dk_unpacker_of(p->w->type) != NULL, is_vector = 0, has_vnni = 0;
#if defined(DK_X86)
    is_vector = dk_level >= DK_LEVEL_AVX2;
    has_vnni = dk_level >= DK_LEVEL_VNNI;
#endif
    double slow = is_vector ? 1.0 : 8.0;
    if (!is_int8) {
        s->fn = dk_float_scalar;
#if defined(DK_X86)
        if (dk_level >= DK_LEVEL_AVX512)
            s->fn = dk_has_direct(p) ? dk_direct_avx512 : dk_float_avx512;
        else if (is_vector)
            s->fn = dk_float_avx2;
#endif
        s->tokens = dk_min(p->tokens, DK_FLOAT_TOKENS);
        *row_step = DK_FLOAT_ROWS;
        return slow * columns * (0.15 + 0.022 * (double)s->tokens);
    }
#if defined(DK_X86)
    if (has_vnni && !is_small && p->tokens > FEW_TOKENS) {
        s->fn = dk_wide_vnni;
        s->tokens = dk_min(p->tokens, DK_WIDE_TOKENS);
        *row_step = DK_WIDE_ROWS;
#if defined(DK_TILES)
        if (dk_level >= DK_LEVEL_AMX) {
            s->fn = dk_wide_amx;
            return columns * (0.06 + 0.0035 * (double)s->tokens);
        }
#endif
        return columns * (0.06 + 0.006 * (double)s->tokens);
    }
#endif
    s->fn = dk_narrow_scalar;
#if defined(DK_X86)
    dk_block_fn single = dk_single_of(p);
    if (has_vnni)
        s->fn = single ? single : dk_narrow_vnni;
    else if (is_vector)
        return choose_256(s, row_step, p, is_small);
#elif defined(DK_NEON)
    if (dk_level == DK_LEVEL_NEON_DOT) {
        s->fn = dk_narrow_neon_dot;
        slow = 3.0;
    }
#endif
    (void)is_small;
    (void)has_vnni;
    s->tokens = dk_min(p->tokens, DK_NARROW_TOKENS);
    *row_step = DK_NARROW_ROWS;
    return slow * columns * (0.025 + 0.013 * (double)s->tokens);
}

/* The same, or the time of reading the row where that is more. */
static double choose(share *s, int64_t *row_step, const dk_product *p, int is_small)
{
    double cost = arithmetic(s, row_step, p, is_small), reading = NS_PER_BYTE * (double)p->w->row_bytes;
    return cost > reading ? cost : reading;
}

dk_kernel dk_kernel_of(const dk_product *p, int is_small)
{
    share s;
    int64_t row_step;
    double cost = choose(&s, &row_step, p, is_small);
    return (dk_kernel){s.fn, cost};
}

static void run_block(void *arg, int64_t task)
{
    const job *j = arg;
    int64_t low = 0, high = j->count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (task < j->shares[middle].end)
            high = middle;
        else
            low = middle + 1;
    }
    const share *s = &j->shares[low];
    const dk_product *p = &j->list[low];
    int64_t place = task - (low ? s[-1].end : 0), row = place / s->across * s->rows;
    int64_t token = place % s->across * s->tokens;
    dk_block b = {row, dk_min(s->rows, p->rows - row), token, dk_min(s->tokens, p->tokens - token)};
    s->fn(p, &b);
}

/* Rows of a block that takes about `target` ns: whole steps, but where one takes longer, the long float32 rows of
 * few tokens are cut, which does not change their sums: 24 rows of 64 KB are more than three threads' work. */
static int64_t rows_of_block(const dk_product *p, double cost, int64_t step, double target)
{
    if (step == DK_FLOAT_ROWS && p->tokens <= DK_DIRECT_TOKENS && cost * (double)step > target)
        return dk_max(1, (int64_t)(target / cost));
    return step * dk_max(1, (int64_t)(target / (cost * (double)step + 1.0)));
}

static int run_list(dk_run *run, const dk_product *list, int64_t count)
{
    job j = {.list = list, .count = count};
    int64_t steps[LIST], tasks = 0;
    double costs[LIST], total = 0.0;
    for (int64_t i = 0; i < count; i++) {
        share *s = &j.shares[i];
        costs[i] = choose(s, &steps[i], &list[i], run->is_small);
        s->across = s->tokens ? (list[i].tokens + s->tokens - 1) / s->tokens : 0;
        total += costs[i] * (double)(list[i].rows * s->across);
    }
    double target = total / (8.0 * (double)run->threads);
    target = target < 10e3 ? 10e3 : target > 1e6 ? 1e6 : target;
    for (int64_t i = 0; i < count; i++) {
        share *s = &j.shares[i];
        s->rows = rows_of_block(&list[i], costs[i], steps[i], target);
        tasks += (list[i].rows + s->rows - 1) / s->rows * s->across;
        s->end = tasks;
    }
    return tasks ? dk_parallel(run, tasks, run_block, &j) : 0;
}

int dk_products(dk_run *run, const dk_product *list, int64_t count)
{
    for (int64_t first = 0; first < count; first += LIST) {
        int stopped = run_list(run, list + first, dk_min(LIST, count - first));
        if (stopped)
            return stopped;
    }
    return 0;
}

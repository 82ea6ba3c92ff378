/* The experts of a chunk: tokens gathered by expert, all products of a kind in one list, sums by slot.
 *
 * A pair is one token in one of its slots. Pairs are grouped by expert; a single token needs no
 * gathering, its slots are the groups. A slot without an expert has no row. Whatever the grouping, a
 * pair's row goes through the same operations, and a token adds its slots in their order, then the shared
 * expert. So the experts may come in parts, each as its weights arrive: a part has the rows after those of
 * the parts before it. */

#include "expert_ffn.h"

enum { ROWS_PER_TASK = 16 };

static int64_t lay_out(dk_expert_work *w, const dk_experts *experts, int64_t tokens, uintptr_t base)
{
    uintptr_t at = base;
    int64_t pairs = tokens * experts->k, used = dk_min(pairs, experts->experts);
    int64_t hidden = experts->hidden, width = experts->width, shared = experts->shared_width;
    memset(w, 0, sizeof *w);
    w->experts = experts;
    w->tokens = tokens;
    w->pairs = pairs;
    w->groups = dk_take(&at, dk_max(used, experts->k) * (int64_t)sizeof(dk_pair_group));
    w->next = dk_take(&at, (experts->experts + 1) * 4);
    w->row = dk_take(&at, pairs * 4);
    w->token = dk_take(&at, pairs * 4);
    if (tokens > 1) {
        w->gathered_q = dk_take(&at, pairs * hidden);
        w->gathered_scale = dk_take(&at, pairs * (hidden / 32) * 4);
        w->gathered_sum32 = dk_take(&at, pairs * (hidden / 32) * 4);
        w->gathered_sum16 = dk_take(&at, pairs * (hidden / 16) * 4);
    }
    w->gate = dk_take(&at, pairs * width * 4);
    w->up = dk_take(&at, pairs * width * 4);
    w->hidden_memory = dk_take(&at, dk_quantized_bytes(pairs, width));
    w->y = dk_take(&at, pairs * hidden * 4);
    w->gathered_x = w->y;
    w->shared_gate = dk_take(&at, tokens * shared * 4);
    w->shared_up = dk_take(&at, tokens * shared * 4);
    w->shared_memory = dk_take(&at, dk_quantized_bytes(tokens, shared));
    w->shared_y = dk_take(&at, shared ? tokens * hidden * 4 : 0);
    w->inputs = dk_take(&at, (dk_max(used, experts->k) + 1) * (int64_t)sizeof(dk_input));
    w->list = dk_take(&at, 2 * (dk_max(used, experts->k) + 1) * (int64_t)sizeof(dk_product));
    w->pieces = dk_take(&at, (dk_max(used, experts->k) + 1) * (int64_t)sizeof(dk_expert_piece));
    return (int64_t)(at - base);
}

int64_t dk_experts_scratch_bytes(const dk_experts *experts, int64_t tokens)
{
    dk_expert_work w;
    return lay_out(&w, experts, tokens, 0);
}

/* Which rows belong to which expert of a part: in order of slot for one token, else by expert. Slots of other
 * parts stay as they are. */
static void group_pairs(dk_expert_work *w, const int32_t *ids, const uint8_t *chosen)
{
    int64_t k = w->experts->k, experts = w->experts->experts;
    if (w->tokens == 1) {
        for (int32_t slot = 0; slot < k; slot++) {
            if (ids[slot] < 0)
                w->row[slot] = -1;
            if (ids[slot] < 0 || (chosen && !chosen[ids[slot]]))
                continue;
            w->row[slot] = (int32_t)(w->first + w->rows++);
            w->groups[w->group_count++] = (dk_pair_group){ids[slot], w->row[slot], 1};
        }
        return;
    }
    memset(w->next, 0, (size_t)(experts + 1) * 4);
    for (int64_t pair = 0; pair < w->pairs; pair++)
        if (ids[pair] >= 0)
            w->next[ids[pair] + 1]++;
    int32_t row = (int32_t)w->first;
    for (int64_t expert = 0; expert < experts; expert++) {
        int32_t count = w->next[expert + 1];
        w->next[expert] = row;
        if (count == 0 || (chosen && !chosen[expert]))
            continue;
        w->groups[w->group_count++] = (dk_pair_group){(int32_t)expert, row, count};
        row += count;
    }
    w->rows = row - w->first;
    for (int64_t pair = 0; pair < w->pairs; pair++) {
        if (ids[pair] < 0)
            w->row[pair] = -1;
        if (ids[pair] < 0 || (chosen && !chosen[ids[pair]]))
            continue;
        row = w->next[ids[pair]]++;
        w->row[pair] = row;
        w->token[row] = (int32_t)(pair / k);
    }
}

/* Whether some used expert's matrix has an int8 form, and whether some has none. */
static void look_at_types(const dk_expert_work *w, int which, int *some, int *none)
{
    for (int64_t g = 0; g < w->group_count; g++) {
        int has = dk_type_has_int8(dk_expert_matrix(w, w->groups[g].expert, which)->type);
        *some |= has;
        *none |= !has;
    }
}

static void gather_rows(void *arg, int64_t task)
{
    dk_expert_work *w = arg;
    int64_t n = w->experts->hidden, n32 = n / 32, n16 = n / 16;
    int64_t last = w->first + dk_min((task + 1) * ROWS_PER_TASK, w->rows);
    const dk_input *x = w->x;
    for (int64_t row = w->first + task * ROWS_PER_TASK; row < last; row++) {
        int64_t token = w->token[row];
        if (w->takes_x)
            memcpy(w->gathered_x + row * n, x->x + token * x->stride, (size_t)n * 4);
        if (!w->takes_q)
            continue;
        memcpy(w->gathered_q + row * n, x->q + token * n, (size_t)n);
        memcpy(w->gathered_scale + row * n32, x->scale + token * n32, (size_t)n32 * 4);
        memcpy(w->gathered_sum32 + row * n32, x->sum32 + token * n32, (size_t)n32 * 4);
        memcpy(w->gathered_sum16 + row * n16, x->sum16 + token * n16, (size_t)n16 * 4);
    }
}

static int gather(dk_run *run, dk_expert_work *w)
{
    int some = 0, none = 0;
    w->gathered = *w->x;
    if (w->tokens == 1)
        return 0;
    look_at_types(w, 0, &some, &none);
    look_at_types(w, 1, &some, &none);
    w->takes_q = w->x->q && some;
    w->takes_x = none || !w->takes_q;
    w->gathered = (dk_input){.x = w->gathered_x, .stride = w->experts->hidden};
    if (w->takes_q) {
        w->gathered.q = w->gathered_q;
        w->gathered.scale = w->gathered_scale;
        w->gathered.sum32 = w->gathered_sum32;
        w->gathered.sum16 = w->gathered_sum16;
    }
    return dk_parallel(run, (w->rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, gather_rows, w);
}

/* Gate and up products of all groups, and of the shared expert. */
static int multiply_in(dk_run *run, dk_expert_work *w, int has_shared)
{
    const dk_experts *e = w->experts;
    int64_t count = 0;
    for (int64_t g = 0; g < w->group_count; g++) {
        dk_pair_group at = w->groups[g];
        w->inputs[g] = w->tokens == 1 ? *w->x : dk_rows_of_input(&w->gathered, at.first, e->hidden);
        float *gate = w->gate + at.first * e->width, *up = w->up + at.first * e->width;
        w->list[count++] = dk_product_of(gate, e->width, dk_expert_matrix(w, at.expert, 0), &w->inputs[g], at.count);
        w->list[count++] = dk_product_of(up, e->width, dk_expert_matrix(w, at.expert, 1), &w->inputs[g], at.count);
    }
    if (has_shared) {
        w->list[count++] = dk_product_of(w->shared_gate, e->shared_width, &e->shared[0], w->x, w->tokens);
        w->list[count++] = dk_product_of(w->shared_up, e->shared_width, &e->shared[1], w->x, w->tokens);
    }
    return dk_products(run, w->list, count);
}

/* Down products of all groups, whose hidden rows begin at the part's, and of the shared expert. */
static int multiply_out(dk_run *run, dk_expert_work *w, const dk_input *hidden, const dk_input *shared)
{
    const dk_experts *e = w->experts;
    int64_t count = 0;
    for (int64_t g = 0; g < w->group_count; g++) {
        dk_pair_group at = w->groups[g];
        w->inputs[g] = dk_rows_of_input(hidden, at.first - w->first, e->width);
        float *y = w->y + at.first * e->hidden;
        w->list[count++] = dk_product_of(y, e->hidden, dk_expert_matrix(w, at.expert, 2), &w->inputs[g], at.count);
    }
    if (shared)
        w->list[count++] = dk_product_of(w->shared_y, e->hidden, &e->shared[2], shared, w->tokens);
    return dk_products(run, w->list, count);
}

void dk_add_slots(const dk_expert_work *w, int64_t token, int64_t first, int64_t count)
{
    int64_t n = w->experts->hidden, k = w->experts->k;
    float *out = w->out + token * n + first;
    int is_first = 1;
    for (int64_t slot = 0; slot < k; slot++) {
        int64_t row = w->row[token * k + slot];
        if (row < 0)
            continue;
        float weight = w->weights[token * k + slot];
        const float *y = w->y + row * n + first;
        for (int64_t i = 0; i < count && is_first; i++)
            out[i] = weight * y[i];
        for (int64_t i = 0; i < count && !is_first; i++)
            out[i] += weight * y[i];
        is_first = 0;
    }
    if (is_first)
        memset(out, 0, (size_t)count * 4);
    const float *shared = w->shared_y + token * n + first;
    for (int64_t i = 0; i < count && w->experts->shared; i++)
        out[i] += shared[i];
}

static void add_slots(void *arg, int64_t task)
{
    const dk_expert_work *w = arg;
    int64_t last = dk_min((task + 1) * ROWS_PER_TASK, w->tokens);
    for (int64_t token = task * ROWS_PER_TASK; token < last; token++)
        dk_add_slots(w, token, 0, w->experts->hidden);
}

/* What lies between the two products of the shared expert. */
static int activate_shared(dk_run *run, dk_expert_work *w, dk_input *shared)
{
    const dk_experts *e = w->experts;
    int64_t count = w->tokens * e->shared_width;
    *shared = (dk_input){.x = w->shared_gate, .stride = e->shared_width};
    if (dk_swiglu(run, w->shared_gate, w->shared_gate, w->shared_up, count, e->shared_limit))
        return 1;
    return e->has_int8 && dk_type_has_int8(e->shared[2].type) &&
           dk_quantize_rows(run, shared, w->shared_memory, w->tokens, e->shared_width);
}

int dk_expert_part(dk_run *run, int64_t *row, const dk_input *x, const int32_t *ids, const uint8_t *chosen,
                   const dk_experts *experts, int64_t tokens, int32_t has_shared, void *scratch)
{
    dk_expert_work w;
    int some = 0, none = 0;
    lay_out(&w, experts, tokens, (uintptr_t)scratch);
    w.x = x;
    w.first = *row;
    has_shared = has_shared && experts->shared;
    group_pairs(&w, ids, chosen);
    float *gate = w.gate + w.first * experts->width, *up = w.up + w.first * experts->width;
    if (gather(run, &w) || multiply_in(run, &w, has_shared))
        return 1;
    if (dk_swiglu(run, gate, gate, up, w.rows * experts->width, experts->limit))
        return 1;
    dk_input hidden = {.x = gate, .stride = experts->width}, shared;
    look_at_types(&w, 2, &some, &none);
    if (some && experts->has_int8 && dk_quantize_rows(run, &hidden, w.hidden_memory, w.rows, experts->width))
        return 1;
    if (has_shared && activate_shared(run, &w, &shared))
        return 1;
    *row += w.rows;
    return multiply_out(run, &w, &hidden, has_shared ? &shared : NULL);
}

int dk_expert_sum(dk_run *run, float *out, const float *weights, const dk_experts *experts, int64_t tokens,
                  void *scratch)
{
    dk_expert_work w;
    lay_out(&w, experts, tokens, (uintptr_t)scratch);
    w.weights = weights;
    w.out = out;
    return dk_parallel(run, (tokens + ROWS_PER_TASK - 1) / ROWS_PER_TASK, add_slots, &w);
}

int dk_expert_ffn(dk_run *run, float *out, const dk_input *x, const int32_t *ids, const float *weights,
                  const dk_experts *experts, int64_t tokens, void *scratch)
{
    if (tokens > 0 && tokens <= DK_FEW_EXPERT_TOKENS) {
        dk_expert_work w;
        lay_out(&w, experts, tokens, (uintptr_t)scratch);
        w.x = x;
        w.weights = weights;
        w.out = out;
        group_pairs(&w, ids, NULL);
        return gather(run, &w) || dk_experts_of_few(run, &w);
    }
    int64_t row = 0;
    return dk_expert_part(run, &row, x, ids, NULL, experts, tokens, 1, scratch) ||
           dk_expert_sum(run, out, weights, experts, tokens, scratch);
}

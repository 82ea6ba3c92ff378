/* The experts of few tokens in two pieces of work, since waiting for all threads costs as much as a small product.
 *
 * First, in tasks of some rows of one expert: gate and up products, SwiGLU, rounding to int8. Then, in tasks of some
 * rows of the output: the down products of all experts and the sum over slots. Every number is computed as in
 * expert_ffn.c, so it has the same bits. */

#include "expert_ffn.h"
#include "products.h"

enum { GROUP = 32, ROWS_STEP = 16, TASKS_PER_THREAD = 8 };
static const double LEAST_NS = 10e3, MOST_NS = 1e6;

typedef struct {
    dk_expert_work *w;
    dk_expert_piece *pieces; /* the shared expert is the last one */
    int64_t count;
    int64_t rows; /* of the output, per task */
} few;

/* Rows of a task, a multiple of `step`, of work that takes `total` ns in all and `row` ns per row. */
static int64_t rows_of_task(const dk_run *run, double total, double row, int64_t step)
{
    double target = total / (TASKS_PER_THREAD * (double)run->threads);
    target = target < LEAST_NS ? LEAST_NS : target > MOST_NS ? MOST_NS : target;
    return step * dk_max(1, (int64_t)(target / (row * (double)step + 1.0)));
}

/* ---- gate, up, SwiGLU, rounding ---- */

static void multiply_in(void *arg, int64_t task)
{
    const few *f = arg;
    const dk_expert_piece *p = f->pieces;
    int64_t start = 0;
    for (; task >= p->end; p++)
        start = p->end;
    int64_t first = (task - start) * p->rows, rows = dk_min(p->rows, p->width - first);
    dk_block b = {first, rows, 0, p->count};
    p->gate_kernel.fn(&p->gate, &b);
    p->up_kernel.fn(&p->up, &b);
    for (int64_t t = 0; t < p->count; t++) {
        float *gate = p->gate.y + t * p->width + first;
        dk_swiglu_part(gate, gate, p->up.y + t * p->width + first, rows, p->limit);
        if (p->hidden.q)
            dk_quantize_columns(&p->hidden, t, p->width, first, rows);
    }
}

/* An expert's products, but for their places among the tasks. */
static void describe(dk_run *run, few *f, const dk_matrix *three, dk_expert_piece piece)
{
    dk_expert_piece *p = &f->pieces[f->count++];
    *p = piece;
    p->gate = dk_product_of(p->gate_rows, p->width, &three[0], &p->x, p->count);
    p->up = dk_product_of(p->up_rows, p->width, &three[1], &p->x, p->count);
    p->down = dk_product_of(p->y, f->w->experts->hidden, &three[2], &p->hidden, p->count);
    p->gate_kernel = dk_kernel_of(&p->gate, run->is_small);
    p->up_kernel = dk_kernel_of(&p->up, run->is_small);
    p->down_kernel = dk_kernel_of(&p->down, run->is_small);
}

/* The input of the down products of rows [first, first + count) of the hidden activations. */
static dk_input hidden_rows(const float *x, dk_input *all, int64_t first, int64_t width, int is_int8)
{
    dk_input rows = is_int8 ? dk_rows_of_input(all, first, width) : (dk_input){.stride = width};
    rows.x = x + first * width;
    return rows;
}

static void describe_all(dk_run *run, few *f)
{
    dk_expert_work *w = f->w;
    const dk_experts *e = w->experts;
    dk_input hidden = {.x = w->gate, .stride = e->width}, shared = {.x = w->shared_gate, .stride = e->shared_width};
    int is_int8 = 0;
    for (int64_t g = 0; g < w->group_count; g++)
        is_int8 |= e->has_int8 && dk_type_has_int8(dk_expert_matrix(w, w->groups[g].expert, 2)->type);
    if (is_int8)
        dk_place_quantized(&hidden, w->hidden_memory, w->rows, e->width);
    for (int64_t g = 0; g < w->group_count; g++) {
        dk_pair_group at = w->groups[g];
        dk_expert_piece piece = {.count = at.count, .width = e->width, .limit = e->limit};
        piece.x = w->tokens == 1 ? *w->x : dk_rows_of_input(&w->gathered, at.first, e->hidden);
        piece.gate_rows = w->gate + at.first * e->width;
        piece.up_rows = w->up + at.first * e->width;
        piece.y = w->y + at.first * e->hidden;
        piece.hidden = hidden_rows(w->gate, &hidden, at.first, e->width, is_int8);
        describe(run, f, dk_expert_matrix(w, at.expert, 0), piece);
    }
    if (!e->shared)
        return;
    is_int8 = e->has_int8 && dk_type_has_int8(e->shared[2].type);
    if (is_int8)
        dk_place_quantized(&shared, w->shared_memory, w->tokens, e->shared_width);
    dk_expert_piece piece = {.count = w->tokens, .width = e->shared_width, .limit = e->shared_limit, .x = *w->x};
    piece.gate_rows = w->shared_gate;
    piece.up_rows = w->shared_up;
    piece.y = w->shared_y;
    piece.hidden = hidden_rows(w->shared_gate, &shared, 0, e->shared_width, is_int8);
    describe(run, f, e->shared, piece);
}

/* Share out the first piece of work; returns its tasks. */
static int64_t place_rows(const dk_run *run, few *f)
{
    double total = 0.0;
    int64_t tasks = 0;
    for (int64_t i = 0; i < f->count; i++) {
        const dk_expert_piece *p = &f->pieces[i];
        total += (p->gate_kernel.cost + p->up_kernel.cost) * (double)p->width;
    }
    for (int64_t i = 0; i < f->count; i++) {
        dk_expert_piece *p = &f->pieces[i];
        p->rows = rows_of_task(run, total, p->gate_kernel.cost + p->up_kernel.cost, GROUP);
        tasks += dk_parts(p->width, p->rows);
        p->end = tasks;
    }
    return tasks;
}

/* ---- down, sum over slots ---- */

static void multiply_out(void *arg, int64_t task)
{
    const few *f = arg;
    int64_t first = task * f->rows, rows = dk_min(f->rows, f->w->experts->hidden - first);
    for (int64_t i = 0; i < f->count; i++) {
        const dk_expert_piece *p = &f->pieces[i];
        dk_block b = {first, rows, 0, p->count};
        p->down_kernel.fn(&p->down, &b);
    }
    for (int64_t token = 0; token < f->w->tokens; token++)
        dk_add_slots(f->w, token, first, rows);
}

int dk_experts_of_few(dk_run *run, dk_expert_work *w)
{
    few f = {.w = w, .pieces = w->pieces};
    describe_all(run, &f);
    if (dk_parallel(run, place_rows(run, &f), multiply_in, &f))
        return 1;
    double row = 0.0;
    for (int64_t i = 0; i < f.count; i++)
        row += f.pieces[i].down_kernel.cost;
    int64_t hidden = w->experts->hidden;
    f.rows = rows_of_task(run, row * (double)hidden, row, ROWS_STEP);
    return dk_parallel(run, dk_parts(hidden, f.rows), multiply_out, &f);
}

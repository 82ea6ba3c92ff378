/* Into the layers and out of them: embedding, the draft block's entrance, the output head. */

#include "native.h"
#include "layer.h"

static void lay_out(dk_buffers *b, const dk_run *run, const dk_network *network, const dk_step *step)
{
    dk_lay_out(b, network, step->tokens, step->keys, step->staged_bytes, run->threads, step->workspace);
}

static void make_tables(const dk_network *network, const dk_step *step, dk_buffers *b)
{
    for (int table = 0; table < 2; table++)
        if (network->frequencies[table])
            dk_rope_table(b->cosines[table], b->sines[table], step->start, 1, step->tokens,
                          network->frequencies[table], network->rope_half);
}

int dk_begin(dk_run *run, const dk_network *network, dk_step *step)
{
    dk_buffers b;
    int64_t n = network->hidden;
    lay_out(&b, run, network, step);
    step->layer = 0;
    dk_enter_layer(step);
    make_tables(network, step, &b);
    if (dk_embed(run, b.x, &network->embed, step->token_ids, step->tokens))
        return 1;
    for (int64_t row = 0; row < 4 * step->tokens; row++)
        memcpy(step->streams + row * n, b.x + row / 4 * n, (size_t)n * 4);
    return 0;
}

/* y = w . norm(x) of each row. */
static int project(dk_run *run, const dk_network *network, float *y, float *x, const float *norm,
                   const dk_matrix *w, int64_t rows, void *memory)
{
    int64_t n = network->hidden;
    int rounds = network->has_int8 && dk_type_has_int8(w->type);
    dk_input input;
    if (dk_rms_norm(run, x, x, norm, rows, n, network->norm_eps) ||
        dk_make_input(run, &input, x, n, rows, memory, rounds))
        return 1;
    dk_product product = dk_product_of(y, n, w, &input, rows);
    return dk_products(run, &product, 1);
}

int dk_begin_draft(dk_run *run, const dk_network *network, const dk_draft *draft, dk_step *step,
                   const float *streams)
{
    dk_buffers b;
    int64_t n = network->hidden, t = step->tokens;
    lay_out(&b, run, network, step);
    step->layer = 0;
    dk_enter_layer(step);
    make_tables(network, step, &b);
    memcpy(b.stream_rows, streams, (size_t)(4 * t * n) * 4);
    if (dk_embed(run, b.token_rows, &network->embed, step->token_ids, t) ||
        project(run, network, b.token_out, b.token_rows, draft->token_norm, &draft->token_projection, t,
                b.token_memory) ||
        project(run, network, step->streams, b.stream_rows, draft->stream_norm, &draft->stream_projection,
                4 * t, b.stream_memory))
        return 1;
    for (int64_t row = 0; row < 4 * t; row++)
        for (int64_t i = 0; i < n; i++)
            step->streams[row * n + i] += b.token_out[row / 4 * n + i];
    return 0;
}

int dk_head(dk_run *run, const dk_network *network, const dk_hyper *hyper, const dk_step *step, float *logits,
            int64_t first, int64_t count)
{
    dk_buffers b;
    int64_t n = network->hidden;
    const dk_matrix *head = &network->head;
    lay_out(&b, run, network, step);
    dk_input streams = {.x = step->streams + first * 4 * n, .stride = 4 * n}, x;
    dk_product mix = dk_product_of(b.mix, 4, &hyper->fn, &streams, count);
    if (dk_products(run, &mix, 1) ||
        dk_hyper_head(run, b.x, streams.x, b.mix, hyper->base, hyper->scale, hyper->norm, count, n,
                      network->hc_eps, network->norm_eps) ||
        dk_make_input(run, &x, b.x, n, count, b.x_memory, network->has_int8 && dk_type_has_int8(head->type)))
        return 1;
    dk_product product = dk_product_of(logits, head->rows, head, &x, count);
    return dk_products(run, &product, 1);
}

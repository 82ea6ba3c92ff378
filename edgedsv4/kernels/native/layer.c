/* The layers of a chunk, one after another, with pauses where Python wants to look or must fetch experts.
 *
 * A layer has three parts; dk_step says which comes next, so a call goes on where the last one paused.
 * New rows of the rings wait in the working memory until dk_commit: a chunk that fails changes nothing. */

#include "native.h"
#include "layer.h"

static int64_t aligned(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

static int64_t raw_width(const dk_compressor *c) { return 2 * (int64_t)c->series * c->width; }

static int64_t window_bytes(const dk_layer_state *s)
{
    return aligned(s->ring.data_stride) + aligned(s->ring.scale_stride);
}

static int64_t raw_bytes(const dk_compressor *c) { return c->ring ? aligned(4 * raw_width(c)) : 0; }

int64_t dk_stage(dk_layer_state *states, int64_t count)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        dk_layer_state *s = &states[i];
        s->staged = bytes;
        bytes += window_bytes(s) + raw_bytes(&s->compressor) + raw_bytes(&s->indexer);
    }
    return bytes;
}

dk_rows dk_staged_window(const dk_layer_state *state, const dk_step *step)
{
    dk_rows rows = state->ring;
    rows.data = step->workspace + state->staged * step->tokens;
    rows.scales = rows.format ? rows.data + aligned(rows.data_stride) * step->tokens : NULL;
    return rows;
}

dk_compressor dk_staged_compressor(const dk_layer_state *state, const dk_step *step)
{
    dk_compressor c = state->compressor;
    c.staged = (float *)(step->workspace + (state->staged + window_bytes(state)) * step->tokens);
    return c;
}

dk_compressor dk_staged_indexer(const dk_layer_state *state, const dk_step *step)
{
    dk_compressor c = state->indexer;
    int64_t before = state->staged + window_bytes(state) + raw_bytes(&state->compressor);
    c.staged = (float *)(step->workspace + before * step->tokens);
    return c;
}

static void commit_raw(const dk_compressor *c, const dk_step *step)
{
    int32_t width = (int32_t)raw_width(c);
    dk_rows ring = {.data = (uint8_t *)c->ring, .data_stride = 4 * (int64_t)width, .width = width};
    dk_rows staged = ring;
    staged.data = (uint8_t *)c->staged;
    dk_ring_commit(&ring, c->slots, &staged, step->start, step->tokens);
}

void dk_commit(const dk_layer_state *states, int64_t count, const dk_step *step)
{
    for (int64_t i = 0; i < count; i++) {
        const dk_layer_state *s = &states[i];
        dk_rows window = dk_staged_window(s, step);
        dk_compressor compressor = dk_staged_compressor(s, step), indexer = dk_staged_indexer(s, step);
        dk_ring_commit(&s->ring, s->slots, &window, step->start, step->tokens);
        if (compressor.ring)
            commit_raw(&compressor, step);
        if (indexer.ring)
            commit_raw(&indexer, step);
    }
}

/* Each part has its place after the shared one; returns its end. */
static uintptr_t attention_part(dk_buffers *b, const dk_network *n, int64_t t, int64_t keys, int32_t threads,
                                uintptr_t at)
{
    int64_t heads = n->heads * n->head_dim, grouped = n->groups * n->group_rank;
    b->qr = dk_take(&at, t * n->q_rank * 4);
    b->qr_memory = dk_take(&at, dk_quantized_bytes(t, n->q_rank));
    b->q = dk_take(&at, t * heads * 4);
    b->attended = dk_take(&at, t * heads * 4);
    b->attended_memory = dk_take(&at, n->groups * aligned(dk_quantized_bytes(t, heads / n->groups)));
    b->inputs = dk_take(&at, n->groups * (int64_t)sizeof(dk_input));
    b->list = dk_take(&at, n->groups * (int64_t)sizeof(dk_product));
    b->kv = dk_take(&at, t * n->head_dim * 4);
    b->grouped = dk_take(&at, t * grouped * 4);
    b->grouped_memory = dk_take(&at, dk_quantized_bytes(t, grouped));
    if (n->index_heads) {
        b->index_q = dk_take(&at, t * n->index_heads * n->index_dim * 4);
        b->index_weights = dk_take(&at, t * n->index_heads * 4);
    }
    if (n->index_heads && keys > n->top) {
        b->selected = dk_take(&at, t * n->top * 4);
        b->index_scratch =
            dk_take(&at, dk_index_scratch_bytes(keys, n->index_heads, n->index_dim, threads));
    }
    return at;
}

static uintptr_t experts_part(dk_buffers *b, const dk_network *n, int64_t t, uintptr_t at)
{
    b->logits = dk_take(&at, t * n->experts.experts * 4);
    b->ids = dk_take(&at, t * n->experts.k * 4);
    b->weights = dk_take(&at, t * n->experts.k * 4);
    b->expert_scratch = (void *)at;
    return at + (uintptr_t)dk_experts_scratch_bytes(&n->experts, t);
}

static uintptr_t draft_part(dk_buffers *b, const dk_network *n, int64_t t, uintptr_t at)
{
    b->token_rows = dk_take(&at, t * n->hidden * 4);
    b->token_out = dk_take(&at, t * n->hidden * 4);
    b->token_memory = dk_take(&at, dk_quantized_bytes(t, n->hidden));
    b->stream_rows = dk_take(&at, 4 * t * n->hidden * 4);
    b->stream_memory = dk_take(&at, dk_quantized_bytes(4 * t, n->hidden));
    return at;
}

void dk_lay_out(dk_buffers *b, const dk_network *n, int64_t tokens, int64_t keys, int64_t staged_bytes,
                int32_t threads, uint8_t *base)
{
    uintptr_t at = (uintptr_t)base;
    memset(b, 0, sizeof *b);
    b->staged = dk_take(&at, staged_bytes * tokens);
    for (int table = 0; table < 2; table++) {
        b->cosines[table] = dk_take(&at, tokens * n->rope_half * 4);
        b->sines[table] = dk_take(&at, tokens * n->rope_half * 4);
    }
    b->mix = dk_take(&at, tokens * 24 * 4);
    b->post = dk_take(&at, tokens * 4 * 4);
    b->comb = dk_take(&at, tokens * 16 * 4);
    b->x = dk_take(&at, tokens * n->hidden * 4);
    b->x_memory = dk_take(&at, dk_quantized_bytes(tokens, n->hidden));
    b->out = dk_take(&at, tokens * n->hidden * 4);
    uintptr_t attention = attention_part(b, n, tokens, keys, threads, at);
    uintptr_t experts = experts_part(b, n, tokens, at);
    uintptr_t draft = draft_part(b, n, tokens, at);
    uintptr_t end = attention > experts ? attention : experts;
    b->bytes = (int64_t)((end > draft ? end : draft) - (uintptr_t)base);
}

int64_t dk_workspace_bytes(const dk_network *network, int64_t tokens, int64_t keys, int64_t staged_bytes,
                           int32_t threads)
{
    dk_buffers b;
    dk_lay_out(&b, network, tokens, keys, staged_bytes, threads, NULL);
    return b.bytes;
}

int dk_make_input(dk_run *run, dk_input *input, const float *x, int64_t columns, int64_t tokens, void *memory,
                  int has_int8)
{
    *input = (dk_input){.x = x, .stride = columns};
    return has_int8 ? dk_quantize_rows(run, input, memory, tokens, columns) : 0;
}

int dk_read_streams(dk_run *run, const dk_network *network, const dk_hyper *hyper, const dk_step *step,
                    dk_buffers *b)
{
    dk_input streams = {.x = step->streams, .stride = 4 * network->hidden};
    dk_product product = dk_product_of(b->mix, 24, &hyper->fn, &streams, step->tokens);
    if (dk_products(run, &product, 1))
        return 1;
    return dk_hyper_read(run, b->x, b->post, b->comb, step->streams, b->mix, hyper->base, hyper->scale,
                         hyper->norm, step->tokens, network->hidden, network->iterations, network->hc_eps,
                         network->norm_eps);
}

int dk_write_streams(dk_run *run, const dk_network *network, const dk_step *step, dk_buffers *b)
{
    return dk_hyper_write(run, step->streams, step->streams, b->out, b->post, b->comb, step->tokens,
                          network->hidden);
}

void dk_set_expert(dk_matrix *records, const dk_matrix *three)
{
    dk_matrix first = three[0];
    first.data = NULL;
    records[0] = first;
    records[1] = three[1];
    records[2] = three[2];
    /* Who sees this sees everything else. */
    __atomic_store_n(&records[0].data, three[0].data, __ATOMIC_RELEASE);
}

/* Whether the records of all chosen experts are set. */
static int experts_are_set(const dk_layer *layer, const dk_buffers *b, int64_t tokens)
{
    for (int64_t pair = 0; pair < tokens * layer->experts.k; pair++)
        if (!__atomic_load_n(&layer->experts.matrices[b->ids[pair] * 3].data, __ATOMIC_ACQUIRE))
            return 0;
    return 1;
}

/* The rest of one layer: 0 done, 1 stopped, 2 paused. */
static int finish_layer(dk_run *run, const dk_network *network, const dk_layer *layer,
                        const dk_layer_state *state, dk_step *step, dk_buffers *b)
{
    if (step->phase == 0) {
        if (dk_layer_rows(run, network, layer, state, step, b))
            return 1;
        step->phase = 1;
        if (step->pauses_at_selection && dk_selects(network, layer, step))
            return 2;
    }
    if (step->phase == 1) {
        if (dk_layer_attention(run, network, layer, state, step, b) ||
            dk_layer_route(run, network, layer, step, b))
            return 1;
        step->phase = 2;
        if (step->pauses_at_experts || !experts_are_set(layer, b, step->tokens))
            return 2;
    }
    return dk_layer_experts(run, network, layer, step, b);
}

int dk_layers(dk_run *run, const dk_network *network, const dk_layer *layers, const dk_layer_state *states,
              int64_t count, dk_step *step)
{
    dk_buffers b;
    dk_lay_out(&b, network, step->tokens, step->keys, step->staged_bytes, run->threads, step->workspace);
    step->selected = b.selected;
    step->logits = b.logits;
    step->ids = b.ids;
    step->weights = b.weights;
    while (step->layer < count) {
        int64_t i = step->layer;
        int result = finish_layer(run, network, &layers[i], &states[i], step, &b);
        if (result)
            return result;
        step->layer++;
        dk_enter_layer(step);
    }
    return 0;
}

/* The attention of one layer: queries and rows of the chunk, compressed rows, selection, output.
 *
 * Everything that multiplies the sublayer's input stands in one list of products with one int8 form of
 * it; compression comes before attention, since a query sees rows that its own chunk completes. */

#include "native.h"
#include "layer.h"

enum { MAX_INPUT_PRODUCTS = 7 };

static int has_int8(const dk_network *network, const dk_matrix *w)
{
    return network->has_int8 && dk_type_has_int8(w->type);
}

/* Raw rows of a compressor, values then gates, where they are staged. */
static int64_t add_compressor(dk_product *list, const dk_matrix *pair, const dk_compressor *c,
                              const dk_input *x, int64_t tokens)
{
    int64_t half = (int64_t)c->series * c->width;
    list[0] = dk_product_of(c->staged, 2 * half, &pair[0], x, tokens);
    list[1] = dk_product_of(c->staged + half, 2 * half, &pair[1], x, tokens);
    return 2;
}

/* All products of the sublayer's input. */
static int multiply_input(dk_run *run, const dk_network *network, const dk_layer *layer,
                          const dk_layer_state *state, const dk_step *step, dk_buffers *b)
{
    dk_product list[MAX_INPUT_PRODUCTS];
    dk_input x = {0};
    int64_t t = step->tokens, count = 0;
    dk_compressor compressor = dk_staged_compressor(state, step), indexer = dk_staged_indexer(state, step);
    list[count++] = dk_product_of(b->qr, network->q_rank, &layer->wq_a, &x, t);
    list[count++] = dk_product_of(b->kv, network->head_dim, &layer->wkv, &x, t);
    if (compressor.ring)
        count += add_compressor(list + count, layer->compressor, &compressor, &x, t);
    if (indexer.ring)
        count += add_compressor(list + count, layer->index_compressor, &indexer, &x, t);
    if (dk_selects(network, layer, step))
        list[count++] = dk_product_of(b->index_weights, network->index_heads, &layer->index_weights, &x, t);
    int any = 0;
    for (int64_t i = 0; i < count; i++)
        any |= has_int8(network, list[i].w);
    if (dk_make_input(run, &x, b->x, network->hidden, t, b->x_memory, any))
        return 1;
    return dk_products(run, list, count);
}

/* Queries of the heads and, where needed, of the indexer, from the low-rank query. */
static int make_queries(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                        dk_buffers *b)
{
    dk_product list[2];
    dk_input qr = {0};
    int64_t t = step->tokens, count = 0, dim = network->head_dim;
    if (dk_rms_norm(run, b->qr, b->qr, layer->q_norm, t, network->q_rank, network->norm_eps))
        return 1;
    list[count++] = dk_product_of(b->q, network->heads * dim, &layer->wq_b, &qr, t);
    if (dk_selects(network, layer, step)) {
        int64_t width = network->index_heads * network->index_dim;
        list[count++] = dk_product_of(b->index_q, width, &layer->index_wq_b, &qr, t);
    }
    int any = has_int8(network, &layer->wq_b) || (count > 1 && has_int8(network, &layer->index_wq_b));
    if (dk_make_input(run, &qr, b->qr, network->q_rank, t, b->qr_memory, any) ||
        dk_products(run, list, count) ||
        dk_rms_norm(run, b->q, b->q, NULL, t * network->heads, dim, network->norm_eps))
        return 1;
    return dk_rope(run, b->q, t, network->heads, dim, b->cosines[layer->rope], b->sines[layer->rope],
                   network->rope_half, 0);
}

/* Window rows of the chunk, as they are stored. */
static int stage_window(dk_run *run, const dk_network *network, const dk_layer *layer,
                        const dk_layer_state *state, const dk_step *step, dk_buffers *b)
{
    dk_rows staged = dk_staged_window(state, step);
    int64_t t = step->tokens, dim = network->head_dim;
    if (dk_rms_norm(run, b->kv, b->kv, layer->kv_norm, t, dim, network->norm_eps) ||
        dk_rope(run, b->kv, t, 1, dim, b->cosines[layer->rope], b->sines[layer->rope], network->rope_half, 0))
        return 1;
    return dk_rows_store(run, &staged, 0, b->kv, t);
}

static int compress(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_compressor *c,
                    const dk_step *step)
{
    if (!c->ring)
        return 0;
    return dk_compress(run, c, step->start, step->tokens, network->frequencies[layer->rope],
                       network->rope_half, network->norm_eps);
}

/* The compressed rows that each query attends to. */
static int select_rows(dk_run *run, const dk_network *network, const dk_layer *layer,
                       const dk_layer_state *state, const dk_step *step, dk_buffers *b)
{
    int64_t t = step->tokens, heads = network->index_heads, dim = network->index_dim;
    float factor = (float)(1 / sqrt((double)(heads * dim)));
    if (dk_rope(run, b->index_q, t, heads, dim, b->cosines[layer->rope], b->sines[layer->rope],
                network->rope_half, 0))
        return 1;
    for (int64_t i = 0; i < t * heads; i++)
        b->index_weights[i] *= factor;
    if (!dk_all_finite(b->index_q, t * heads * dim) || !dk_all_finite(b->index_weights, t * heads))
        run->bad = 1;
    if (state->indexer.has_hadamard &&
        (dk_hadamard(run, b->index_q, t * heads, dim) || dk_round_fp4(run, b->index_q, t * heads, dim)))
        return 1;
    return dk_index_select(run, b->selected, step->scores, b->index_q, b->index_weights, &state->indexer.rows,
                           step->start, t, heads, dim, layer->ratio, network->top, b->index_scratch);
}

int dk_layer_rows(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_layer_state *state,
                  const dk_step *step, dk_buffers *b)
{
    dk_compressor compressor = dk_staged_compressor(state, step), indexer = dk_staged_indexer(state, step);
    if (dk_read_streams(run, network, &layer->hyper, step, b) ||
        multiply_input(run, network, layer, state, step, b) || make_queries(run, network, layer, step, b) ||
        stage_window(run, network, layer, state, step, b) ||
        compress(run, network, layer, &compressor, step) || compress(run, network, layer, &indexer, step))
        return 1;
    return dk_selects(network, layer, step) ? select_rows(run, network, layer, state, step, b) : 0;
}

/* First half of the output projection: each group of heads through its own rows of wo_a. */
static int project_groups(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                          dk_buffers *b)
{
    int64_t t = step->tokens, groups = network->groups, columns = layer->wo_a.columns;
    int64_t rank = network->group_rank, width = network->heads * network->head_dim;
    int rounds = has_int8(network, &layer->wo_a);
    int64_t bytes = dk_quantized_bytes(t, columns);
    dk_input all = {.x = b->attended, .stride = columns};
    /* The groups of one token lie one after another, like rows. */
    if (rounds && t == 1 && dk_quantize_rows(run, &all, b->attended_memory, groups, columns))
        return 1;
    for (int64_t g = 0; g < groups; g++) {
        dk_input *input = &b->inputs[g];
        *input = dk_rows_of_input(&all, t == 1 ? g : 0, columns);
        input->stride = width;
        input->x = b->attended + g * columns;
        void *memory = (uint8_t *)b->attended_memory + g * ((bytes + 63) & ~(int64_t)63);
        if (rounds && t > 1 && dk_quantize_rows(run, input, memory, t, columns))
            return 1;
        float *y = b->grouped + g * rank;
        b->list[g] = (dk_product){y, groups * rank, &layer->wo_a, g * rank, rank, input, t};
    }
    return dk_products(run, b->list, groups);
}

int dk_layer_attention(dk_run *run, const dk_network *network, const dk_layer *layer,
                       const dk_layer_state *state, const dk_step *step, dk_buffers *b)
{
    int64_t t = step->tokens, heads = network->heads, dim = network->head_dim;
    int64_t grouped = network->groups * network->group_rank;
    dk_rows staged = dk_staged_window(state, step);
    dk_attention rows = {.ring = &state->ring, .slots = state->slots, .staged = &staged,
                         .window = network->window, .compressed = state->compressed,
                         .selected = dk_selects(network, layer, step) ? b->selected : NULL,
                         .top = network->top, .ratio = layer->ratio, .sink = layer->sink};
    dk_input input;
    if (dk_attend(run, b->attended, b->q, &rows, step->start, t, heads, dim) ||
        dk_rope(run, b->attended, t, heads, dim, b->cosines[layer->rope], b->sines[layer->rope],
                network->rope_half, 1) ||
        project_groups(run, network, layer, step, b) ||
        dk_make_input(run, &input, b->grouped, grouped, t, b->grouped_memory,
                      has_int8(network, &layer->wo_b)))
        return 1;
    dk_product product = dk_product_of(b->out, network->hidden, &layer->wo_b, &input, t);
    return dk_products(run, &product, 1) || dk_write_streams(run, network, step, b);
}

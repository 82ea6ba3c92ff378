/* The experts of one layer: router, choice, products, and the streams after them. */

#include "native.h"
#include "layer.h"

/* The router of a layer on b->x. It always sees float32: a rounding could choose another expert. */
static int router_logits(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                         const dk_buffers *b)
{
    dk_input x = {.x = b->x, .stride = network->hidden};
    dk_product product = dk_product_of(b->logits, layer->experts.experts, &layer->router, &x, step->tokens);
    return dk_products(run, &product, 1);
}

int dk_layer_route(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                   dk_buffers *b)
{
    int64_t experts = layer->experts.experts;
    if (dk_read_streams(run, network, &layer->ffn_hyper, step, b) ||
        router_logits(run, network, layer, step, b))
        return 1;
    return dk_route(run, b->ids, b->weights, b->logits, layer->bias, layer->table, step->token_ids,
                    step->tokens, experts, layer->experts.k, network->routed_scale);
}

int dk_layer_guess(dk_run *run, const dk_network *network, const dk_layer *layers, const dk_step *step,
                   int32_t *ids, int64_t most)
{
    const dk_layer *next = &layers[step->layer + 1];
    dk_buffers b;
    dk_lay_out(&b, network, step->tokens, step->keys, step->staged_bytes, run->threads, step->workspace);
    return router_logits(run, network, next, step, &b) ||
           dk_route_guess(run, ids, b.logits, next->bias, step->tokens, next->experts.experts, most);
}

/* Whether a gate or up product of the chosen experts can use int8. */
static int takes_int8(const dk_experts *e, const dk_step *step, const dk_buffers *b, const uint8_t *chosen)
{
    if (!e->has_int8)
        return 0;
    if (e->shared && (dk_type_has_int8(e->shared[0].type) || dk_type_has_int8(e->shared[1].type)))
        return 1;
    for (int64_t pair = 0; pair < step->tokens * e->k; pair++) {
        const dk_matrix *matrices = &e->matrices[b->ids[pair] * 3];
        if (chosen && !chosen[b->ids[pair]])
            continue;
        if (dk_type_has_int8(matrices[0].type) || dk_type_has_int8(matrices[1].type))
            return 1;
    }
    return 0;
}

static int compute_part(dk_run *run, const dk_network *network, const dk_layer *layer, dk_step *step,
                        dk_buffers *b, const uint8_t *chosen)
{
    dk_experts experts = layer->experts;
    dk_input x;
    if (step->experts)
        experts.matrices = step->experts;
    int has_int8 = takes_int8(&experts, step, b, chosen);
    return dk_make_input(run, &x, b->x, network->hidden, step->tokens, b->x_memory, has_int8) ||
           dk_expert_part(run, &step->part_row, &x, b->ids, chosen, &experts, step->tokens, step->parts == 0,
                          b->expert_scratch);
}

int dk_layer_part(dk_run *run, const dk_network *network, const dk_layer *layers, dk_step *step,
                  const uint8_t *chosen)
{
    dk_buffers b;
    dk_lay_out(&b, network, step->tokens, step->keys, step->staged_bytes, run->threads, step->workspace);
    int stopped = compute_part(run, network, &layers[step->layer], step, &b, chosen);
    step->parts++;
    return stopped;
}

int dk_layer_experts(dk_run *run, const dk_network *network, const dk_layer *layer, dk_step *step,
                     dk_buffers *b)
{
    if (step->parts == 0 && compute_part(run, network, layer, step, b, NULL))
        return 1;
    return dk_expert_sum(run, b->out, b->weights, &layer->experts, step->tokens, b->expert_scratch) ||
           dk_write_streams(run, network, step, b);
}

/* The experts of one layer: router, choice, products, and the streams after them. */

#include "native.h"
#include "layer.h"

int dk_layer_route(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                   dk_buffers *b)
{
    if (dk_read_streams(run, network, &layer->ffn_hyper, step, b))
        return 1;
    /* The router always sees float32: a rounding could choose another expert. */
    int64_t experts = layer->experts.experts;
    dk_input x = {.x = b->x, .stride = network->hidden};
    dk_product product = dk_product_of(b->logits, experts, &layer->router, &x, step->tokens);
    if (dk_products(run, &product, 1))
        return 1;
    return dk_route(run, b->ids, b->weights, b->logits, layer->bias, layer->table, step->token_ids,
                    step->tokens, experts, layer->experts.k, network->routed_scale);
}

/* Whether a gate or up product of the chosen experts can use int8. */
static int takes_int8(const dk_experts *e, const dk_step *step, const dk_buffers *b)
{
    if (!e->has_int8)
        return 0;
    if (e->shared && (dk_type_has_int8(e->shared[0].type) || dk_type_has_int8(e->shared[1].type)))
        return 1;
    for (int64_t pair = 0; pair < step->tokens * e->k; pair++) {
        const dk_matrix *matrices = &e->matrices[b->ids[pair] * 3];
        if (dk_type_has_int8(matrices[0].type) || dk_type_has_int8(matrices[1].type))
            return 1;
    }
    return 0;
}

int dk_layer_experts(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                     dk_buffers *b)
{
    dk_experts experts = layer->experts;
    dk_input x;
    if (step->experts)
        experts.matrices = step->experts;
    if (dk_make_input(run, &x, b->x, network->hidden, step->tokens, b->x_memory,
                      takes_int8(&experts, step, b)) ||
        dk_expert_ffn(run, b->out, &x, b->ids, b->weights, &experts, step->tokens, b->expert_scratch))
        return 1;
    return dk_write_streams(run, network, step, b);
}

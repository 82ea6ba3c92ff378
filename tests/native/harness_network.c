/* A network of three layers, with all kinds of attention, through chunks of several sizes. */

#include "harness.h"

enum {
    HIDDEN = 64,
    HEADS = 4,
    HEAD_DIM = 96,
    ROPE_HALF = 16,
    Q_RANK = 32,
    GROUPS = 2,
    GROUP_RANK = 32,
    WINDOW = 8,
    INDEX_HEADS = 2,
    INDEX_DIM = 64,
    TOP = 3,
    EXPERTS = 5,
    K = 2,
    WIDTH = 32,
    VOCAB = 51,
    LAYERS = 3,
    CAPACITY = 96
};

static const int64_t ratios[LAYERS] = {0, 4, 16};

static dk_hyper new_hyper(int64_t rows, int64_t scales)
{
    return (dk_hyper){sane_matrix("F32", rows, 4 * HIDDEN), floats(rows), floats(scales), floats(HIDDEN)};
}

static dk_experts new_experts(const char *type, int has_int8)
{
    dk_matrix *all = scratch((EXPERTS + 1) * 3 * (int64_t)sizeof(dk_matrix));
    for (int i = 0; i < (EXPERTS + 1) * 3; i++)
        all[i] = i % 3 == 2 ? sane_matrix(type, HIDDEN, WIDTH) : sane_matrix(type, WIDTH, HIDDEN);
    dk_set_expert(all, all + 3);
    return (dk_experts){all, all + 3 * EXPERTS, EXPERTS, WIDTH, WIDTH, HIDDEN, K, 7.0f, 7.0f, has_int8};
}

static dk_layer new_layer(int index, const char *type, int has_int8)
{
    int64_t ratio = ratios[index], series = ratio == 4 ? 2 : 1;
    dk_layer layer = {.hyper = new_hyper(24, 3), .ratio = ratio, .has_indexer = ratio == 4, .rope = ratio > 0};
    layer.wq_a = sane_matrix(type, Q_RANK, HIDDEN);
    layer.wq_b = sane_matrix(type, HEADS * HEAD_DIM, Q_RANK);
    layer.wkv = sane_matrix(type, HEAD_DIM, HIDDEN);
    layer.wo_a = sane_matrix(type, GROUPS * GROUP_RANK, HEADS / GROUPS * HEAD_DIM);
    layer.wo_b = sane_matrix(type, HIDDEN, GROUPS * GROUP_RANK);
    layer.q_norm = floats(Q_RANK);
    layer.kv_norm = floats(HEAD_DIM);
    layer.sink = floats(HEADS);
    for (int i = 0; i < 2 && ratio > 0; i++) {
        layer.compressor[i] = sane_matrix("F32", series * HEAD_DIM, HIDDEN);
        layer.index_compressor[i] = sane_matrix("F32", series * INDEX_DIM, HIDDEN);
    }
    layer.index_wq_b = sane_matrix(type, INDEX_HEADS * INDEX_DIM, Q_RANK);
    layer.index_weights = sane_matrix("F32", INDEX_HEADS, HIDDEN);
    layer.ffn_hyper = new_hyper(24, 3);
    layer.router = sane_matrix("F32", EXPERTS, HIDDEN);
    layer.bias = floats(EXPERTS);
    layer.experts = new_experts(type, has_int8);
    return layer;
}

static dk_compressor new_compressor(int64_t ratio, int32_t width, int format)
{
    int32_t series = ratio == 4 ? 2 : 1;
    dk_compressor state = {.slots = series * ratio, .width = width, .ratio = (int32_t)ratio, .series = series};
    state.rows = rows_at_rest(format, width, 2 * ROPE_HALF, CAPACITY / ratio);
    state.ring = floats(state.slots * 2 * series * width);
    state.ape = floats(ratio * series * width);
    state.norm = floats(width);
    state.has_hadamard = format == 2;
    return state;
}

static void new_states(dk_layer_state *states, int is_packed)
{
    for (int i = 0; i < LAYERS; i++) {
        dk_layer_state *state = &states[i];
        *state = (dk_layer_state){.ring = rows_at_rest(is_packed, HEAD_DIM, 2 * ROPE_HALF, WINDOW), .slots = WINDOW};
        if (ratios[i] > 0) {
            state->compressor = new_compressor(ratios[i], HEAD_DIM, is_packed);
            state->compressed = &state->compressor.rows;
        }
        if (ratios[i] == 4)
            state->indexer = new_compressor(4, INDEX_DIM, 2 * is_packed);
    }
}

static dk_network new_network(const char *type, int has_int8)
{
    dk_network network = {.hidden = HIDDEN, .heads = HEADS, .head_dim = HEAD_DIM, .rope_half = ROPE_HALF,
                          .q_rank = Q_RANK, .groups = GROUPS, .group_rank = GROUP_RANK, .window = WINDOW,
                          .index_heads = INDEX_HEADS, .index_dim = INDEX_DIM, .top = TOP,
                          .routed_scale = 1.5f, .norm_eps = 1e-6f, .hc_eps = 1e-6f, .iterations = 20,
                          .has_int8 = has_int8};
    network.frequencies[0] = floats(ROPE_HALF);
    network.frequencies[1] = floats(ROPE_HALF);
    network.embed = sane_matrix(type, VOCAB, HIDDEN);
    network.head = sane_matrix(type, VOCAB, HIDDEN);
    network.experts = new_experts(type, has_int8);
    return network;
}

/* The shared expert alone, then the chosen ones by odd and even ids. */
static void compute_in_parts(dk_run *run, const dk_network *network, const dk_layer *layers, dk_step *step)
{
    int64_t count = network->experts.experts;
    uint8_t *chosen = bytes(count);
    int32_t *guesses = (int32_t *)bytes(step->tokens * count * 4);
    for (int part = 0; part < 3; part++) {
        if (step->layer + 1 < LAYERS)
            expect(dk_layer_guess(run, network, layers, step, guesses, part + 1) == 0, "guesses end");
        for (int64_t expert = 0; expert < count; expert++)
            chosen[expert] = part > 0 && expert % 2 == part - 1;
        expect(dk_layer_part(run, network, layers, step, chosen) == 0, "a part ends");
    }
    dk_route_guess(run, guesses, step->logits, NULL, step->tokens, count, count);
    expect(step->part_row == step->tokens * network->experts.k, "the parts have all rows");
}

/* The same for one layer's experts alone. */
static void check_expert_parts(int threads, int64_t tokens)
{
    dk_run run = {.threads = threads, .is_small = 1};
    dk_experts experts = new_experts("Q8_0", 0);
    dk_input input = {.x = floats(tokens * HIDDEN), .stride = HIDDEN};
    int32_t *ids = (int32_t *)bytes(tokens * experts.k * 4);
    for (int64_t i = 0; i < tokens * experts.k; i++)
        ids[i] = (int32_t)below(experts.experts);
    uint8_t *chosen = bytes(experts.experts);
    void *memory = scratch(dk_experts_scratch_bytes(&experts, tokens));
    int64_t row = 0;
    for (int part = 0; part < 2; part++) {
        for (int64_t expert = 0; expert < experts.experts; expert++)
            chosen[expert] = expert % 2 == part;
        dk_expert_part(&run, &row, &input, ids, chosen, &experts, tokens, part == 0, memory);
    }
    float *out = floats(tokens * HIDDEN);
    dk_expert_sum(&run, out, floats(tokens * experts.k), &experts, tokens, memory);
    expect(row == tokens * experts.k && dk_all_finite(out, tokens * HIDDEN), "experts in parts");
    free_all();
}

/* All layers, with a pause wherever there can be one, then the head and the commit. */
static void run_chunk(dk_run *run, const dk_network *network, const dk_layer *layers, dk_layer_state *states,
                      dk_step *step, int is_draft)
{
    dk_draft draft = {floats(HIDDEN), floats(HIDDEN), sane_matrix("Q8_0", HIDDEN, HIDDEN),
                      sane_matrix("F32", HIDDEN, HIDDEN)};
    int64_t tokens = step->tokens;
    int result = is_draft ? dk_begin_draft(run, network, &draft, step, floats(tokens * 4 * HIDDEN))
                          : dk_begin(run, network, step);
    expect(result == 0, "the chunk begins");
    while ((result = dk_layers(run, network, layers, states, LAYERS, step)) == 2)
        if (step->phase == 2)
            compute_in_parts(run, network, layers, step);
    expect(result == 0, "the layers end");
    dk_hyper head = new_hyper(4, 1);
    int64_t first = tokens / 2, count = tokens - first;
    float *logits = floats(count * VOCAB);
    dk_head(run, network, &head, step, logits, first, count);
    expect(dk_all_finite(logits, count * VOCAB), "finite logits");
    dk_commit(states, LAYERS, step);
}

static void check_timeline(int threads, const char *type, int has_int8, int is_packed)
{
    static const int64_t chunks[] = {33, 1, 7, 1, 20};
    dk_run run = {.threads = threads};
    dk_network network = new_network(type, has_int8);
    dk_layer layers[LAYERS];
    dk_layer_state states[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = new_layer(i, type, has_int8);
    new_states(states, is_packed);
    dk_step step = {.staged_bytes = dk_stage(states, LAYERS), .pauses_at_selection = 1};
    for (int i = 0; i < 5; i++) {
        int64_t tokens = step.tokens = chunks[i];
        int64_t *ids = (int64_t *)bytes(tokens * 8);
        for (int64_t t = 0; t < tokens; t++)
            ids[t] = below(VOCAB);
        step.token_ids = ids;
        step.keys = (step.start + tokens) / 4;
        step.streams = floats(tokens * 4 * HIDDEN);
        step.scores = i % 2 ? NULL : floats(tokens * step.keys);
        step.pauses_at_experts = i % 2;
        step.workspace = scratch(dk_workspace_bytes(&network, tokens, step.keys, step.staged_bytes, threads));
        run.is_small = tokens <= 16;
        run_chunk(&run, &network, layers, states, &step, i == 4);
        step.start += tokens;
    }
    free_all();
}

void check_network(int threads)
{
    check_timeline(threads, "Q8_0", 1, 1);
    check_timeline(threads, "Q8_0", 0, 0);
    check_timeline(threads, "F32", 0, 1);
    check_expert_parts(threads, 1);
    check_expert_parts(threads, 19);
}

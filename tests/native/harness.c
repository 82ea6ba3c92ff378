/* Calls every kernel at odd sizes, at every instruction set, from several threads.
 *
 * The sanitizers (test_sanitizers.py) judge what is read and written; software_tiles.h is built in. */

#include "harness.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- memory and numbers ---- */

enum { MAX_BLOCKS = 4096 };

static void *blocks[MAX_BLOCKS];
static int block_count;
static uint64_t random_state = 88172645463325252u;

void expect(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "harness: at %s: %s\n", dk_isa_name(dk_isa()), what);
    exit(1);
}

static void *keep(void *block)
{
    expect(block != NULL && block_count < MAX_BLOCKS, "out of memory");
    blocks[block_count++] = block;
    return block;
}

void free_all(void)
{
    while (block_count > 0)
        free(blocks[--block_count]);
}

int64_t below(int64_t end)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (int64_t)(random_state >> 11) % end;
}

float *floats(int64_t count)
{
    float *block = keep(malloc((size_t)count * sizeof(float) + 1));
    block = realloc(block, (size_t)(count > 0 ? count : 1) * sizeof(float));
    blocks[block_count - 1] = block;
    for (int64_t i = 0; i < count; i++)
        block[i] = (float)(below(2001) - 1000) / 500.0f;
    return block;
}

uint8_t *bytes(int64_t count)
{
    uint8_t *block = keep(malloc((size_t)(count > 0 ? count : 1)));
    for (int64_t i = 0; i < count; i++)
        block[i] = (uint8_t)below(256);
    return block;
}

void *scratch(int64_t size)
{
    return keep(aligned_alloc(64, (size_t)((size + 63) / 64 * 64)));
}

static dk_run new_run(int threads) { return (dk_run){.threads = threads}; }

/* ---- matrices ---- */

static const struct {
    const char *name;
    int64_t elements;
    int64_t size;
} types[] = {
    {"F32", 1, 4},        {"F16", 1, 2},        {"BF16", 1, 2},      {"F64", 1, 8},      {"Q4_0", 32, 18},
    {"Q4_1", 32, 20},     {"Q5_0", 32, 22},     {"Q5_1", 32, 24},    {"Q8_0", 32, 34},   {"Q2_K", 256, 84},
    {"Q3_K", 256, 110},   {"Q4_K", 256, 144},   {"Q5_K", 256, 176},  {"Q6_K", 256, 210}, {"IQ1_S", 256, 50},
    {"IQ1_M", 256, 56},   {"IQ2_XXS", 256, 66}, {"IQ2_XS", 256, 74}, {"IQ2_S", 256, 82}, {"IQ3_XXS", 256, 98},
    {"IQ3_S", 256, 110},  {"IQ4_NL", 32, 18},   {"IQ4_XS", 256, 136}, {"TQ1_0", 256, 54}, {"TQ2_0", 256, 66},
    {"MXFP4", 32, 17},    {"NVFP4", 64, 36},    {"FP8_E4M3", 1, 1},  {"FP8_E5M2", 1, 1}, {"E8M0", 1, 1},
    {"FP4_E2M1", 2, 1},
};
enum { TYPE_COUNT = sizeof types / sizeof types[0] };

static int index_of(const char *name)
{
    int i = 0;
    while (i < TYPE_COUNT && strcmp(types[i].name, name) != 0)
        i++;
    expect(i < TYPE_COUNT, name);
    return i;
}

dk_matrix matrix(const char *type, int64_t rows, int64_t columns)
{
    int i = index_of(type);
    dk_matrix m = {.rows = rows, .columns = columns, .factor = 0.5f, .scale_height = 1, .scale_width = 1};
    m.type = dk_type_id(type);
    expect(m.type >= 0, type);
    m.row_bytes = columns / types[i].elements * types[i].size;
    m.data = bytes(rows * m.row_bytes + 1) + 1;
    if (strcmp(type, "FP8_E4M3") == 0) {
        m.scale_height = m.scale_width = 32;
        m.scale_stride = dk_parts(columns, 32);
        m.scale = bytes(dk_parts(rows, 32) * m.scale_stride);
    } else if (strcmp(type, "FP4_E2M1") == 0) {
        m.scale_width = 32;
        m.scale_stride = columns / 32;
        m.scale = bytes(rows * m.scale_stride);
    }
    return m;
}

dk_matrix sane_matrix(const char *type, int64_t rows, int64_t columns)
{
    dk_matrix m = matrix(type, rows, columns);
    uint8_t *data = (uint8_t *)m.data;
    if (strcmp(type, "F32") == 0) {
        m.data = (const uint8_t *)floats(rows * columns);
        return m;
    }
    expect(strcmp(type, "Q8_0") == 0, "a sane matrix is F32 or Q8_0");
    for (int64_t block = 0; block < rows * columns / 32; block++) {
        data[block * 34] = 0;
        data[block * 34 + 1] = 0x18; /* about 0.002 */
    }
    return m;
}

dk_rows rows_at_rest(int format, int32_t width, int32_t rope, int64_t count)
{
    dk_run run = new_run(1);
    dk_rows rows = {.format = format, .width = width, .rope = rope};
    rows.data_stride = format == 0 ? 4 * width : format == 1 ? width + rope : width / 2;
    rows.scale_stride = format == 0 ? 0 : format == 1 ? (width - rope) / 64 : width / 32;
    rows.data = bytes(count * rows.data_stride);
    rows.scales = format == 0 ? NULL : bytes(count * rows.scale_stride);
    dk_rows_store(&run, &rows, 0, floats(count * width), count);
    return rows;
}

/* ---- the pool ---- */

typedef struct {
    int hits[97];
    dk_run *run;
} tally;

static void count_leaf(void *arg, int64_t task) { ((tally *)arg)->hits[task]++; }

static void count_task(void *arg, int64_t task)
{
    tally *own = arg, inner = {.run = own->run};
    dk_run nested = new_run(3);
    own->hits[task]++;
    if (task % 31 == 0) {
        dk_parallel(&nested, 7, count_leaf, &inner);
        expect(inner.hits[6] == 1 && inner.hits[7] == 0, "nested tasks");
    }
}

static void *use_pool(void *arg)
{
    for (int round = 0; round < 400; round++) {
        dk_run run = new_run(1 + (round + *(int *)arg) % 5);
        tally all = {.run = &run};
        run.is_pinned = round % 3 == 0;
        if (round % 40 == 39)
            usleep(300);
        expect(dk_parallel(&run, round % 98, count_task, &all) == 0, "a job was stopped");
        for (int i = 0; i < 97; i++)
            expect(all.hits[i] == (i < round % 98), "each task once");
        if (round % 100 == 99)
            dk_pool_stop();
    }
    return NULL;
}

static int stop_now(void *data) { return ++*(int *)data; }

static void check_pool(void)
{
    pthread_t callers[3];
    int numbers[3] = {0, 1, 2}, polls = 0;
    for (int i = 0; i < 3; i++)
        expect(pthread_create(&callers[i], NULL, use_pool, &numbers[i]) == 0, "no thread");
    for (int i = 0; i < 3; i++)
        pthread_join(callers[i], NULL);
    dk_run run = new_run(3);
    tally all = {.run = &run};
    run.poll = stop_now;
    run.poll_data = &polls;
    run.last_poll_ns = 1;
    expect(dk_parallel(&run, 97, count_task, &all) == 1 && run.stop && polls == 1, "a stop");
    dk_pool_stop();
    expect(dk_pool_size() == 0, "the pool is empty");
}

/* ---- small operations ---- */

static void check_rows(int threads)
{
    static const int64_t widths[] = {1, 7, 8, 33, 1027};
    dk_run run = new_run(threads);
    for (int i = 0; i < 5; i++) {
        int64_t n = widths[i], tokens = 41;
        float *x = floats(tokens * n), *y = floats(tokens * n);
        dk_rms_norm(&run, y, x, i % 2 ? NULL : floats(n), tokens, n, 1e-6f);
        dk_swiglu(&run, y, x, floats(tokens * n), tokens * n, 3.0f);
        dk_argmax(x, n);
        expect(dk_all_finite(x, n), "finite numbers");
        free_all();
    }
    for (int64_t n = 1; n <= 512; n *= 4)
        dk_hadamard(&run, floats(70 * n), 70, n);
    for (int64_t half = 1; half < 14; half += 3) {
        float *cosines = floats(200 * half), *sines = floats(200 * half);
        dk_rope_table(cosines, sines, 5, 3, 200, floats(half), half);
        dk_rope(&run, floats(200 * 3 * 27), 200, 3, 27, cosines, sines, half, half % 2);
    }
    free_all();
}

static void check_sampling(void)
{
    static const int64_t sizes[] = {1, 63, 64, 65, 1031};
    for (int i = 0; i < 5; i++) {
        int64_t n = sizes[i], bias_ids[] = {n - 1};
        float *logits = floats(n);
        uint8_t *seen = bytes(n);
        int32_t *generated = scratch(4 * n);
        for (int64_t id = 0; id < n; id++) {
            seen[id] &= 1;
            generated[id] = seen[id] ? (int32_t)below(3) : 0;
        }
        double bias[] = {1.5}, *weights = scratch(8 * n);
        void *memory = scratch(dk_sample_scratch_bytes(n));
        for (int choice = 0; choice < 16; choice++) {
            dk_sampling rules = {seen, generated, bias_ids, bias, choice & 1, 1.1, 0.1, 0.1, 1.4, 1, 0, 0};
            rules.top_k = choice & 2 ? 40 : 0;
            rules.top_p = choice & 4 ? 0.9 : 1.0;
            rules.min_p = choice & 8 ? 0.05 : 0.0;
            int64_t id = dk_sample(weights, logits, n, &rules, 0.7, memory);
            expect(id >= 0 && id < n && weights[id] > 0, "a token");
            rules.scale = 0;
            expect(dk_sample(NULL, logits, n, &rules, 0.7, memory) >= 0, "the largest");
        }
        logits[n - 1] = NAN;
        expect(dk_sample(weights, logits, n, &(dk_sampling){.seen = seen}, 0.7, memory) == -1, "no token");
        free_all();
    }
}

static void check_streams(int threads)
{
    static const int64_t widths[] = {1, 8, 29, 515};
    dk_run run = new_run(threads);
    for (int i = 0; i < 4; i++) {
        int64_t n = widths[i], tokens = 33;
        float *streams = floats(tokens * 4 * n), *x = floats(tokens * n), *norm = floats(n);
        float *post = floats(tokens * 4), *comb = floats(tokens * 16);
        dk_hyper_read(&run, x, post, comb, streams, floats(tokens * 24), floats(24), floats(3), norm, tokens,
                      n, 20, 1e-6f, 1e-6f);
        dk_hyper_write(&run, streams, streams, x, post, comb, tokens, n);
        dk_hyper_head(&run, x, streams, floats(tokens * 4), floats(4), floats(1), norm, tokens, n, 1e-6f,
                      1e-6f);
        free_all();
    }
}

static void check_router(int threads)
{
    dk_run run = new_run(threads);
    int64_t tokens = 19, experts = 23, k = 5;
    int32_t *ids = (int32_t *)bytes(tokens * k * 4);
    int64_t *table = (int64_t *)bytes(7 * k * 8), *token_ids = (int64_t *)bytes(tokens * 8);
    float *weights = floats(tokens * k), *logits = floats(tokens * experts);
    for (int64_t i = 0; i < 7 * k; i++)
        table[i] = below(experts);
    for (int64_t i = 0; i < tokens; i++)
        token_ids[i] = below(7);
    dk_route(&run, ids, weights, logits, floats(experts), NULL, NULL, tokens, experts, k, 2.0f);
    dk_route(&run, ids, weights, logits, NULL, table, token_ids, tokens, experts, k, 2.0f);
    dk_route_weights(&run, weights, logits, ids, tokens, experts, k, 2.0f);
    free_all();
}

static void check_stream_sum(int threads)
{
    dk_run run = new_run(threads);
    int64_t words = (2 << 20) + 3;
    uint64_t sum = 0, *data = scratch(words * 8);
    memset(data, 1, (size_t)words * 8);
    expect(dk_stream_sum(&run, &sum, data, words) == 0 && sum == UINT64_C(0x0101010101010101) * (uint64_t)words,
           "sum of words");
    free_all();
}

/* ---- stored matrices and products ---- */

static void check_decoding(int threads)
{
    dk_run run = new_run(threads);
    for (int i = 0; i < TYPE_COUNT; i++) {
        int64_t columns = 3 * dk_max(types[i].elements, 32), rows = 37;
        dk_matrix m = matrix(types[i].name, rows, columns);
        int64_t *ids = (int64_t *)bytes(5 * 8);
        for (int j = 0; j < 5; j++)
            ids[j] = below(rows);
        dk_decode_row(floats(columns), &m, rows - 1, 0, columns);
        dk_decode_row(floats(columns / 3), &m, rows - 1, columns / 3 * 2, columns / 3);
        dk_embed(&run, floats(5 * columns), &m, ids, 5);
        float *scale = scratch(columns / 4 + 64), *offset = scratch(columns / 4 + 64);
        int group = dk_unpack_row(scratch(columns + 64), scale, offset, &m, rows - 1, 0, columns);
        expect((group != 0) == (dk_type_has_int8(m.type) != 0), "an int8 form");
        free_all();
    }
}

static void check_product(const char *type, int64_t columns, int64_t tokens, int has_int8, dk_run run)
{
    int64_t rows = 43;
    dk_matrix m = matrix(type, rows, columns);
    dk_input input = {.x = floats(tokens * columns), .stride = columns};
    if (has_int8)
        dk_quantize_rows(&run, &input, scratch(dk_quantized_bytes(tokens, columns)), tokens, columns);
    float *whole = floats(tokens * (rows + 3)), *part = floats(tokens * 5);
    dk_product list[2] = {{whole, rows + 3, &m, 0, rows, &input, tokens}, {part, 5, &m, rows - 5, 5, &input, tokens}};
    run.is_small = tokens <= 16;
    dk_products(&run, list, 2);
    free_all();
}

static void check_products(int threads)
{
    static const int64_t counts[] = {1, 3, 16, 29};
    for (int i = 0; i < TYPE_COUNT; i++) {
        int64_t odd = 5 * dk_max(types[i].elements, 32), superblocks = 512;
        for (int j = 0; j < 4; j++) {
            check_product(types[i].name, odd, counts[j], 0, new_run(threads));
            check_product(types[i].name, odd, counts[j], 1, new_run(threads));
            check_product(types[i].name, superblocks, counts[j], 1, new_run(threads));
        }
    }
}

/* ---- rows at rest, selection, attention ---- */

static void check_rows_at_rest(int threads)
{
    dk_run run = new_run(threads);
    for (int format = 0; format < 3; format++) {
        int32_t width = format == 1 ? 150 : 96, rope = format == 1 ? 22 : 0;
        dk_rows staged = rows_at_rest(format, width, rope, 53), ring = rows_at_rest(format, width, rope, 11);
        dk_rows_store(&run, &staged, 2, floats(51 * width), 51);
        dk_rows_load(floats(53 * width), &staged, 0, 53);
        dk_ring_commit(&ring, 11, &staged, 7, 53);
        dk_ring_commit(&ring, 11, &staged, 7, 4);
        free_all();
    }
    dk_round_fp4(&run, floats(41 * 160), 41, 160);
    free_all();
}

static void check_compressor(int threads, int series)
{
    dk_run run = new_run(threads);
    int32_t width = series == 2 ? 64 : 150, ratio = 4;
    dk_compressor state = {.slots = 8, .width = width, .ratio = ratio, .series = series};
    state.has_hadamard = series == 2;
    state.rows = rows_at_rest(series == 2 ? 2 : 1, width, series == 2 ? 0 : 22, 20);
    state.ring = floats(state.slots * 2 * series * width);
    state.staged = floats(37 * 2 * series * width);
    state.ape = floats(ratio * series * width);
    state.norm = floats(width);
    dk_compress(&run, &state, 0, 37, floats(11), 11, 1e-6f);
    dk_compress(&run, &state, 41, 37, floats(11), 11, 1e-6f);
    free_all();
}

static void check_selection(int threads)
{
    dk_run run = new_run(threads);
    int64_t start = 2001, tokens = 21, heads = 3, dim = 64, ratio = 4, top = 5, keys = (start + tokens) / ratio;
    for (int format = 0; format < 3; format += 2) {
        dk_rows rows = rows_at_rest(format, (int32_t)dim, 0, keys);
        float *q = floats(tokens * heads * dim), *weights = floats(tokens * heads);
        int32_t *selected = (int32_t *)bytes(tokens * top * 4);
        void *memory = scratch(dk_index_scratch_bytes(keys, heads, dim, threads));
        dk_round_fp4(&run, q, tokens * heads, dim);
        dk_index_select(&run, selected, floats(tokens * keys), q, weights, &rows, start, tokens, heads, dim, ratio,
                        top, memory);
        dk_index_select(&run, selected, NULL, q, weights, &rows, start, tokens, heads, dim, ratio, top, memory);
        for (int64_t i = 0; i < tokens * top; i++)
            expect(selected[i] >= 0 && selected[i] < keys, "a selected key");
        free_all();
    }
}

static void check_attention(int threads)
{
    dk_run run = new_run(threads);
    for (int format = 0; format < 2; format++) {
        int64_t start = 45, tokens = 17, heads = 5, dim = 86, ratio = 4, top = 6, window = 9;
        int32_t rope = 22;
        int32_t *selected = (int32_t *)bytes(tokens * top * 4);
        for (int64_t i = 0; i < tokens * top; i++)
            selected[i] = i % top == top - 1 ? -1 : (int32_t)(i % top * 2);
        dk_rows ring = rows_at_rest(format, (int32_t)dim, rope, 11);
        dk_rows staged = rows_at_rest(format, (int32_t)dim, rope, tokens);
        dk_rows compressed = rows_at_rest(format, (int32_t)dim, rope, (start + tokens) / ratio);
        dk_attention rows = {.ring = &ring, .slots = 11, .staged = &staged, .window = window, .ratio = ratio};
        rows.sink = floats(heads);
        float *q = floats(tokens * heads * dim), *out = floats(tokens * heads * dim);
        dk_attend(&run, out, q, &rows, start, tokens, heads, dim);
        dk_attend(&run, out, q, &rows, 0, tokens, heads, dim);
        rows.compressed = &compressed;
        dk_attend(&run, out, q, &rows, start, tokens, heads, dim);
        rows.selected = selected;
        rows.top = top;
        dk_attend(&run, out, q, &rows, start, tokens, heads, dim);
        expect(dk_all_finite(out, tokens * heads * dim), "finite attention");
        free_all();
    }
}

/* ---- experts ---- */

static void check_experts(int threads, int64_t tokens, const char *type, int has_int8)
{
    enum { EXPERTS = 7, K = 3, HIDDEN = 96, WIDTH = 544 }; /* wide enough for more than one task per expert */
    dk_run run = new_run(threads);
    dk_matrix matrices[EXPERTS * 3], shared[3];
    for (int i = 0; i < EXPERTS * 3; i++)
        matrices[i] = i % 3 == 2 ? sane_matrix(type, HIDDEN, WIDTH) : sane_matrix(type, WIDTH, HIDDEN);
    for (int i = 0; i < 3; i++)
        shared[i] = i == 2 ? sane_matrix(type, HIDDEN, WIDTH) : sane_matrix(type, WIDTH, HIDDEN);
    dk_experts experts = {matrices, shared, EXPERTS, WIDTH, WIDTH, HIDDEN, K, 7.0f, 7.0f, has_int8};
    dk_input input = {.x = floats(tokens * HIDDEN), .stride = HIDDEN};
    if (has_int8)
        dk_quantize_rows(&run, &input, scratch(dk_quantized_bytes(tokens, HIDDEN)), tokens, HIDDEN);
    int32_t *ids = (int32_t *)bytes(tokens * K * 4);
    for (int64_t i = 0; i < tokens * K; i++)
        ids[i] = (int32_t)(i % K * 2 + below(2));
    float *out = floats(tokens * HIDDEN);
    run.is_small = tokens <= 16;
    dk_expert_ffn(&run, out, &input, ids, floats(tokens * K), &experts, tokens,
                  scratch(dk_experts_scratch_bytes(&experts, tokens)));
    expect(dk_all_finite(out, tokens * HIDDEN), "finite experts");
    check_host_experts(&run, experts, tokens);
    free_all();
}

static void check_level(int threads)
{
    check_rows(threads);
    check_sampling();
    check_streams(threads);
    check_router(threads);
    check_decoding(threads);
    check_products(threads), check_tiles(threads);
    check_rows_at_rest(threads);
    check_compressor(threads, 1);
    check_compressor(threads, 2);
    check_selection(threads);
    check_attention(threads);
    for (int has_int8 = 0; has_int8 < 2; has_int8++) {
        check_experts(threads, 1, "Q8_0", has_int8);
        check_experts(threads, 25, "Q8_0", has_int8);
        check_experts(threads, 5, "F32", has_int8);
    }
    check_network(threads);
}

/* With any argument it only starts. */
int main(int count, char **arguments)
{
    (void)arguments;
    if (count > 1)
        return 0;
    int tried = 0;
    check_pool();
    check_stream_sum(3);
    check_levels();
    for (int level = 0; level <= DK_LEVEL_NEON_DOT; level++) {
        if (dk_set_isa(level) != 0)
            continue;
        check_level(3);
        printf("%s\n", dk_isa_name(dk_isa()));
        tried++;
    }
    dk_pool_stop();
    return tried > 0 ? 0 : 1;
}

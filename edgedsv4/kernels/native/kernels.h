/* The native kernels: every function that Python calls, and the records that pass between them.
 *
 * Parsed by cffi as it stands, so there is no preprocessor line in this file; what only C needs is in
 * native.h. Functions take outputs first. Sizes and strides are in elements unless their name says
 * bytes. Nothing here allocates, prints or keeps state but the thread pool (threads.c) and the chosen
 * instruction set (isa.c). Callers have checked shapes and ranges; C checks none. Float arrays are
 * float32, aligned to 4; stored weights may lie at any address. Functions that return int return 0, or
 * 1 when dk_run.poll asked to stop: outputs are then undefined.
 *
 * "Row invariant" means that the result of a token has the same bits whatever other tokens are in the
 * call and however many threads work.
 */

/* ---- instruction sets (isa.c): 0 scalar, 1 AVX2, 2 AVX-VNNI, 3 AVX-512, 4 with VNNI, 5 with VBMI too,
 * 6 with AMX too, 10 NEON, 11 with dot products ---- */

/* The level in use; the best of this machine unless set. */
int dk_isa(void);
/* Use a level (tests and benchmarks); returns -1 and changes nothing if this machine lacks it. */
int dk_set_isa(int level);
/* Name of a level, or NULL. */
const char *dk_isa_name(int level);

/* ---- threads (threads.c) ---- */

typedef struct {
    int32_t threads;       /* that may work, the caller included, >= 1 */
    int32_t is_pinned;     /* each worker stays on one CPU */
    int32_t is_small;      /* few tokens: products go row by row, which makes them row invariant */
    int32_t bad;           /* set to nonzero when a value that a selection or a rounding could hide
                              was NaN or infinite */
    int32_t stop;          /* set once poll asked to stop */
    int (*poll)(void *);   /* asked by the calling thread every 20 ms at most; nonzero stops; or NULL */
    void *poll_data;
    int64_t last_poll_ns;  /* of the monotonic clock; 0 at first */
    int64_t linger_ns;     /* how long a worker looks for another job before it sleeps; 0: 40 us */
} dk_run;

/* Call fn(arg, 0 .. tasks - 1), each once, in any order and thread; tasks should take 10 us to 5 ms.
 * With one task, one thread or a pool that another caller is using, all run in the calling thread. */
int dk_parallel(dk_run *run, int64_t tasks, void (*fn)(void *arg, int64_t task), void *arg);
/* Workers alive now (tests). */
int dk_pool_size(void);
/* End all workers; the next dk_parallel starts new ones. */
void dk_pool_stop(void);
/* Sum of words at data, read by all threads: its time is how fast memory can be read (stream.c). */
int dk_stream_sum(dk_run *run, uint64_t *sum, const uint64_t *data, int64_t words);

/* ---- stored matrices (decode_*.c, unpack_*.c) ---- */

typedef struct {
    const uint8_t *data;   /* rows * row_bytes */
    const uint8_t *scale;  /* E8M0 bytes of FP8_E4M3 and FP4_E2M1 matrices, or NULL */
    int64_t rows;
    int64_t columns;
    int64_t row_bytes;
    int64_t scale_stride;  /* bytes from one row of scales to the next */
    int32_t scale_height;  /* rows and columns that share a scale */
    int32_t scale_width;
    int32_t type;          /* dk_type_id of its block type */
    float factor;          /* on every element, 1 without */
} dk_matrix;

/* Number of a block type by its ggml name (Q8_0, MXFP4, FP8_E4M3, ...); -1 if there is no decoder. */
int dk_type_id(const char *name);
/* Whether products with int8 activations exist for a type; else float32 activations are used. */
int dk_type_has_int8(int type);
/* Elements [first_column, first_column + columns) of one row as float32, exactly as the Python
 * decoder gives them; both multiples of the block. */
void dk_decode_row(float *y, const dk_matrix *w, int64_t row, int64_t first_column, int64_t columns);
/* The same elements as int8 products take them: u [columns], and over groups of 16 or 32 the element is
 * scale * u + offset; columns a multiple of the block and of 32. Returns the group, or 0 for a type without
 * int8 form. The outputs have room for 64 bytes more (tests). */
int dk_unpack_row(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                  int64_t first_column, int64_t columns);
/* y [tokens, columns] = rows of w by token id. */
int dk_embed(dk_run *run, float *y, const dk_matrix *w, const int64_t *ids, int64_t tokens);

/* ---- products y = x W^T (quant_matmul.c) ---- */

typedef struct {
    const float *x;        /* [tokens, columns] */
    int64_t stride;
    const int8_t *q;       /* [tokens, columns] x = scale * q in groups of 32, or NULL */
    const float *scale;    /* [tokens, columns / 32] */
    const float *sum32;    /* [tokens, columns / 32] scale times the sum of q of the group */
    const float *sum16;    /* [tokens, columns / 16] the same of each half group */
} dk_input;

/* Bytes that dk_quantize_rows needs for its results. */
int64_t dk_quantized_bytes(int64_t tokens, int64_t columns);
/* Round rows to int8 for products: scale = max |x| / 127 of each group of 32, q to nearest even. A group
 * with a NaN or an infinity gets the scale NaN. Fills q, scale, sum32, sum16 of `input` (x, stride set)
 * with pointers into `memory` (64-byte aligned). columns is a multiple of 32. Row invariant. */
int dk_quantize_rows(dk_run *run, dk_input *input, void *memory, int64_t tokens, int64_t columns);

typedef struct {
    float *y;              /* [tokens, rows] */
    int64_t y_stride;
    const dk_matrix *w;
    int64_t first_row;     /* rows of w that are used */
    int64_t rows;
    const dk_input *x;     /* int8 where x->q is set and the type has int8, else float32 */
    int64_t tokens;
} dk_product;

/* All products of a list, shared out among the threads as one piece of work. Float32 products are row
 * invariant; int8 ones are when run->is_small. */
int dk_products(dk_run *run, const dk_product *list, int64_t count);

/* ---- rows at rest (kv_rows.c) ---- */

typedef struct {
    uint8_t *data;         /* format 0: float32 [width]; 1: e4m3 [width - rope] then bfloat16 [rope];
                              2: e2m1 [width / 2], element 2i in the low nibble */
    uint8_t *scales;       /* E8M0 per group of 64 (format 1) or 32 (format 2); NULL for format 0 */
    int64_t data_stride;   /* bytes per row */
    int64_t scale_stride;
    int32_t format;
    int32_t width;
    int32_t rope;
} dk_rows;

/* Encode x [count, width] as rows first, first + 1, ...; the roundings of kernels/kv_quant.py. */
int dk_rows_store(dk_run *run, const dk_rows *rows, int64_t first, const float *x, int64_t count);
/* Decode rows first .. first + count - 1 to y [count, width]. */
void dk_rows_load(float *y, const dk_rows *rows, int64_t first, int64_t count);
/* Copy the last rows of staged [0, count), which are positions start .., into a ring of `slots` rows
 * (slot = position mod slots). */
void dk_ring_commit(const dk_rows *ring, int64_t slots, const dk_rows *staged, int64_t start, int64_t count);

/* ---- small operations ---- */

/* y = weight * x / rms(x) of each row [n]; weight NULL for none; y may be x. */
int dk_rms_norm(dk_run *run, float *y, const float *x, const float *weight, int64_t rows, int64_t n, float eps);
/* cos and sin [count, half] at positions first, first + step, ...; the angle is float32. */
void dk_rope_table(float *cosines, float *sines, int64_t first, int64_t step, int64_t count,
                   const float *frequencies, int64_t half);
/* Rotate the last 2 * half dims of x [tokens, heads, dim] in place, pairs (2i, 2i + 1). */
int dk_rope(dk_run *run, float *x, int64_t tokens, int64_t heads, int64_t dim, const float *cosines,
            const float *sines, int64_t half, int inverse);
/* Walsh-Hadamard transform of each row [n], n a power of two, scaled by n^-0.5, in place. */
int dk_hadamard(dk_run *run, float *x, int64_t rows, int64_t n);
/* y = silu(min(gate, limit)) * clamp(up, -limit, limit), count elements; y may be gate. */
int dk_swiglu(dk_run *run, float *y, const float *gate, const float *up, int64_t count, float limit);

/* ---- hyper-connections (mhc.c); 4 streams ---- */

/* From mix = fn . streams [tokens, 24] (not normalised): x [tokens, n] = rms_norm(sum_j pre_j X_j) *
 * norm, post [tokens, 4], comb [tokens, 4, 4] (source stream first). */
int dk_hyper_read(dk_run *run, float *x, float *post, float *comb, const float *streams, const float *mix,
                  const float *base, const float *scale, const float *norm, int64_t tokens, int64_t n,
                  int32_t iterations, float hc_eps, float norm_eps);
/* X'_k = post_k o + sum_j comb_jk X_j; y may be streams. */
int dk_hyper_write(dk_run *run, float *y, const float *streams, const float *output, const float *post,
                   const float *comb, int64_t tokens, int64_t n);
/* The head's read: x [tokens, n] = rms_norm(sum_j (sigmoid(mix * scale + base) + hc_eps)_j X_j) * norm,
 * mix [tokens, 4] not normalised. */
int dk_hyper_head(dk_run *run, float *x, const float *streams, const float *mix, const float *base,
                  const float *scale, const float *norm, int64_t tokens, int64_t n, float hc_eps,
                  float norm_eps);

/* ---- compressor (compress.c) ---- */

typedef struct {
    dk_rows rows;          /* finished rows of the timeline */
    float *ring;           /* [slots, 2 * series * width]: values, then gates with the position bias */
    int64_t slots;
    float *staged;         /* [chunk, 2 * series * width], the chunk's own raw rows */
    const float *ape;      /* [ratio, series * width] */
    const float *norm;     /* [width] */
    int32_t width;
    int32_t ratio;
    int32_t series;        /* 2: windows overlap */
    int32_t has_hadamard;  /* finished rows are transformed before they are stored */
} dk_compressor;

/* Add the position bias to the gates of `tokens` staged rows at positions start .., pool every window
 * that ends among them, norm, rotate (rope dims at the end of the width, position of the window's first
 * token), and store the rows. width is at most 4096. Sets run->bad for a row that is not finite. Row
 * invariant. */
int dk_compress(dk_run *run, const dk_compressor *state, int64_t start, int64_t tokens,
                const float *frequencies, int64_t half, float eps);

/* ---- indexer (index_select.c) ---- */

/* Bytes of scratch for one call (64-byte aligned); keys as many as its last token sees. */
int64_t dk_index_scratch_bytes(int64_t keys, int64_t heads, int64_t dim, int32_t threads);
/* For each token the `top` best keys of those it sees, (start + t + 1) / ratio: score = sum_h weight_h *
 * relu(q_h . key), larger first, ties to the lower row, NaN counts as -inf; written in ascending order,
 * then -1. selected [tokens, top]; q [tokens, heads, dim] already rounded where keys are (format 2).
 * scores [tokens, keys] gets all scores (-inf where invisible) unless NULL; keys = (start + tokens) / ratio.
 * dim is a multiple of 32 (format 2) or of 4, at most 1024. Sets run->bad for a q or a weight that is not
 * finite. Row invariant. */
int dk_index_select(dk_run *run, int32_t *selected, float *scores, const float *q, const float *weights,
                    const dk_rows *keys, int64_t start, int64_t tokens, int64_t heads, int64_t dim,
                    int64_t ratio, int64_t top, void *scratch);
/* Round rows [count, n] as index keys are rounded (to FP4 and back), in place. */
int dk_round_fp4(dk_run *run, float *x, int64_t count, int64_t n);

/* ---- attention (sparse_attention.c) ---- */

typedef struct {
    const dk_rows *ring;   /* window rows of positions before start */
    int64_t slots;
    const dk_rows *staged; /* window rows of the chunk, row t = position start + t */
    int64_t window;            /* 0 for none: ring and staged may then be NULL */
    const dk_rows *compressed; /* or NULL */
    const int32_t *selected;   /* [tokens, top] ascending, -1 where none; NULL: all visible rows */
    int64_t top;
    int64_t ratio;
    const float *sink;     /* [heads] */
} dk_attention;

/* out [tokens, heads, dim]: softmax over window and compressed rows and the sink, scale dim^-0.5. Keys are
 * the values. Not yet rotated back. dim at most 16384. Row invariant. */
int dk_attend(dk_run *run, float *out, const float *q, const dk_attention *rows, int64_t start,
              int64_t tokens, int64_t heads, int64_t dim);

/* ---- experts (router.c, expert_ffn.c) ---- */

/* ids, weights [tokens, k]: the k largest of p + bias (bias NULL: p), p = sqrt(softplus(logits)), ties to the
 * lower id, in ascending order; or table[token_ids[t]] when table is given. weights = p / sum * scale. */
int dk_route(dk_run *run, int32_t *ids, float *weights, const float *logits, const float *bias,
             const int64_t *table, const int64_t *token_ids, int64_t tokens, int64_t experts, int64_t k,
             float scale);
/* weights [tokens, k] of given ids. */
int dk_route_weights(dk_run *run, float *weights, const float *logits, const int32_t *ids, int64_t tokens,
                     int64_t experts, int64_t k, float scale);
/* ids [tokens, most]: the `most` largest of p + bias as above, the best first, 1 <= most <= experts and 64. For
 * guesses: a NaN comes first and is not reported. */
int dk_route_guess(dk_run *run, int32_t *ids, const float *logits, const float *bias, int64_t tokens,
                   int64_t experts, int64_t most);

typedef struct {
    const dk_matrix *matrices; /* [experts * 3] w1, w3, w2 of each; only those of ids are read, and their
                                  data may lie in any buffer */
    const dk_matrix *shared;   /* [3] w1, w3, w2, or NULL */
    int64_t experts;
    int64_t width;             /* of a routed expert */
    int64_t shared_width;
    int64_t hidden;
    int64_t k;
    float limit;
    float shared_limit;
    int32_t has_int8;          /* hidden activations are rounded to int8 where the types allow */
} dk_experts;

/* Bytes of scratch for one call. */
int64_t dk_experts_scratch_bytes(const dk_experts *experts, int64_t tokens);
/* out [tokens, hidden] = sum over slots, in order, of weight * expert(x), plus the shared expert; a slot
 * with a negative id adds nothing. Row invariant when run->is_small or without int8. */
int dk_expert_ffn(dk_run *run, float *out, const dk_input *x, const int32_t *ids, const float *weights,
                  const dk_experts *experts, int64_t tokens, void *scratch);
/* The same in parts, for experts whose weights come one after another; any division has the same bits. A part
 * computes the experts with a nonzero chosen [experts] (NULL: all), the shared one if asked. *row is 0 before the
 * first part; the scratch keeps what the sum needs. Every expert of ids must be in one part. */
int dk_expert_part(dk_run *run, int64_t *row, const dk_input *x, const int32_t *ids, const uint8_t *chosen,
                   const dk_experts *experts, int64_t tokens, int32_t has_shared, void *scratch);
int dk_expert_sum(dk_run *run, float *out, const float *weights, const dk_experts *experts, int64_t tokens,
                  void *scratch);

/* ---- experts beside a GPU (host_experts.c) ---- */

/* Where a job waits for experts that are not in memory (host_desk.c). A thread that can get them takes the
 * order, does the job in parts (dk_host_part, dk_host_sum), and says that it is done. One order at a time. */
typedef struct dk_desk dk_desk;

/* The part of a layer's routed experts that the CPU computes while a GPU does the rest. The GPU's runtime
 * calls dk_host_experts from a thread of its own, between a copy of x, ids and weights to `memory` and a
 * copy of `out` back; what it reads and writes must stay where it is as long as anything may call it. */
typedef struct {
    dk_run *run;           /* without poll; one job of a run at a time */
    const dk_experts *experts;  /* without a shared expert; k slots per token */
    const int32_t *places; /* [experts] an expert that is not negative here is left to the GPU; NULL: none */
    const float *x;        /* [tokens, hidden] */
    const int32_t *ids;    /* [tokens, k] */
    const float *weights;  /* [tokens, k] */
    float *out;            /* [tokens, hidden], the sum over the slots that are not the GPU's */
    void *scratch;         /* dk_host_experts_bytes, aligned to 64 */
    dk_desk *desk;         /* asked for experts without a record; NULL: they are a failure */
    int32_t *found;        /* [tokens, k] or NULL: after a job that asked nobody, the ids that it computed, -1
                              for the others; all -1 after one that did */
    int32_t *seen;         /* [tokens, k] or NULL: a copy of the ids, for who counts them later */
    int64_t tokens;
    int64_t row;           /* of a job that is done in parts */
    int32_t failed;        /* set, and never taken back, by a job whose out is all NaN: 1 an id is out of
                              range, 2 an expert has no record, 3 the run was stopped */
    int32_t failed_id;     /* which expert */
    int64_t calls;         /* jobs so far, */
    int64_t computed;      /* experts that they used, */
    int64_t left;          /* and those that were left to the GPU */
    int64_t ns;            /* time in them */
} dk_host_job;

/* Bytes of scratch of a job. */
int64_t dk_host_experts_bytes(const dk_experts *experts, int64_t tokens);
/* Do a job (a dk_host_job). Never fails but by its flag, so that a stream that waits for it goes on. */
void dk_host_experts(void *job);
/* The same in parts, by a thread that brings the experts: dk_host_begin, then a part for each division of the
 * job's experts, with their records in matrices [experts * 3] and a nonzero chosen [experts], then the sum.
 * Nonzero after a failure, which is in the flag. */
int dk_host_begin(dk_host_job *job);
int dk_host_part(dk_host_job *job, const dk_matrix *matrices, const uint8_t *chosen);
int dk_host_sum(dk_host_job *job);
/* Show in the flag and in out that the experts cannot be had. */
void dk_host_refuse(dk_host_job *job, int32_t id);

dk_desk *dk_desk_new(void); /* NULL without memory */
/* Nobody waits there any more, and nobody will. */
void dk_desk_free(dk_desk *desk);
/* The next order, as soon as there is one; NULL after `ms`, or when the desk is closed. */
dk_host_job *dk_desk_next(dk_desk *desk, int64_t ms);
/* The order that was taken is done, or refused. */
void dk_desk_done(dk_desk *desk);
/* From now on every order is refused. */
void dk_desk_close(dk_desk *desk);
int dk_desk_is_closed(dk_desk *desk);
/* Copy sizes[i] bytes from sources[i] to targets[i], shared out among the threads. */
int dk_copy_many(dk_run *run, void *const *targets, const void *const *sources, const int64_t *sizes,
                 int64_t count);

/* ---- the layers (layer.c, layer_attention.c, layer_ffn.c) and the head (head.c) ---- */

typedef struct {
    dk_matrix fn;          /* float32 [24, 4 * hidden]; of a head [4, 4 * hidden] */
    const float *base;     /* [24]; of a head [4] */
    const float *scale;    /* [3]; of a head [1] */
    const float *norm;     /* [hidden], of what is read from the streams */
} dk_hyper;

typedef struct {
    dk_hyper hyper;        /* of the attention */
    dk_matrix wq_a;
    dk_matrix wq_b;
    dk_matrix wkv;
    dk_matrix wo_a;        /* [groups * group_rank, heads / groups * head_dim] */
    dk_matrix wo_b;
    const float *q_norm;
    const float *kv_norm;
    const float *sink;
    dk_matrix compressor[2];        /* values, gates; unused where ratio is 0 */
    dk_matrix index_compressor[2];  /* unused without indexer, as are the next two */
    dk_matrix index_wq_b;
    dk_matrix index_weights;
    int64_t ratio;         /* tokens per compressed row, 0 for none */
    int32_t has_indexer;
    int32_t rope;          /* which of the two frequency tables */
    dk_hyper ffn_hyper;
    dk_matrix router;
    const float *bias;     /* [experts], or NULL */
    const int64_t *table;  /* [vocab, k], or NULL */
    dk_experts experts;    /* the w1 of an expert that was not set yet has data NULL */
} dk_layer;

typedef struct {
    int64_t hidden;
    int64_t heads;
    int64_t head_dim;
    int64_t rope_half;     /* rotated pairs of a head */
    int64_t q_rank;
    int64_t groups;
    int64_t group_rank;
    int64_t window;
    int64_t index_heads;   /* 0 when no layer has an indexer */
    int64_t index_dim;
    int64_t top;
    const float *frequencies[2]; /* [rope_half] */
    float routed_scale;
    float norm_eps;
    float hc_eps;
    int32_t iterations;
    int32_t has_int8;      /* products take int8 activations where the types allow */
    dk_matrix embed;
    dk_matrix head;
    dk_experts experts;    /* sizes that hold for every layer */
} dk_network;

/* What one timeline keeps of one layer, and where a chunk's new rows wait for dk_commit. */
typedef struct {
    dk_rows ring;          /* window rows */
    int64_t slots;
    dk_compressor compressor;    /* ring NULL for none; staged is not used */
    dk_compressor indexer;
    const dk_rows *compressed;   /* rows attended to beside the window, or NULL */
    int64_t staged;        /* bytes per token before this layer's, by dk_stage */
} dk_layer_state;

/* Set where every layer stages its rows; returns the bytes that one token stages in all layers. */
int64_t dk_stage(dk_layer_state *states, int64_t count);

typedef struct {
    int64_t start;         /* position of the first token */
    int64_t tokens;
    const int64_t *token_ids;
    float *streams;        /* [tokens, 4, hidden], in and out */
    uint8_t *workspace;    /* dk_workspace_bytes, aligned to 64 */
    int64_t staged_bytes;  /* what dk_stage returned */
    int64_t keys;          /* index keys that the last token sees */
    float *scores;         /* [tokens, keys] scores of the layer at hand, or NULL */
    int32_t pauses_at_selection;
    int32_t pauses_at_experts;   /* else only where an expert was not set yet */
    const dk_matrix *experts;    /* [experts * 3] used instead of the layer's own, or NULL */
    int64_t layer;         /* where the work stands: layer, and its part (0, 1 after the selection, */
    int32_t phase;         /* 2 before the experts) */
    int32_t parts;         /* of the layer's experts that were computed apart, see dk_layer_part */
    int64_t part_row;
    int32_t *selected;     /* set at a pause, to be changed at will: [tokens, top] */
    float *logits;         /* of the router, [tokens, experts] */
    int32_t *ids;          /* [tokens, k] */
    float *weights;        /* [tokens, k] */
} dk_step;

/* The MTP block's way in. */
typedef struct {
    const float *token_norm;     /* [hidden], of the embedding */
    const float *stream_norm;    /* [hidden], of each stream */
    dk_matrix token_projection;  /* [hidden, hidden] */
    dk_matrix stream_projection;
} dk_draft;

/* Set w1, w3, w2 of one expert in a layer's records, which other threads may be reading. */
void dk_set_expert(dk_matrix *records, const dk_matrix *three);
/* Bytes of working memory of a chunk, staged rows included. */
int64_t dk_workspace_bytes(const dk_network *network, int64_t tokens, int64_t keys, int64_t staged_bytes,
                           int32_t threads);
/* Begin a chunk: step->streams = the embedding of the tokens in every stream, phase and layer 0. */
int dk_begin(dk_run *run, const dk_network *network, dk_step *step);
/* The same for the draft block: from streams [tokens, 4, hidden] and the token after each. */
int dk_begin_draft(dk_run *run, const dk_network *network, const dk_draft *draft, dk_step *step,
                   const float *streams);
/* Carry the streams through the layers from where the work stands. Returns 0 when all are done, 1 when
 * run->poll asked to stop, 2 at a pause; after that another call goes on. States are read, but for rows
 * past the end of the timeline. Row invariant when run->is_small or without int8. */
int dk_layers(dk_run *run, const dk_network *network, const dk_layer *layers, const dk_layer_state *states,
              int64_t count, dk_step *step);
/* At a pause before the experts: compute those with a nonzero chosen [experts], whose records are set. Once all
 * were, dk_layers goes on behind them. The first part has the shared expert too and may choose no other. Row
 * invariant as dk_layers, with the same bits as without parts. */
int dk_layer_part(dk_run *run, const dk_network *network, const dk_layer *layers, dk_step *step,
                  const uint8_t *chosen);
/* At a pause before the experts, before or after some were computed: ids [tokens, most] as dk_route_guess gives them
 * for the next layer, whose router sees what this layer's saw. There must be a next layer, and it must not route by
 * a table. step->logits are lost. Row invariant. */
int dk_layer_guess(dk_run *run, const dk_network *network, const dk_layer *layers, const dk_step *step,
                   int32_t *ids, int64_t most);
/* logits [count, vocab] of `count` tokens from `first` on. Row invariant as dk_layers. */
int dk_head(dk_run *run, const dk_network *network, const dk_hyper *hyper, const dk_step *step, float *logits,
            int64_t first, int64_t count);
/* Let the staged rows of all layers into the rings. */
void dk_commit(const dk_layer_state *states, int64_t count, const dk_step *step);

/* ---- sampling (sample.c, sample_token.c) ---- */

typedef struct {
    const uint8_t *seen;   /* [n] 1 for a token of the prompt or the reply, else 0 */
    const int32_t *generated;  /* [n] times that the reply has it; 0 where it was not seen */
    const int64_t *bias_ids;   /* [bias_count] ascending */
    const double *bias;    /* finite or -inf */
    int64_t bias_count;
    double repetition;
    double presence;
    double frequency;
    double scale;          /* 1 / temperature; 0: the largest score wins */
    double top_p;
    double min_p;
    int64_t top_k;
} dk_sampling;

/* Bytes of scratch for one call. */
int64_t dk_sample_scratch_bytes(int64_t n);
/* The token that u, in [0, 1), chooses by logits [n], as kernels/sample.py defines it; -1 when a logit is
 * NaN or +inf or every token is banned. weights [n] gets what u chooses among unless NULL or scale is 0. */
int64_t dk_sample(double *weights, const float *logits, int64_t n, const dk_sampling *rules, double u,
                  void *scratch);
/* Index of the largest of n logits (ties to the lowest); -1 when one is NaN or +inf or all are -inf. */
int64_t dk_argmax(const float *logits, int64_t n);
/* Whether all count values are finite. */
int dk_all_finite(const float *x, int64_t count);

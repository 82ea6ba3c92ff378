/* What the files of the layer share: the working memory of a chunk, short forms of inputs and products. */

#ifndef EDGEDSV4_LAYER_H
#define EDGEDSV4_LAYER_H

#include "native.h"

/* Where everything of a chunk lies in its working memory. The parts of attention, experts and draft come
 * one after another in time and share their place. */
typedef struct {
    uint8_t *staged;     /* rows of all layers until dk_commit */
    float *cosines[2], *sines[2]; /* [tokens, rope_half] */
    float *mix, *post, *comb;     /* [tokens, 24], [tokens, 4], [tokens, 16] */
    float *x;            /* [tokens, hidden], what a sublayer reads */
    void *x_memory;      /* its int8 form */
    float *out;          /* [tokens, hidden], what a sublayer gives */
    float *qr;           /* attention: [tokens, q_rank] */
    void *qr_memory;
    float *q, *attended; /* [tokens, heads, head_dim] */
    void *attended_memory;
    dk_input *inputs;    /* [groups] */
    dk_product *list;    /* [groups] */
    float *kv;           /* [tokens, head_dim] */
    float *index_q, *index_weights;
    int32_t *selected;
    void *index_scratch;
    float *grouped;      /* [tokens, groups * group_rank] */
    void *grouped_memory;
    float *logits;       /* experts: of the router */
    int32_t *ids;
    float *weights;
    void *expert_scratch;
    float *token_rows;   /* draft: [tokens, hidden], and projected */
    float *token_out;
    void *token_memory;
    float *stream_rows;  /* [tokens * 4, hidden] */
    void *stream_memory;
    int64_t bytes;
} dk_buffers;

/* Lay out the working memory; from base NULL only `bytes` means something. */
void dk_lay_out(dk_buffers *b, const dk_network *network, int64_t tokens, int64_t keys, int64_t staged_bytes,
                int32_t threads, uint8_t *base);

/* Window rows that a chunk stages. */
dk_rows dk_staged_window(const dk_layer_state *state, const dk_step *step);
/* A compressor with the place of its staged raw rows filled in. */
dk_compressor dk_staged_compressor(const dk_layer_state *state, const dk_step *step);
dk_compressor dk_staged_indexer(const dk_layer_state *state, const dk_step *step);

/* Rows x [tokens, columns] as an input, rounded to int8 too when `has_int8`. */
int dk_make_input(dk_run *run, dk_input *input, const float *x, int64_t columns, int64_t tokens, void *memory,
                  int has_int8);
/* x, post and comb of one sublayer from the streams. */
int dk_read_streams(dk_run *run, const dk_network *network, const dk_hyper *hyper, const dk_step *step,
                    dk_buffers *b);
/* The streams after the sublayer's output b->out. */
int dk_write_streams(dk_run *run, const dk_network *network, const dk_step *step, dk_buffers *b);

/* The three parts of a layer: up to the selected rows, up to the chosen experts, the experts. */
int dk_layer_rows(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_layer_state *state,
                  const dk_step *step, dk_buffers *b);
int dk_layer_attention(dk_run *run, const dk_network *network, const dk_layer *layer,
                       const dk_layer_state *state, const dk_step *step, dk_buffers *b);
int dk_layer_route(dk_run *run, const dk_network *network, const dk_layer *layer, const dk_step *step,
                   dk_buffers *b);
int dk_layer_experts(dk_run *run, const dk_network *network, const dk_layer *layer, dk_step *step,
                     dk_buffers *b);

/* Whether the tokens of a chunk choose among more compressed rows than they may attend to. */
DK_INLINE int dk_selects(const dk_network *network, const dk_layer *layer, const dk_step *step)
{
    return layer->has_indexer && (step->start + step->tokens) / layer->ratio > network->top;
}

/* Stand before the first part of step->layer. */
DK_INLINE void dk_enter_layer(dk_step *step)
{
    step->phase = 0;
    step->parts = 0;
    step->part_row = 0;
}

/* The next bytes of a memory, aligned to 64. */
DK_INLINE void *dk_take(uintptr_t *at, int64_t bytes)
{
    void *taken = (void *)*at;
    *at += (uintptr_t)((bytes + 63) & ~(int64_t)63);
    return taken;
}

DK_INLINE dk_product dk_product_of(float *y, int64_t y_stride, const dk_matrix *w, const dk_input *x,
                                   int64_t tokens)
{
    return (dk_product){y, y_stride, w, 0, w->rows, x, tokens};
}

/* An input that begins at a row of another. */
DK_INLINE dk_input dk_rows_of_input(const dk_input *input, int64_t first, int64_t columns)
{
    dk_input rows = *input;
    if (rows.x)
        rows.x += first * input->stride;
    if (rows.q) {
        rows.q += first * columns;
        rows.scale += first * (columns / 32);
        rows.sum32 += first * (columns / 32);
        rows.sum16 += first * (columns / 16);
    }
    return rows;
}

#endif

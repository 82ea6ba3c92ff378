/* What the two ways of computing the experts of a chunk share: expert_ffn.c, expert_ffn_few.c. */
#ifndef EDGEDSV4_EXPERT_FFN_H
#define EDGEDSV4_EXPERT_FFN_H

#include "layer.h"
#include "products.h"

/* An expert and its rows, as expert_ffn_few.c shares them out. */
typedef struct {
    int64_t count; /* rows */
    int64_t width;
    float limit;
    float *gate_rows, *up_rows, *y;
    dk_input x, hidden; /* hidden.q is NULL where the down product takes float32 */
    dk_product gate, up, down;
    dk_kernel gate_kernel, up_kernel, down_kernel;
    int64_t rows; /* of gate and up, per task */
    int64_t end;  /* tasks of the first piece of work up to here */
} dk_expert_piece;

/* Rows of one expert among the pairs. */
typedef struct {
    int32_t expert;
    int32_t first; /* row of its first pair */
    int32_t count;
} dk_pair_group;

typedef struct {
    const dk_experts *experts;
    const dk_input *x;
    int64_t tokens;
    int64_t pairs;
    int64_t first; /* row of the part at hand */
    int64_t rows;  /* of the part */
    int64_t group_count;
    dk_pair_group *groups;
    int32_t *next;  /* [experts + 1] */
    int32_t *row;   /* [tokens * k] row of each slot, -1 without */
    int32_t *token; /* [pairs] token of each row */
    dk_input gathered;
    float *gathered_x; /* the same memory as y: read before y is written */
    int8_t *gathered_q;
    float *gathered_scale, *gathered_sum32, *gathered_sum16;
    float *gate, *up, *shared_gate, *shared_up;
    void *hidden_memory, *shared_memory;
    float *y, *shared_y;
    dk_input *inputs;
    dk_product *list;
    dk_expert_piece *pieces;
    const float *weights;
    float *out;
    int takes_x, takes_q; /* what the gate and up products read */
} dk_expert_work;


DK_INLINE const dk_matrix *dk_expert_matrix(const dk_expert_work *w, int64_t expert, int which)
{
    return &w->experts->matrices[expert * 3 + which];
}

/* Most tokens that dk_experts_of_few takes; any kernel has them in one block. */
enum { DK_FEW_EXPERT_TOKENS = 16 };

/* Everything after the gathering, in two pieces of work; the same bits. */
int dk_experts_of_few(dk_run *run, dk_expert_work *w);
/* Columns [first, first + count) of a token's output from what its experts gave. */
void dk_add_slots(const dk_expert_work *w, int64_t token, int64_t first, int64_t count);

/* dk_swiglu in this thread (swiglu.c). */
void dk_swiglu_part(float *y, const float *gate, const float *up, int64_t count, float limit);
/* dk_quantize_rows in two steps (quantize_rows.c): where results go, and columns [first, first + count) of one
 * token, multiples of 32, in this thread. */
void dk_place_quantized(dk_input *input, void *memory, int64_t tokens, int64_t columns);
void dk_quantize_columns(const dk_input *input, int64_t token, int64_t columns, int64_t first, int64_t count);

#endif

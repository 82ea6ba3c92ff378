/* Rows of stored matrices as float32: the table of block types, and embedding rows. */

#include "decode.h"
#include "products.h"

typedef struct {
    const char *name;
    int32_t type;
} dk_named_type;

static const dk_named_type TYPES[] = {
    {"F32", DK_F32},
    {"F16", DK_F16},
    {"BF16", DK_BF16},
    {"F64", DK_F64},
    {"FP8_E4M3", DK_FP8_E4M3},
    {"FP8_E5M2", DK_FP8_E5M2},
    {"E8M0", DK_E8M0},
    {"FP4_E2M1", DK_FP4_E2M1},
    {"F4", DK_FP4_E2M1},
    {"MXFP4", DK_MXFP4},
    {"NVFP4", DK_NVFP4},
    {"Q8_0", DK_Q8_0},
    {"Q4_0", DK_Q4_0},
    {"Q4_1", DK_Q4_1},
    {"Q5_0", DK_Q5_0},
    {"Q5_1", DK_Q5_1},
    {"IQ4_NL", DK_IQ4_NL},
    {"TQ1_0", DK_TQ1_0},
    {"TQ2_0", DK_TQ2_0},
    {"Q2_K", DK_Q2_K},
    {"Q3_K", DK_Q3_K},
    {"Q4_K", DK_Q4_K},
    {"Q5_K", DK_Q5_K},
    {"Q6_K", DK_Q6_K},
    {"IQ4_XS", DK_IQ4_XS},
    {"IQ1_S", DK_IQ1_S},
    {"IQ1_M", DK_IQ1_M},
    {"IQ2_XXS", DK_IQ2_XXS},
    {"IQ2_XS", DK_IQ2_XS},
    {"IQ2_S", DK_IQ2_S},
    {"IQ3_XXS", DK_IQ3_XXS},
    {"IQ3_S", DK_IQ3_S},
};

static const dk_decoder *const DECODERS[DK_TYPE_END] = {
    [DK_F32] = &dk_decode_f32,           [DK_F16] = &dk_decode_f16,
    [DK_BF16] = &dk_decode_bf16,         [DK_F64] = &dk_decode_f64,
    [DK_FP8_E4M3] = &dk_decode_fp8_e4m3, [DK_FP8_E5M2] = &dk_decode_fp8_e5m2,
    [DK_E8M0] = &dk_decode_e8m0,         [DK_FP4_E2M1] = &dk_decode_fp4_e2m1,
    [DK_MXFP4] = &dk_decode_mxfp4,       [DK_NVFP4] = &dk_decode_nvfp4,
    [DK_Q8_0] = &dk_decode_q8_0,         [DK_Q4_0] = &dk_decode_q4_0,
    [DK_Q4_1] = &dk_decode_q4_1,         [DK_Q5_0] = &dk_decode_q5_0,
    [DK_Q5_1] = &dk_decode_q5_1,         [DK_IQ4_NL] = &dk_decode_iq4_nl,
    [DK_TQ1_0] = &dk_decode_tq1_0,       [DK_TQ2_0] = &dk_decode_tq2_0,
    [DK_Q2_K] = &dk_decode_q2_k,         [DK_Q3_K] = &dk_decode_q3_k,
    [DK_Q4_K] = &dk_decode_q4_k,         [DK_Q5_K] = &dk_decode_q5_k,
    [DK_Q6_K] = &dk_decode_q6_k,         [DK_IQ4_XS] = &dk_decode_iq4_xs,
    [DK_IQ1_S] = &dk_decode_iq1_s,       [DK_IQ1_M] = &dk_decode_iq1_m,
    [DK_IQ2_XXS] = &dk_decode_iq2_xxs,   [DK_IQ2_XS] = &dk_decode_iq2_xs,
    [DK_IQ2_S] = &dk_decode_iq2_s,       [DK_IQ3_XXS] = &dk_decode_iq3_xxs,
    [DK_IQ3_S] = &dk_decode_iq3_s,
};

int dk_type_id(const char *name)
{
    for (size_t i = 0; i < sizeof TYPES / sizeof TYPES[0]; i++)
        if (strcmp(TYPES[i].name, name) == 0)
            return TYPES[i].type;
    return -1;
}

const dk_decoder *dk_decoder_of(int type) { return type >= 0 && type < DK_TYPE_END ? DECODERS[type] : NULL; }

dk_decode_fn dk_decode_fn_of(int type)
{
    const dk_decoder *decoder = dk_decoder_of(type);
    if (decoder == NULL)
        return NULL;
#ifdef DK_X86
    if (dk_level >= DK_LEVEL_AVX512)
        return decoder->avx512;
    if (dk_level >= DK_LEVEL_AVX2)
        return decoder->avx2;
#endif
    return decoder->scalar;
}

void dk_decode_row(float *y, const dk_matrix *w, int64_t row, int64_t first_column, int64_t columns)
{
    dk_decode_fn_of(w->type)(y, w, row, first_column, columns);
}

int dk_unpack_row(uint8_t *u, float *scale, float *offset, const dk_matrix *w, int64_t row,
                  int64_t first_column, int64_t columns)
{
    const dk_unpacker *unpacker = dk_unpacker_of(w->type);
    if (unpacker == NULL)
        return 0;
    dk_unpack_of(unpacker)(u, scale, offset, w, row, first_column, columns);
    return unpacker->group;
}

void dk_apply_factor(float *y, const dk_matrix *w, int64_t columns)
{
    if (w->factor == 1.0f || w->type == DK_F64)
        return;
    for (int64_t i = 0; i < columns; i++)
        y[i] *= w->factor;
}

/* Columns per task: some microseconds of decoding. */
enum { EMBED_COLUMNS = 1 << 14 };

typedef struct {
    float *y;
    const dk_matrix *w;
    const int64_t *ids;
    int64_t tokens;
    int64_t tokens_per_task;
} dk_embedding;

static void embed_task(void *arg, int64_t task)
{
    const dk_embedding *embedding = arg;
    const dk_matrix *w = embedding->w;
    int64_t first = task * embedding->tokens_per_task;
    int64_t last = dk_min(first + embedding->tokens_per_task, embedding->tokens);
    for (int64_t t = first; t < last; t++)
        dk_decode_row(embedding->y + t * w->columns, w, embedding->ids[t], 0, w->columns);
}

int dk_embed(dk_run *run, float *y, const dk_matrix *w, const int64_t *ids, int64_t tokens)
{
    int64_t per_task = dk_max(1, EMBED_COLUMNS / dk_max(1, w->columns));
    dk_embedding embedding = {y, w, ids, tokens, per_task};
    return dk_parallel(run, (tokens + per_task - 1) / per_task, embed_task, &embedding);
}

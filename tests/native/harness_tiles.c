/* Products on tiles are those without, but for the order of the sums. */

#include "harness.h"

#include <math.h>

static const char *const types[] = {"Q8_0", "Q4_0", "MXFP4",   "NVFP4",  "FP4_E2M1", "Q2_K",   "Q3_K",  "Q4_K",
                                    "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS",  "IQ4_NL", "IQ4_XS"};

/* Random blocks whose scales are finite, whatever bytes of them those are. */
static dk_matrix finite_matrix(const char *type, int64_t rows, int64_t columns)
{
    dk_matrix m = matrix(type, rows, columns);
    uint8_t *data = (uint8_t *)m.data, *scale = (uint8_t *)m.scale;
    for (int64_t i = 0; i < rows * m.row_bytes; i++)
        data[i] &= 0x3f;
    for (int64_t i = 0; scale && i < rows * m.scale_stride; i++)
        scale[i] &= 0x3f;
    return m;
}

static void check_product(const char *type, int64_t rows, int64_t columns, int64_t tokens, int threads)
{
    dk_run run = {.threads = threads};
    dk_matrix m = finite_matrix(type, rows, columns);
    dk_input input = {.x = floats(tokens * columns), .stride = columns};
    dk_quantize_rows(&run, &input, scratch(dk_quantized_bytes(tokens, columns)), tokens, columns);
    float *y[2] = {floats(tokens * rows), floats(tokens * rows)}, largest = 0.0f, apart = 0.0f;
    for (int i = 0; i < 2; i++) {
        dk_product product = {y[i], rows, &m, 0, rows, &input, tokens};
        dk_set_isa(DK_LEVEL_AMX - i);
        dk_products(&run, &product, 1);
    }
    dk_set_isa(DK_LEVEL_AMX);
    for (int64_t i = 0; i < tokens * rows; i++) {
        expect(isfinite(y[0][i]), type);
        largest = fmaxf(largest, fabsf(y[0][i]));
        apart = fmaxf(apart, fabsf(y[0][i] - y[1][i]));
    }
    expect(largest > 0.0f && apart < 1e-5f * largest, type);
    free_all();
}

void check_tiles(int threads)
{
    if (dk_isa() != DK_LEVEL_AMX)
        return;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        check_product(types[i], 37, 1280, 9, threads);
        check_product(types[i], 16, 256, 16, threads);
        check_product(types[i], 17, 512, 45, threads);
    }
    check_product("Q8_0", 19, 32, 25, threads);
    check_product("MXFP4", 35, 1056, 33, threads);
}

/* Products at one level beside those at another: every level is near the scalar one, which the tests in Python
 * judge; and levels that share the text of their products, AVX2 and AVX-VNNI or its emulation, give the same
 * bits. */

#include "harness.h"

static const char *const types[] = {"Q8_0", "Q4_0",    "MXFP4",  "NVFP4",   "FP4_E2M1", "Q2_K",   "Q3_K", "Q4_K",
                                    "Q5_K", "Q6_K",    "IQ2_XXS", "IQ2_XS", "IQ3_XXS",  "IQ4_NL", "IQ4_XS"};
enum { TYPE_COUNT = sizeof types / sizeof types[0] };

static int is_same(float a, float b)
{
    return dk_bits_of_float(a) == dk_bits_of_float(b) || (isnan(a) && isnan(b));
}

static void compare(const char *type, int64_t columns, int64_t tokens, int is_small)
{
    int64_t rows = 23;
    dk_run run = {.threads = 2, .is_small = is_small};
    dk_matrix m = matrix(type, rows, columns);
    dk_input input = {.x = floats(tokens * columns), .stride = columns};
    dk_quantize_rows(&run, &input, scratch(dk_quantized_bytes(tokens, columns)), tokens, columns);
    float *results[2];
    for (int i = 0; i < 2; i++) {
        results[i] = floats(tokens * rows);
        dk_product product = {results[i], rows, &m, 0, rows, &input, tokens};
        dk_set_isa(i ? DK_LEVEL_AVX_VNNI : DK_LEVEL_AVX2);
        dk_products(&run, &product, 1);
    }
    for (int64_t i = 0; i < tokens * rows; i++)
        expect(is_same(results[0][i], results[1][i]), type);
    free_all();
}

static void check_same_bits(void)
{
    static const int64_t counts[] = {1, 2, 3, 7, 16, 21};
    int before = dk_isa();
    if (dk_set_isa(DK_LEVEL_AVX_VNNI) != 0)
        return;
    for (int i = 0; i < TYPE_COUNT; i++) {
        for (int j = 0; j < 6; j++) {
            compare(types[i], 1280, counts[j], counts[j] <= 16);
            compare(types[i], 256, counts[j], 0);
        }
    }
    compare("Q8_0", 96, 5, 1);
    compare("Q4_0", 288, 5, 1);
    compare("MXFP4", 32, 5, 1);
    compare("FP4_E2M1", 544, 5, 1);
    dk_set_isa(before);
}

/* Sum of |x| times the largest |w| of the group of 32. */
static double magnitude(const float *x, const float *w, int64_t columns)
{
    double sum = 0.0;
    for (int64_t g = 0; g < columns; g += 32) {
        double largest = 0.0;
        for (int64_t i = g; i < g + 32; i++)
            largest = fabs(w[i]) > largest || isnan(w[i]) ? fabs(w[i]) : largest;
        for (int64_t i = g; i < g + 32; i++)
            sum += fabs(x[i]) * largest;
    }
    return sum;
}

static void near_scalar(const char *type, int64_t columns, int64_t tokens, int level)
{
    int64_t rows = 11;
    dk_run run = {.threads = 2};
    dk_matrix m = matrix(type, rows, columns);
    dk_input input = {.x = floats(tokens * columns), .stride = columns};
    dk_quantize_rows(&run, &input, scratch(dk_quantized_bytes(tokens, columns)), tokens, columns);
    float *scalar = floats(tokens * rows), *result = floats(tokens * rows), *w = floats(columns);
    dk_product product = {scalar, rows, &m, 0, rows, &input, tokens};
    dk_set_isa(DK_LEVEL_SCALAR);
    dk_products(&run, &product, 1);
    product.y = result;
    dk_set_isa(level);
    dk_products(&run, &product, 1);
    for (int64_t r = 0; r < rows; r++) {
        dk_decode_row(w, &m, r, 0, columns);
        for (int64_t t = 0; t < tokens; t++) {
            double limit = 1e-6 * magnitude(input.x + t * columns, w, columns);
            if (limit < 1e30)
                expect(fabs(scalar[t * rows + r] - result[t * rows + r]) <= limit, type);
        }
    }
    free_all();
}

static void check_against_scalar(void)
{
    int before = dk_isa();
    for (int level = 1; level <= DK_LEVEL_NEON_DOT; level++) {
        for (int i = 0; i < TYPE_COUNT && dk_set_isa(level) == 0; i++) {
            near_scalar(types[i], 1280, 3, level);
            near_scalar(types[i], 256, 18, level);
        }
    }
    dk_set_isa(before);
}

void check_levels(void)
{
    check_same_bits();
    check_against_scalar();
}

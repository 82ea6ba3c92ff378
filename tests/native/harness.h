/* What the harness files share: memory that ends where a sanitizer sees it, numbers, matrices. */

#ifndef EDGEDSV4_HARNESS_H
#define EDGEDSV4_HARNESS_H

#include <stdint.h>

#include "native.h"

/* Memory of this size exactly, until free_all; filled with small random floats, or bytes. */
float *floats(int64_t count);
uint8_t *bytes(int64_t count);
/* The same aligned to 64, for scratch. */
void *scratch(int64_t size);
void free_all(void);

/* A whole number in [0, end). */
int64_t below(int64_t end);

/* A matrix of a block type, its bytes at an odd address. Scales of blocks may be anything. */
dk_matrix matrix(const char *type, int64_t rows, int64_t columns);
/* Small numbers as F32, or as Q8_0 with sane scales. */
dk_matrix sane_matrix(const char *type, int64_t rows, int64_t columns);

/* Rows at rest with room for `count`, holding small numbers. */
dk_rows rows_at_rest(int format, int32_t width, int32_t rope, int64_t count);

/* End the program with a message unless it holds. */
void expect(int holds, const char *what);

/* harness_levels.c */
void check_levels(void);

/* harness_experts.c; experts are those of a layer, a shared one is left out */
void check_host_experts(dk_run *run, dk_experts experts, int64_t tokens);
/* harness_network.c */
void check_network(int threads);
/* harness_tiles.c; nothing where the level in use has no tiles */
void check_tiles(int threads);

#endif

/* The tile instructions in C, for machines without them: with -DDK_TILES_IN_SOFTWARE the kernels that use tiles
 * run where AVX-512 is, at the level "amx". Stricter than a CPU: a shape that does not fit ends the program. */

#ifndef EDGEDSV4_SOFTWARE_TILES_H
#define EDGEDSV4_SOFTWARE_TILES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t data[16][64];
    int rows;
    int bytes;
} software_tile;

static _Thread_local software_tile software_tiles[8];

static inline software_tile *software_tile_of(int tile)
{
    software_tile *t = &software_tiles[tile];
    if (t->rows == 0 || t->bytes == 0)
        abort();
    return t;
}

static inline void software_shape(const void *shapes)
{
    const uint8_t *p = shapes;
    if (p[0] != 1 || p[1] != 0)
        abort();
    memset(software_tiles, 0, sizeof software_tiles);
    for (int tile = 0; tile < 8; tile++) {
        uint16_t bytes;
        memcpy(&bytes, p + 16 + 2 * tile, 2);
        if (bytes > 64 || p[48 + tile] > 16 || (bytes == 0) != (p[48 + tile] == 0))
            abort();
        software_tiles[tile].bytes = bytes;
        software_tiles[tile].rows = p[48 + tile];
    }
}

static inline void software_release(void) { memset(software_tiles, 0, sizeof software_tiles); }

static inline void software_zero(int tile)
{
    software_tile *t = software_tile_of(tile);
    memset(t->data, 0, sizeof t->data);
}

static inline void software_load(int tile, const void *from, int64_t stride)
{
    software_tile *t = software_tile_of(tile);
    memset(t->data, 0, sizeof t->data);
    for (int row = 0; row < t->rows; row++)
        memcpy(t->data[row], (const uint8_t *)from + row * stride, (size_t)t->bytes);
}

static inline void software_store(int tile, void *to, int64_t stride)
{
    const software_tile *t = software_tile_of(tile);
    for (int row = 0; row < t->rows; row++)
        memcpy((uint8_t *)to + row * stride, t->data[row], (size_t)t->bytes);
}

/* sums += signed a times b, signed or not. */
static inline void software_dots(int sums, int a, int b, int is_signed)
{
    software_tile *c = software_tile_of(sums);
    const software_tile *left = software_tile_of(a), *right = software_tile_of(b);
    if (left->rows != c->rows || right->bytes != c->bytes || left->bytes != 4 * right->rows)
        abort();
    for (int row = 0; row < c->rows; row++) {
        for (int column = 0; column < c->bytes / 4; column++) {
            int32_t sum;
            memcpy(&sum, &c->data[row][4 * column], 4);
            for (int k = 0; k < left->bytes; k++) {
                uint8_t byte = right->data[k / 4][4 * column + k % 4];
                sum += (int8_t)left->data[row][k] * (is_signed ? (int8_t)byte : byte);
            }
            memcpy(&c->data[row][4 * column], &sum, 4);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(shapes) software_shape(shapes)
#define _tile_release() software_release()
#define _tile_zero(tile) software_zero(tile)
#define _tile_loadd(tile, from, stride) software_load(tile, from, stride)
#define _tile_stored(tile, to, stride) software_store(tile, to, stride)
#define _tile_dpbssd(sums, a, b) software_dots(sums, a, b, 1)
#define _tile_dpbsud(sums, a, b) software_dots(sums, a, b, 0)

#endif

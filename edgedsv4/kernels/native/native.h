/* What the C files share and Python does not see: instruction sets, block type numbers, small conversions.
 *
 * Everything is compiled for the oldest CPU of its architecture; a function that uses more carries one of
 * the DK_... attributes, and is called only when dk_level allows it. Functions with different attributes are
 * not inlined into each other, so a whole loop stands inside one such function. */

#ifndef EDGEDSV4_NATIVE_H
#define EDGEDSV4_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#define DK_X86 1
#include <immintrin.h>
#define DK_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
/* AVX-VNNI: the dot product of bytes in registers of AVX2, of CPUs without AVX-512. For tests it can be made of
 * instructions of AVX2, which every machine has. */
#if defined(DK_EMULATE_AVX_VNNI) || (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define DK_HAS_AVX_VNNI 1
#endif
#if defined(DK_EMULATE_AVX_VNNI) || !defined(DK_HAS_AVX_VNNI)
#define DK_AVX_VNNI DK_AVX2
#else
#define DK_AVX_VNNI __attribute__((target("avx2,fma,f16c,bmi,bmi2,avxvnni")))
#endif
#define DK_AVX512 __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq")))
#define DK_VNNI __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
/* Permutations of bytes; the CPUs that have them have Galois fields too. */
#define DK_VBMI                                                                                            \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,"          \
                          "avx512vbmi,gfni")))
/* Tiles (AMX) have to be asked for, which is known for Linux; the compilers have them from these versions on. */
#if defined(__linux__) && (__clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11))
#define DK_TILES 1
#define DK_AMX                                                                                             \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,"          \
                          "amx-tile,amx-int8")))
#endif
#elif defined(__aarch64__)
#define DK_NEON 1
#include <arm_neon.h>
/* Dot products of signed bytes. clang names features, gcc architectures. */
#if defined(__clang__)
#define DK_NEON_DOT __attribute__((target("dotprod")))
#else
#define DK_NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#endif

#define DK_ALIGNED __attribute__((aligned(64)))
#define DK_INLINE static inline __attribute__((always_inline, unused))

/* Experts that can be guessed for one token. */
enum { DK_MOST_GUESSES = 64 };

/* Instruction sets as dk_isa numbers them. Compare with >= only inside #ifdef DK_X86. */
enum {
    DK_LEVEL_SCALAR = 0,
    DK_LEVEL_AVX2 = 1,
    DK_LEVEL_AVX_VNNI = 2,
    DK_LEVEL_AVX512 = 3,
    DK_LEVEL_VNNI = 4,
    DK_LEVEL_VBMI = 5,
    DK_LEVEL_AMX = 6,
    DK_LEVEL_NEON = 10,
    DK_LEVEL_NEON_DOT = 11
};

/* The level in use (isa.c); written by dk_set_isa only, while no kernel runs. */
extern int dk_level __attribute__((visibility("hidden")));

/* Block types: the numbers of ggml, and from 100 those that only safetensors has. */
enum {
    DK_F32 = 0,
    DK_F16 = 1,
    DK_Q4_0 = 2,
    DK_Q4_1 = 3,
    DK_Q5_0 = 6,
    DK_Q5_1 = 7,
    DK_Q8_0 = 8,
    DK_Q2_K = 10,
    DK_Q3_K = 11,
    DK_Q4_K = 12,
    DK_Q5_K = 13,
    DK_Q6_K = 14,
    DK_IQ2_XXS = 16,
    DK_IQ2_XS = 17,
    DK_IQ3_XXS = 18,
    DK_IQ1_S = 19,
    DK_IQ4_NL = 20,
    DK_IQ3_S = 21,
    DK_IQ2_S = 22,
    DK_IQ4_XS = 23,
    DK_F64 = 28,
    DK_IQ1_M = 29,
    DK_BF16 = 30,
    DK_TQ1_0 = 34,
    DK_TQ2_0 = 35,
    DK_MXFP4 = 39,
    DK_NVFP4 = 40,
    DK_FP8_E4M3 = 100,
    DK_FP8_E5M2 = 101,
    DK_E8M0 = 102,
    DK_FP4_E2M1 = 103, /* F4 too */
    DK_TYPE_END = 104
};

DK_INLINE float dk_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

DK_INLINE uint32_t dk_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* IEEE half to float, exactly; the payload of a NaN is kept. */
DK_INLINE float dk_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00)
        return dk_float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x400) {
        float small = (float)magnitude * 0x1p-24f;
        return dk_float_of_bits(sign | dk_bits_of_float(small));
    }
    return dk_float_of_bits(sign | ((magnitude << 13) + 0x38000000u));
}

DK_INLINE float dk_bf16(uint16_t bits) { return dk_float_of_bits((uint32_t)bits << 16); }

/* OCP E4M3 ("fn"): no infinity, 0x7f and 0xff are NaN. */
DK_INLINE float dk_e4m3(uint8_t byte)
{
    uint32_t sign = (uint32_t)(byte & 0x80) << 24;
    uint32_t magnitude = byte & 0x7f;
    if (magnitude == 0x7f)
        return dk_float_of_bits(sign | 0x7fc00000u);
    if (magnitude < 8) {
        float small = (float)magnitude * 0x1p-9f;
        return dk_float_of_bits(sign | dk_bits_of_float(small));
    }
    return dk_float_of_bits(sign | ((magnitude << 20) + (120u << 23)));
}

/* A power of two: 2^(byte - 127); 0xff is NaN. */
DK_INLINE float dk_e8m0(uint8_t byte)
{
    if (byte == 0)
        return 0x1p-127f;
    return dk_float_of_bits(byte == 0xff ? 0x7fc00000u : (uint32_t)byte << 23);
}

/* 16, 32 and 64 bits from any address. */
DK_INLINE uint16_t dk_load16(const uint8_t *p)
{
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

DK_INLINE uint32_t dk_load32(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

DK_INLINE uint64_t dk_load64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

DK_INLINE int64_t dk_min(int64_t a, int64_t b) { return a < b ? a : b; }
DK_INLINE int64_t dk_max(int64_t a, int64_t b) { return a > b ? a : b; }
/* Parts of at most `size` that `count` things make. */
DK_INLINE int64_t dk_parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

#endif

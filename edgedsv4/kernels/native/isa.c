/* Which instruction set the kernels use: the best of this machine, or a lower one for tests. */

#include "native.h"

#if defined(DK_X86)
#include <cpuid.h>
#elif defined(DK_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(DK_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

int dk_level = DK_LEVEL_SCALAR;

#if defined(DK_X86)
static int has_avx_vnni(void)
{
#if defined(DK_EMULATE_AVX_VNNI)
    return 1;
#elif defined(DK_HAS_AVX_VNNI)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#else
    return 0;
#endif
}
#endif

#if defined(DK_NEON)
static int has_neon_dot(void)
{
#if defined(__linux__)
    enum { ASIMDDP = 1 << 20 };
    return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
#elif defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}
#endif

#if defined(DK_TILES)
/* Whether the CPU has int8 tiles and the system lets this process keep their eight kilobytes; asked once. */
static int has_tiles(void)
{
#if defined(DK_TILES_IN_SOFTWARE)
    return 1;
#else
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18, TILE_BIT = 1 << 24, INT8_BIT = 1 << 25 };
    static int answer = -1;
    unsigned a, b, c, d;
    if (answer < 0)
        answer = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILE_BIT) && (d & INT8_BIT) &&
                 syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
    return answer;
#endif
}
#endif

static int is_available(int level)
{
#if defined(DK_X86)
    /* These answers include whether the system saves the wide registers. */
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int has_avx512_vbmi = has_avx512 && __builtin_cpu_supports("avx512vnni") &&
                          __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
    switch (level) {
    case DK_LEVEL_SCALAR: return 1;
    case DK_LEVEL_AVX2: return has_avx2;
    case DK_LEVEL_AVX_VNNI: return has_avx2 && has_avx_vnni();
    case DK_LEVEL_AVX512: return has_avx512;
    case DK_LEVEL_VNNI: return has_avx512 && __builtin_cpu_supports("avx512vnni");
    case DK_LEVEL_VBMI: return has_avx512_vbmi;
#if defined(DK_TILES)
    case DK_LEVEL_AMX: return has_avx512_vbmi && has_tiles();
#endif
    default: return 0;
    }
#elif defined(DK_NEON)
    return level == DK_LEVEL_SCALAR || level == DK_LEVEL_NEON || (level == DK_LEVEL_NEON_DOT && has_neon_dot());
#else
    return level == DK_LEVEL_SCALAR;
#endif
}

__attribute__((constructor)) static void choose_best(void)
{
    static const int order[] = {DK_LEVEL_NEON_DOT, DK_LEVEL_NEON,   DK_LEVEL_AMX,      DK_LEVEL_VBMI,
                                DK_LEVEL_VNNI,     DK_LEVEL_AVX512, DK_LEVEL_AVX_VNNI, DK_LEVEL_AVX2,
                                DK_LEVEL_SCALAR};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        if (is_available(order[i])) {
            dk_level = order[i];
            return;
        }
    }
}

int dk_isa(void) { return dk_level; }

int dk_set_isa(int level)
{
    if (!is_available(level))
        return -1;
    dk_level = level;
    return 0;
}

const char *dk_isa_name(int level)
{
    switch (level) {
    case DK_LEVEL_SCALAR: return "scalar";
    case DK_LEVEL_AVX2: return "avx2";
    case DK_LEVEL_AVX_VNNI: return "avx-vnni";
    case DK_LEVEL_AVX512: return "avx512";
    case DK_LEVEL_VNNI: return "avx512-vnni";
    case DK_LEVEL_VBMI: return "avx512-vbmi";
    case DK_LEVEL_AMX: return "amx";
    case DK_LEVEL_NEON: return "neon";
    case DK_LEVEL_NEON_DOT: return "neon-dotprod";
    default: return NULL;
    }
}

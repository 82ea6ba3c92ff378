/* The int8 forms in registers of 256 bits, for AVX2 and for AVX-VNNI: the same text, compiled by
 * products_avx2.c and products_avx_vnni.c. They define
 *   DK_256               the attribute of functions
 *   DK_256_NAME(form)    the name of a form's function
 *   DK_256_HAS_DPBUSD    whether there is an instruction for dot products of unsigned and signed bytes.
 * Without it vpmaddubsw adds products of two bytes to 16 bits, and what it adds must fit: two products of a code
 * up to 128 do, and several such sums of smaller codes do too before they are widened. Integers are exact and
 * floats are added in the same order, so both levels give the same bits. */
#ifndef EDGEDSV4_PRODUCTS_256_H
#define EDGEDSV4_PRODUCTS_256_H

#include "products.h"

#if DK_256_HAS_DPBUSD
DK_256 DK_INLINE __m256i dk_dpbusd(__m256i sum, __m256i u, __m256i q)
{
#if defined(DK_EMULATE_AVX_VNNI)
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(0x7f);
    __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(u, low), q), ones);
    __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_andnot_si256(low, u), q), ones);
    return _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
#else
    return _mm256_dpbusd_avx_epi32(sum, u, q);
#endif
}
#endif

#include "iq2_xxs_256.h"
#include "narrow_256.h"
#include "single_256.h"
#include "wide_256.h"

#endif

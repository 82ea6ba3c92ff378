/* exp for softmaxes, written so that compilers turn a loop over it into vector code. */

#ifndef EDGEDSV4_VECTOR_EXP_H
#define EDGEDSV4_VECTOR_EXP_H

#include "native.h"

/* exp(x) within 2 units in the last place for x <= 88; 0 below -87.3, where it would be subnormal; NaN
 * stays NaN. x = n ln 2 + r with |r| <= 0.35, exp(r) by its series up to r^7. */
DK_INLINE float dk_exp(float x)
{
    const float magic = 0x1.8p23f; /* its last place is 1: adding it rounds to an integer */
    const uint32_t lowest = 0xc2ae999a; /* -87.3 */
    /* All ones where x < -87.3. Integers, because compilers keep comparisons that may trap, and branches,
     * out of vector code. */
    int32_t bits = (int32_t)dk_bits_of_float(x);
    uint32_t is_low = -(uint32_t)((bits > (int32_t)lowest) & (bits <= (int32_t)0xff800000u));
    float clamped = dk_float_of_bits(((uint32_t)bits & ~is_low) | (lowest & is_low));
    float shifted = clamped * 0x1.715476p0f + magic;
    float n = shifted - magic;
    float r = clamped - n * 0x1.62e4p-1f; /* exact: the constant has 15 bits */
    r = r - n * 0x1.7f7d1cp-20f;
    float tail = 1.0f / 720 + r * (1.0f / 5040);
    tail = 1.0f / 120 + r * tail;
    tail = 1.0f / 24 + r * tail;
    tail = 1.0f / 6 + r * tail;
    tail = 0.5f + r * tail;
    float value = 1.0f + (r + r * r * tail);
    uint32_t exponent = (dk_bits_of_float(shifted) - dk_bits_of_float(magic) + 127) << 23;
    uint32_t result = dk_bits_of_float(value * dk_float_of_bits(exponent));
    return dk_float_of_bits(result & ~is_low);
}

#endif

/* int8 products with AVX2. */

#include "products.h"

#if defined(DK_X86)

#define DK_256 DK_AVX2
#define DK_256_NAME(form) form##_avx2
#define DK_256_HAS_DPBUSD 0
#include "products_256.h"

int dk_has_single_256(const dk_product *p)
{
    int has_own_scales = p->w->type != DK_FP4_E2M1 || p->w->scale_height == 1;
    return single_layout_of(p->w->type).bytes > 0 && has_own_scales;
}

#endif

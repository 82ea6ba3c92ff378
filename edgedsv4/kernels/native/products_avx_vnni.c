/* int8 products with AVX-VNNI; with a compiler too old for it they are those of AVX2, and are not called. */

#include "products.h"

#if defined(DK_X86)

#define DK_256 DK_AVX_VNNI
#define DK_256_NAME(form) form##_avx_vnni
#if defined(DK_HAS_AVX_VNNI)
#define DK_256_HAS_DPBUSD 1
#else
#define DK_256_HAS_DPBUSD 0
#endif
#include "products_256.h"

#endif

/* int8 kernels of khtst-compile as a library: a linear layer of int8 weights on rows of float32.
 *
 *   codes[m][k]  = round(x[m][k] * 127 / max|x[m]|), ties to even;  scale[m] = max|x[m]| / 127, of at least 1e-30 / 127
 *   out[m][n]    = sum_k codes[m][k] * weights[n][k], exact, to float32; times (scale[m] * w_scale[n]), plus bias[n] by one rounding
 *
 * The bytes are those of every other target of khtst-compile as long as no intermediate value but 0 is smaller than 1.2e-38: NEON of
 * 32-bit ARM has none between. Nothing is printed or kept; any thread may call. README.md says what it was built for.
 * Every array begins at a multiple of KHTST_ALIGNMENT bytes; nothing is read or written beyond its last element.
 */
#ifndef KHTST_KERNELS_H
#define KHTST_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KHTST_ALIGNMENT 64

/* MISUSED: a negative count, a NULL, a misaligned array, a weight of -128. RESOURCES: no 16 KB of memory. */
typedef enum { KHTST_OK = 0, KHTST_MISUSED = 2, KHTST_RESOURCES = 5 } khtst_status;

/* A layer with n output and k input features; NULL where the library was made without that size. */
typedef struct khtst_linear khtst_linear;
const khtst_linear* khtst_linear_of(int64_t n, int64_t k);

/* The CPU features that are needed and missing here, such as "neon vfpv4"; "" where kernels may run. They are not looked at again. */
const char* khtst_lacking(void);

/* Elements of a row of codes: k, filled up to a multiple of 16. */
int64_t khtst_codes_width(const khtst_linear* linear);

/* Bytes of the packed layer, and packing it: weights (n, k) from -127 to 127, w_scale (n), bias (n) or NULL for 0. */
size_t khtst_packed_bytes(const khtst_linear* linear);
khtst_status khtst_pack(const khtst_linear* linear, const int8_t* weights, const float* w_scale, const float* bias, void* packed);

/* x (rows, k) to codes (rows, codes_width) and scale (rows). A NaN gets code 0; a row with an infinity an infinite scale. */
khtst_status khtst_quantize(const khtst_linear* linear, int64_t rows, const float* x, int8_t* codes, float* scale);

/* codes and scale to out (rows, n). */
khtst_status khtst_multiply(const khtst_linear* linear, const void* packed, int64_t rows, const int8_t* codes, const float* scale,
                            float* out);

#ifdef __cplusplus
}
#endif
#endif

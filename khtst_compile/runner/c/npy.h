/* One array as .npy, format versions 1 to 3. */
#ifndef KHTST_NPY_H_
#define KHTST_NPY_H_

#include "khtst.h"

/* The array in `size` bytes; its data is new memory, aligned to 64 bytes. On failure *why is a phrase, and NULL where memory is
 * lacking. */
int npy_read(const uint8_t* bytes, size_t size, khtst_tensor* found, const char** why);

/* "<f4" and so on: how numpy writes a dtype. */
const char* npy_code(khtst_dtype dtype);

/* What comes before the data of a tensor; returns its size, a multiple of 64. */
size_t npy_header(const khtst_tensor* tensor, char header[512]);

#endif /* KHTST_NPY_H_ */

/* What all parts share: failing with a message, sizes that may overflow, aligned memory, dtypes by name. */
#ifndef KHTST_BASE_H_
#define KHTST_BASE_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "khtst.h"

#define ALIGN 64 /* bytes; kernels read and write at multiples of it */

/* Fill in `error` (may be NULL) and return `status`. */
khtst_status fail(khtst_error* error, khtst_status status, const char* form, ...) __attribute__((format(printf, 3, 4)));

khtst_status out_of_memory(khtst_error* error, const char* what);

/* At least `size` bytes at a multiple of ALIGN, to be freed with free(); NULL where there is no memory. */
void* aligned(size_t size);

/* *product = a * b; false where that does not fit. */
bool multiply(size_t a, size_t b, size_t* product);

/* Bytes of a tensor of that dtype and shape; false for a negative size or one that does not fit. */
bool size_of(khtst_dtype dtype, int rank, const int64_t* shape, size_t* size);

/* "int8" -> KHTST_INT8; false for another name. */
bool dtype_of(const char* name, khtst_dtype* dtype);

/* "(2, 16)" as Python writes it; a size KHTST_DYNAMIC as the name of its axis, where `axes` is given. */
void shape_text(char* text, size_t room, int rank, const int64_t* shape, const char* const* axes);

/* `folder`/`name` in new memory, NULL where there is none left. */
char* joined(const char* folder, const char* name);

#endif /* KHTST_BASE_H_ */

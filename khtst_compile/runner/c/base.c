#include "base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  const char* name;
  size_t size;
} kinds[] = {
    [KHTST_BOOL] = {"bool", 1},       [KHTST_INT8] = {"int8", 1},       [KHTST_UINT8] = {"uint8", 1},
    [KHTST_INT16] = {"int16", 2},     [KHTST_INT32] = {"int32", 4},     [KHTST_INT64] = {"int64", 8},
    [KHTST_FLOAT32] = {"float32", 4}, [KHTST_FLOAT64] = {"float64", 8},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

khtst_status fail(khtst_error* error, khtst_status status, const char* form, ...) {
  if (error) {
    va_list values;
    va_start(values, form);
    vsnprintf(error->message, sizeof error->message, form, values);
    va_end(values);
    error->status = status;
  }
  return status;
}

khtst_status out_of_memory(khtst_error* error, const char* what) {
  return fail(error, KHTST_RESOURCES, "%s: there is not enough memory; free some, or use a smaller model or batch", what);
}

void* aligned(size_t size) {
  if (size > SIZE_MAX - 2 * ALIGN) return NULL;
  return aligned_alloc(ALIGN, (size + ALIGN) / ALIGN * ALIGN);
}

bool multiply(size_t a, size_t b, size_t* product) { return !__builtin_mul_overflow(a, b, product); }

bool size_of(khtst_dtype dtype, int rank, const int64_t* shape, size_t* size) {
  *size = khtst_dtype_size(dtype);
  for (int i = 0; i < rank; ++i) {
    if (shape[i] < 0 || !multiply(*size, (size_t)shape[i], size)) return false;
  }
  return *size <= PTRDIFF_MAX;
}

bool dtype_of(const char* name, khtst_dtype* dtype) {
  for (int i = 0; i < KINDS; ++i) {
    if (!strcmp(name, kinds[i].name)) return *dtype = (khtst_dtype)i, true;
  }
  return false;
}

void shape_text(char* text, size_t room, int rank, const int64_t* shape, const char* const* axes) {
  size_t used = (size_t)snprintf(text, room, "(");
  for (int i = 0; i < rank && used < room; ++i) {
    const char* before = i ? ", " : "";
    int added = axes && axes[i] ? snprintf(text + used, room - used, "%s%s", before, axes[i])
                                : snprintf(text + used, room - used, "%s%lld", before, (long long)shape[i]);
    used += (size_t)added;
  }
  if (used < room) snprintf(text + used, room - used, rank == 1 ? ",)" : ")");
}

char* joined(const char* folder, const char* name) {
  size_t size = strlen(folder) + strlen(name) + 2;
  char* path = malloc(size);
  if (path) snprintf(path, size, "%s/%s", folder, name);
  return path;
}

const char* khtst_dtype_name(khtst_dtype dtype) { return kinds[dtype].name; }

size_t khtst_dtype_size(khtst_dtype dtype) { return kinds[dtype].size; }

size_t khtst_tensor_size(const khtst_tensor* tensor) {
  size_t size;
  return size_of(tensor->dtype, tensor->rank, tensor->shape, &size) ? size : 0;
}

void khtst_release(khtst_tensor* outputs, int count) {
  for (int i = 0; i < count; ++i) {
    free(outputs[i].data);
    outputs[i].data = NULL;
  }
}

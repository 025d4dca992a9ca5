#include "npy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

static const char* const codes[] = {
    [KHTST_BOOL] = "|b1",  [KHTST_INT8] = "|i1",  [KHTST_UINT8] = "|u1",   [KHTST_INT16] = "<i2",
    [KHTST_INT32] = "<i4", [KHTST_INT64] = "<i8", [KHTST_FLOAT32] = "<f4", [KHTST_FLOAT64] = "<f8",
};
enum { CODES = sizeof codes / sizeof *codes };

const char* npy_code(khtst_dtype dtype) { return codes[dtype]; }

/* Where the value of 'key' begins in the header, a Python dict in text. */
static const char* after(const char* header, const char* key) {
  const char* at = strstr(header, key);
  if (!at) return NULL;
  at += strlen(key);
  while (*at == ' ') ++at;
  if (*at++ != ':') return NULL;
  while (*at == ' ') ++at;
  return at;
}

static const char* read_dtype(const char* at, khtst_dtype* dtype) {
  if (!at || *at != '\'') return "its header names no plain dtype";
  for (int i = 0; i < CODES; ++i) {
    const char* code = codes[i];
    bool order = at[1] == code[0] || (code[0] == '|' && (at[1] == '<' || at[1] == '=')) || (code[0] == '<' && at[1] == '=');
    if (order && at[2] == code[1] && at[3] == code[2] && at[4] == '\'') return *dtype = (khtst_dtype)i, NULL;
  }
  return at[1] == '>' ? "it is in big-endian order" : "its dtype is none of bool, int8 to int64, uint8, float32 and float64";
}

static const char* read_shape(const char* at, khtst_tensor* found) {
  if (!at || *at++ != '(') return "its header names no shape";
  found->rank = 0;
  while (*at != ')') {
    if (*at < '0' || *at > '9') return "its header names no shape";
    if (found->rank == KHTST_MAX_RANK) return "it has more than 8 axes";
    int64_t size = 0;
    for (; *at >= '0' && *at <= '9'; ++at) {
      if (__builtin_mul_overflow(size, 10, &size) || __builtin_add_overflow(size, *at - '0', &size))
        return "its shape is too large";
    }
    found->shape[found->rank++] = size;
    while (*at == ',' || *at == ' ') ++at;
  }
  return NULL;
}

/* From Fortran's order to C's: the first axis varies fastest in `from`. */
static void reorder(const khtst_tensor* shaped, const uint8_t* from, uint8_t* to, size_t size) {
  size_t unit = khtst_dtype_size(shaped->dtype), index[KHTST_MAX_RANK] = {0};
  for (uint8_t* end = to + size; to < end; to += unit) {
    size_t place = 0;
    for (int i = shaped->rank - 1; i >= 0; --i) place = place * (size_t)shaped->shape[i] + index[i];
    memcpy(to, from + place * unit, unit);
    for (int i = shaped->rank - 1; i >= 0 && ++index[i] == (size_t)shaped->shape[i]; --i) index[i] = 0;
  }
}

int npy_read(const uint8_t* bytes, size_t size, khtst_tensor* found, const char** why) {
  char* header = NULL;
  *why = "it is no .npy";
  if (size < 12 || memcmp(bytes, "\x93NUMPY", 6) || bytes[6] < 1 || bytes[6] > 3) return -1;
  size_t begin = bytes[6] == 1 ? 10 : 12, length = bytes[8] | (size_t)bytes[9] << 8;
  if (bytes[6] > 1) length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
  if (length > size - begin) return -1;
  *why = NULL;
  if (!(header = malloc(length + 1))) return -1;
  memcpy(header, bytes + begin, length);
  header[length] = 0;
  const char* order = after(header, "'fortran_order'");
  if (!(*why = read_dtype(after(header, "'descr'"), &found->dtype))) *why = read_shape(after(header, "'shape'"), found);
  bool fortran = order && !strncmp(order, "True", 4);
  if (!*why && !fortran && (!order || strncmp(order, "False", 5))) *why = "its header does not say its order";
  free(header);
  if (*why) return -1;
  size_t wanted, there = size - begin - length;
  if (!size_of(found->dtype, found->rank, found->shape, &wanted) || wanted != there) {
    *why = "it holds more or fewer bytes than its shape says";
    return -1;
  }
  if (!(found->data = aligned(wanted))) return -1;
  if (fortran && found->rank > 1) {
    reorder(found, bytes + begin + length, found->data, wanted);
  } else {
    memcpy(found->data, bytes + begin + length, wanted);
  }
  return 0;
}

size_t npy_header(const khtst_tensor* tensor, char header[512]) {
  char shape[256];
  shape_text(shape, sizeof shape, tensor->rank, tensor->shape, NULL);
  int used = snprintf(header + 10, 500, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", codes[tensor->dtype], shape);
  size_t size = (10 + (size_t)used + 1 + 63) / 64 * 64, length = size - 10;
  memset(header + 10 + used, ' ', size - 10 - (size_t)used);
  header[size - 1] = '\n';
  memcpy(header, "\x93NUMPY\x01", 8);
  header[8] = (char)(length & 255);
  header[9] = (char)(length >> 8);
  return size;
}

/* library N K ROWS FOLDER: reads x, weights, w_scale, bias in FOLDER and writes codes, scale, out; 4 where the CPU lacks a feature. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "khtst_kernels.h"

static const char* folder;

static void* room(size_t bytes) {
  size_t size = (bytes + 2 * KHTST_ALIGNMENT - 1) / KHTST_ALIGNMENT * KHTST_ALIGNMENT;
  return memset(aligned_alloc(KHTST_ALIGNMENT, size), 77, size);
}

static FILE* named(const char* name, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, mode);
  if (!file) exit(1);
  return file;
}

static void* in(const char* name, size_t bytes) {
  void* data = room(bytes);
  FILE* file = named(name, "rb");
  if (fread(data, 1, bytes, file) != bytes) exit(1);
  fclose(file);
  return data;
}

/* Nothing beyond the last element was touched, and all of it is written to a file. */
static void out(const char* name, const void* data, size_t bytes) {
  if (((const char*)data)[bytes] != 77) exit(5);
  FILE* file = named(name, "wb");
  if (fwrite(data, 1, bytes, file) != bytes || fclose(file)) exit(1);
}

int main(int argc, char** argv) {
  if (*khtst_lacking()) return fprintf(stderr, "%s\n", khtst_lacking()), 4;
  if (argc != 5) return 2;
  int64_t n = atoll(argv[1]), k = atoll(argv[2]), rows = atoll(argv[3]);
  folder = argv[4];
  const khtst_linear* linear = khtst_linear_of(n, k);
  if (!linear) return 3;
  float *x = in("x", rows * k * 4), *w_scale = in("w_scale", n * 4), *bias = in("bias", n * 4);
  int8_t* weights = in("weights", n * k);
  void* packed = room(khtst_packed_bytes(linear));
  int8_t* codes = room(rows * khtst_codes_width(linear));
  float *scale = room(rows * 4), *values = room(rows * n * 4);
  if (khtst_pack(linear, weights, w_scale, bias, packed)) return 6;
  if (khtst_quantize(linear, rows, x, codes, scale)) return 7;
  if (khtst_multiply(linear, packed, rows, codes, scale, values)) return 8;
  out("codes", codes, rows * khtst_codes_width(linear));
  out("scale", scale, rows * 4);
  out("out", values, rows * n * 4);
  weights[0] = -128;
  if (khtst_pack(linear, weights, w_scale, NULL, packed) != KHTST_MISUSED) return 9;
  if (khtst_multiply(linear, packed, rows, codes + 1, scale, values) != KHTST_MISUSED) return 10;
  if (khtst_quantize(linear, -1, x, codes, scale) != KHTST_MISUSED) return 11;
  return khtst_linear_of(n, k + 12345) ? 12 : 0;
}

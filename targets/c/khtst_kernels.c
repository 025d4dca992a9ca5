/* Calls kernels that TVM compiled, as its C ABI has it, without its runtime: what kernels take from that is at the end. */
#include "khtst_kernels.h"

#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <tvm/ffi/c_api.h>

#include "khtst_shapes.h"

#define MOST_DIMS 2
#define MOST_ARGUMENTS 6
#define ROUND_UP(value, step) (((value) + (step)-1) / (step) * (step))

struct khtst_linear {
  int64_t n, k;
  TVMFFISafeCallType multiply, quantize;
};

#define LINEAR(n, k)                               \
  extern int __tvm_ffi_khtst_multiply_##n##x##k(void*, const TVMFFIAny*, int32_t, TVMFFIAny*); \
  extern int __tvm_ffi_khtst_quantize_##k(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
KHTST_LINEARS(LINEAR)
#undef LINEAR

#define LINEAR(n, k) {n, k, __tvm_ffi_khtst_multiply_##n##x##k, __tvm_ffi_khtst_quantize_##k},
static const khtst_linear linears[] = {KHTST_LINEARS(LINEAR)};
#undef LINEAR

const khtst_linear* khtst_linear_of(int64_t n, int64_t k) {
  for (size_t i = 0; i < sizeof linears / sizeof *linears; ++i) {
    if (linears[i].n == n && linears[i].k == k) return &linears[i];
  }
  return NULL;
}

const char* khtst_lacking(void) {
  static const char* const lists[] = {"", "neon", "vfpv4", "neon vfpv4"};
  unsigned long has = getauxval(AT_HWCAP);
  return lists[!(has & KHTST_HWCAP_NEON) | !(has & KHTST_HWCAP_VFPV4) << 1];
}

/* The packed layer: weights in panels of KHTST_COLUMNS columns, steps of KHTST_STEP features; then a scale and a bias a column. */
static int64_t padded(const khtst_linear* a) { return ROUND_UP(a->n, KHTST_COLUMNS); }
static size_t weights_bytes(const khtst_linear* a) { return ROUND_UP((size_t)(padded(a) * khtst_codes_width(a)), KHTST_ALIGNMENT); }
static size_t column_bytes(const khtst_linear* a) { return ROUND_UP((size_t)padded(a) * sizeof(float), KHTST_ALIGNMENT); }

int64_t khtst_codes_width(const khtst_linear* a) { return ROUND_UP(a->k, KHTST_STEP); }
size_t khtst_packed_bytes(const khtst_linear* a) { return weights_bytes(a) + 2 * column_bytes(a); }

static int aligned(const void* array) { return array && (uintptr_t)array % KHTST_ALIGNMENT == 0; }

khtst_status khtst_pack(const khtst_linear* a, const int8_t* weights, const float* w_scale, const float* bias, void* packed) {
  if (!a || !weights || !w_scale || !aligned(packed)) return KHTST_MISUSED;
  for (int64_t i = 0; i < a->n * a->k; ++i) {
    if (weights[i] < -127) return KHTST_MISUSED;
  }
  memset(packed, 0, khtst_packed_bytes(a));
  for (int64_t n = 0; n < a->n; ++n) {
    int8_t* panel = (int8_t*)packed + n / KHTST_COLUMNS * KHTST_COLUMNS * khtst_codes_width(a);
    for (int64_t k = 0; k < a->k; ++k) {
      panel[(k / KHTST_STEP * KHTST_COLUMNS + n % KHTST_COLUMNS) * KHTST_STEP + k % KHTST_STEP] = weights[n * a->k + k];
    }
  }
  char* columns = (char*)packed + weights_bytes(a);
  memcpy(columns, w_scale, (size_t)a->n * sizeof *w_scale);
  if (bias) memcpy(columns + column_bytes(a), bias, (size_t)a->n * sizeof *bias);
  return KHTST_OK;
}

typedef struct {
  int count;
  int64_t shapes[MOST_ARGUMENTS][MOST_DIMS];
  DLTensor tensors[MOST_ARGUMENTS];
  TVMFFIAny values[MOST_ARGUMENTS];
} arguments;

/* second: 0 for a vector. */
static void add(arguments* a, const void* data, int code, int bits, int64_t first, int64_t second) {
  int i = a->count++;
  a->shapes[i][0] = first;
  a->shapes[i][1] = second;
  a->tensors[i] = (DLTensor){
      .data = (void*)data,
      .device = {kDLCPU, 0},
      .ndim = second ? 2 : 1,
      .dtype = {(uint8_t)code, (uint8_t)bits, 1},
      .shape = a->shapes[i],
  };
  a->values[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &a->tensors[i]};
}

static khtst_status call(TVMFFISafeCallType kernel, const arguments* a) {
  TVMFFIAny result = {.type_index = kTVMFFINone};
  return kernel(NULL, a->values, a->count, &result) ? KHTST_RESOURCES : KHTST_OK;
}

khtst_status khtst_quantize(const khtst_linear* a, int64_t rows, const float* x, int8_t* codes, float* scale) {
  if (!a || rows < 0 || !aligned(x) || !aligned(codes) || !aligned(scale)) return KHTST_MISUSED;
  if (!rows) return KHTST_OK;
  arguments args = {0};
  add(&args, x, kDLFloat, 32, rows, a->k);
  add(&args, codes, kDLInt, 8, rows, khtst_codes_width(a));
  add(&args, scale, kDLFloat, 32, rows, 0);
  return call(a->quantize, &args);
}

khtst_status khtst_multiply(const khtst_linear* a, const void* packed, int64_t rows, const int8_t* codes, const float* scale,
                            float* out) {
  if (!a || rows < 0 || !aligned(packed) || !aligned(codes) || !aligned(scale) || !aligned(out)) return KHTST_MISUSED;
  if (!rows) return KHTST_OK;
  const char* columns = (const char*)packed + weights_bytes(a);
  arguments args = {0};
  add(&args, codes, kDLInt, 8, rows, khtst_codes_width(a));
  add(&args, scale, kDLFloat, 32, rows, 0);
  add(&args, packed, kDLInt, 8, padded(a) * khtst_codes_width(a), 0);
  add(&args, columns, kDLFloat, 32, padded(a), 0);
  add(&args, columns + column_bytes(a), kDLFloat, 32, padded(a), 0);
  add(&args, out, kDLFloat, 32, rows, a->n);
  return call(a->multiply, &args);
}

/* Arguments were checked above, so a kernel fails where scratch memory cannot be had, and has nothing to add to its return code. */
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  (void)kind, (void)parts, (void)count;
}

typedef struct {
  void* handle;
  int32_t tasks;
} group;

/* Parallel regions one after the other, in the caller's thread. Kernels call this through a variable. */
static int launch(int (*task)(int, group*, void*), void* data, int count) {
  group all = {NULL, count > 0 ? count : 1};
  for (int i = 0; i < all.tasks; ++i) {
    int code = task(i, &all, data);
    if (code) return code;
  }
  return 0;
}

/* Scratch memory of more than a KB, as rows of few features take 16 KB. */
static void* allocate(int device, int number, uint64_t bytes, int code, int bits) {
  (void)device, (void)number, (void)code, (void)bits;
  return bytes > SIZE_MAX / 2 ? NULL : aligned_alloc(KHTST_ALIGNMENT, ROUND_UP((size_t)bytes, KHTST_ALIGNMENT));
}

static int release(int device, int number, void* data) {
  (void)device, (void)number;
  free(data);
  return 0;
}

int (*__TVMBackendParallelLaunch)(int (*)(int, group*, void*), void*, int) = launch;
void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
int (*__TVMBackendFreeWorkspace)(int, int, void*) = release;

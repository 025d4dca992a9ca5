/* bench: how long a run takes, at shapes the dynamic axes are given. Inputs are the golden ones, cut or repeated to size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base.h"
#include "verbs.h"

enum { FEWEST = 5, MOST = 1 << 20 }; /* runs at a shape */

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* "8x128" into sizes of the model's axes. */
static khtst_status parse_shape(const khtst_model* model, const char* text, int64_t* sizes, khtst_error* error) {
  int count = khtst_axis_count(model), found = 0;
  const char* at = text;
  for (;; ++at) {
    char* end;
    long long size = *at >= '0' && *at <= '9' ? strtoll(at, &end, 10) : -1;
    if (size < 0 || (*end && *end != 'x'))
      return fail(error, KHTST_USAGE, "--shape '%s': needed sizes joined by x, such as 8x128", text);
    if (found < count) sizes[found] = size;
    ++found;
    if (!*(at = end)) break;
  }
  if (found != count)
    return fail(error, KHTST_USAGE, "--shape %s: %d sizes; needed: %d, one for each dynamic axis", text, found, count);
  for (int i = 0; i < count; ++i) {
    const khtst_axis* axis = khtst_axis_at(model, i);
    if (sizes[i] < axis->least || sizes[i] > axis->most) {
      return fail(error, KHTST_USAGE, "--shape %s: axis '%s' is %lld; needed: %lld..%lld", text, axis->name, (long long)sizes[i],
                  (long long)axis->least, (long long)axis->most);
    }
  }
  return KHTST_OK;
}

static int axis_place(const khtst_model* model, const char* name) {
  for (int i = 0; i < khtst_axis_count(model); ++i) {
    if (!strcmp(khtst_axis_at(model, i)->name, name)) return i;
  }
  return -1;
}

/* The sizes the golden inputs have. */
static void golden_sizes(const khtst_model* model, const khtst_tensor* golden, int64_t* sizes) {
  for (int i = 0; i < khtst_input_count(model); ++i) {
    const khtst_spec* spec = khtst_input(model, i);
    for (int k = 0; k < spec->rank; ++k) {
      int place = spec->axes[k] ? axis_place(model, spec->axes[k]) : -1;
      if (place >= 0) sizes[place] = golden[i].shape[k];
    }
  }
}

/* The golden input with its dynamic axes cut, or repeated, to size. */
static khtst_status resize(const khtst_model* model, int index, const khtst_tensor* golden, const int64_t* sizes,
                           khtst_tensor* made, khtst_error* error) {
  const khtst_spec* spec = khtst_input(model, index);
  size_t unit = khtst_dtype_size(golden->dtype), size, step[KHTST_MAX_RANK], at[KHTST_MAX_RANK] = {0};
  *made = *golden;
  for (int k = 0; k < spec->rank; ++k) {
    int place = spec->axes[k] ? axis_place(model, spec->axes[k]) : -1;
    if (place >= 0) made->shape[k] = sizes[place];
  }
  made->data = size_of(made->dtype, made->rank, made->shape, &size) ? aligned(size) : NULL;
  if (!made->data) return out_of_memory(error, spec->name);
  if (!khtst_tensor_size(golden)) return memset(made->data, 0, size), KHTST_OK; /* nothing to repeat */
  for (int k = golden->rank - 1; k >= 0; --k) step[k] = k == golden->rank - 1 ? unit : step[k + 1] * (size_t)golden->shape[k + 1];
  for (char *to = made->data, *end = to + size; to < end; to += unit) {
    const char* from = golden->data;
    for (int k = 0; k < golden->rank; ++k) from += at[k] % (size_t)golden->shape[k] * step[k];
    memcpy(to, from, unit);
    for (int k = golden->rank - 1; k >= 0 && ++at[k] == (size_t)made->shape[k]; --k) at[k] = 0;
  }
  return KHTST_OK;
}

/* Time runs until `seconds` are over; prints a line. */
static khtst_status measure(khtst_model* model, const khtst_tensor* inputs, khtst_tensor* results, const int64_t* sizes,
                            double seconds, double* times, khtst_error* error) {
  int outputs = khtst_output_count(model), runs = 0;
  khtst_status status = khtst_run(model, inputs, results, error); /* makes buffers, and brings weights into the caches */
  khtst_release(results, outputs);
  for (double begin = now(); !status && runs < MOST && (runs < FEWEST || now() - begin < seconds); ++runs) {
    double started = now();
    status = khtst_run(model, inputs, results, error);
    times[runs] = now() - started;
    khtst_release(results, outputs);
  }
  if (status) return status;
  qsort(times, (size_t)runs, sizeof *times, ascending);
  char shape[256] = "";
  for (int i = 0; i < khtst_axis_count(model); ++i) {
    size_t used = strlen(shape);
    snprintf(shape + used, sizeof shape - used, "%s%lld", i ? "x" : "", (long long)sizes[i]);
  }
  printf("%-12s %12.3f %12.3f %12.3f %8d\n", *shape ? shape : "fixed", 1e3 * times[runs / 2], 1e3 * times[0],
         1e3 * times[runs * 9 / 10], runs);
  fflush(stdout);
  return KHTST_OK;
}

static khtst_status at_shape(khtst_model* model, const khtst_tensor* golden, const int64_t* sizes, double seconds, double* times,
                             khtst_error* error) {
  int count = khtst_input_count(model), outputs = khtst_output_count(model);
  khtst_tensor *inputs = calloc((size_t)count + 1, sizeof *inputs), *results = calloc((size_t)outputs + 1, sizeof *results);
  khtst_status status = inputs && results ? KHTST_OK : out_of_memory(error, "bench");
  for (int i = 0; i < count && !status; ++i) status = resize(model, i, &golden[i], sizes, &inputs[i], error);
  if (!status) status = measure(model, inputs, results, sizes, seconds, times, error);
  if (inputs) khtst_release(inputs, count);
  free(inputs);
  free(results);
  return status;
}

khtst_status verb_bench(const request* asked, khtst_model* model, khtst_error* error) {
  int axes = khtst_axis_count(model);
  khtst_tensor* given = calloc((size_t)khtst_input_count(model) + 1, sizeof *given);
  int64_t* sizes = calloc((size_t)axes * (size_t)(asked->shape_count + 1) + 1, sizeof *sizes);
  double* times = malloc(MOST * sizeof *times);
  npz golden = {0};
  khtst_status status = given && sizes && times ? read_golden(asked->folder, &golden, error) : out_of_memory(error, "bench");
  if (!status) status = pick_inputs(model, &golden, "in/", "golden.npz", given, error);
  if (!status) golden_sizes(model, given, sizes);
  for (int i = 0; i < asked->shape_count && !status; ++i) status = parse_shape(model, asked->shapes[i], sizes + i * axes, error);
  if (!status) printf("%s\n%-12s %12s %12s %12s %8s\n", khtst_variant(model), "shape", "median ms", "least ms", "p90 ms", "runs");
  for (int i = 0; !status && i < (asked->shape_count ? asked->shape_count : 1); ++i) {
    status = at_shape(model, given, sizes + i * axes, asked->seconds, times, error);
  }
  npz_free(&golden);
  free(given);
  free(sizes);
  free(times);
  return status;
}

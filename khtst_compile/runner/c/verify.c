/* verify: the golden inputs through the model, and its results against those the artifact carries. The same program gives the
 * same bits on every CPU, so they are compared as bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "taps.h"
#include "verbs.h"

static double number_at(const khtst_tensor* t, size_t i) {
  switch (t->dtype) {
    case KHTST_INT8: return ((const int8_t*)t->data)[i];
    case KHTST_INT16: return ((const int16_t*)t->data)[i];
    case KHTST_INT32: return ((const int32_t*)t->data)[i];
    case KHTST_INT64: return (double)((const int64_t*)t->data)[i];
    case KHTST_FLOAT32: return ((const float*)t->data)[i];
    case KHTST_FLOAT64: return ((const double*)t->data)[i];
    default: return ((const uint8_t*)t->data)[i];
  }
}

/* Prints a line about one output; whether it has the same bytes. */
static bool same(const char* name, const khtst_tensor* got, const khtst_tensor* wanted) {
  bool shaped = got->dtype == wanted->dtype && got->rank == wanted->rank &&
                !memcmp(got->shape, wanted->shape, (size_t)got->rank * sizeof *got->shape);
  char found[256], needed[256];
  if (!shaped) {
    shape_text(found, sizeof found, got->rank, got->shape, NULL);
    shape_text(needed, sizeof needed, wanted->rank, wanted->shape, NULL);
    printf("%s: DIFFERS: %s %s; golden: %s %s\n", name, khtst_dtype_name(got->dtype), found, khtst_dtype_name(wanted->dtype),
           needed);
    return false;
  }
  size_t unit = khtst_dtype_size(got->dtype), count = khtst_tensor_size(got) / unit, differing = 0, first = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!memcmp((const char*)got->data + i * unit, (const char*)wanted->data + i * unit, unit)) continue;
    if (!differing++) first = i;
  }
  if (differing) {
    printf("%s: DIFFERS: %zu of %zu values; the first at place %zu: %.9g; golden: %.9g\n", name, differing, count, first,
           number_at(got, first), number_at(wanted, first));
  } else {
    printf("%s: the same bits (%zu values)\n", name, count);
  }
  return !differing;
}

/* Prints which kernel is the first whose value has another hash than where the artifact was made. */
static void name_kernel(khtst_model* model, const khtst_tensor* inputs) {
  const char* site;
  khtst_error error;
  if (first_difference(model, inputs, &site, &error)) {
    printf("kernels: %s\n", error.message);
  } else if (site) {
    printf("kernels: the first that differs is at %s\n", site);
  } else {
    printf(
        "kernels: all have the values they had; an operator without a kernel differs, or the golden outputs are not this "
        "artifact's\n");
  }
}

static khtst_status compare(const request* asked, khtst_model* model, const npz* golden, const khtst_tensor* inputs,
                            const khtst_tensor* results, khtst_error* error) {
  int outputs = khtst_output_count(model), wrong = 0;
  for (int i = 0; i < outputs; ++i) {
    const char* name = khtst_output(model, i)->name;
    const khtst_tensor* wanted = npz_get(golden, "lowered/", name);
    if (!wanted)
      return fail(error, KHTST_USAGE, "%s: golden.npz has no 'lowered/%s'; make the artifact again", asked->folder, name);
    wrong += !same(name, &results[i], wanted);
  }
  if (!wrong) return KHTST_OK;
  name_kernel(model, inputs);
  return fail(error, KHTST_OVER_BUDGET,
              "%s: %d of %d outputs differ from the golden ones as %s; needed: the same bits; please report it", asked->folder,
              wrong, outputs, khtst_variant(model));
}

khtst_status verb_verify(const request* asked, khtst_model* model, khtst_error* error) {
  int inputs = khtst_input_count(model), outputs = khtst_output_count(model);
  khtst_tensor *given = calloc((size_t)inputs + 1, sizeof *given), *results = calloc((size_t)outputs + 1, sizeof *results);
  npz golden = {0};
  khtst_status status = given && results ? read_golden(asked->folder, &golden, error) : out_of_memory(error, "verify");
  if (!status) status = pick_inputs(model, &golden, "in/", "golden.npz", given, error);
  if (!status) status = khtst_run(model, given, results, error);
  if (!status) status = compare(asked, model, &golden, given, results, error);
  if (!status)
    printf("%s: %d outputs as %s: all the same bits as the golden ones\n", asked->folder, outputs, khtst_variant(model));
  if (results) khtst_release(results, outputs);
  npz_free(&golden);
  free(given);
  free(results);
  return status;
}

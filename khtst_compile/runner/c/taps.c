#include "taps.h"

#include <stdlib.h>
#include <string.h>

#include "model.h"
#include "npy.h"
#include "sha256.h"

static int code_at(const khtst_tensor* t, size_t i) {
  switch (t->dtype) {
    case KHTST_INT8: return ((const int8_t*)t->data)[i];
    case KHTST_INT16: return ((const int16_t*)t->data)[i];
    default: return ((const uint8_t*)t->data)[i];
  }
}

/* Stored codes as their operator means them: without padding and offset, int8. In place, for they do not get longer. */
static void make_logical(khtst_tensor* t, int64_t features, int offset) {
  int64_t width = t->shape[t->rank - 1];
  size_t rows = width ? khtst_tensor_size(t) / khtst_dtype_size(t->dtype) / (size_t)width : 0;
  int8_t* to = t->data;
  for (size_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < features; ++k) *to++ = (int8_t)(code_at(t, row * (size_t)width + (size_t)k) - offset);
  }
  t->dtype = KHTST_INT8;
  t->shape[t->rank - 1] = features;
}

/* sha256 over dtype, shape and bytes, as numpy writes the first two. */
static void digest(const khtst_tensor* t, char hex[65]) {
  char shape[256];
  sha256 hash;
  shape_text(shape, sizeof shape, t->rank, t->shape, NULL);
  sha256_begin(&hash);
  sha256_add(&hash, npy_code(t->dtype), strlen(npy_code(t->dtype)));
  sha256_add(&hash, shape, strlen(shape));
  sha256_add(&hash, t->data, khtst_tensor_size(t));
  sha256_end(&hash, hex);
}

static khtst_status compare_one(const work* w, TVMFFIAny value, const json* tap, int offset, bool* same) {
  const char *kind = text_of(tap, "kind"), *wanted = text_of(tap, "sha256");
  const json* features = json_get(tap, "features");
  khtst_tensor got;
  char hex[65];
  khtst_status status = tvm_copy(&w->model->tvm, value, &got, w->error);
  if (status) return status;
  bool codes = kind && !strcmp(kind, "codes"), known = features && features->kind == JSON_INTEGER;
  if (codes && known && got.rank && features->integer >= 0 && features->integer <= got.shape[got.rank - 1]) {
    make_logical(&got, features->integer, offset);
  }
  digest(&got, hex);
  *same = wanted && !strcmp(wanted, hex);
  free(got.data);
  return KHTST_OK;
}

static khtst_status compare_all(work* w, TVMFFIAny result) {
  const khtst_model* m = w->model;
  const json *taps = json_get(m->folder.manifest, "taps"), *offset = json_get(m->variant, "codes_offset");
  const TVMFFISeqCell* list = CELL(TVMFFISeqCell, result.v_obj);
  int64_t at = m->folder.output_count;
  khtst_status status = KHTST_OK;
  bool same = true;
  if (result.type_index != kTVMFFIArray || !taps || list->size != at + (int64_t)taps->count) {
    return fail(w->error, KHTST_USAGE, "%s: its kernels cannot be compared: the manifest has other taps than the library",
                m->folder.folder);
  }
  for (const json* tap = taps->first; tap && same && !status; tap = tap->next, ++at) {
    status = compare_one(w, ((const TVMFFIAny*)list->data)[at], tap, offset ? (int)offset->integer : 0, &same);
    if (!status && !same) w->site = text_of(tap, "site");
  }
  return status;
}

static void compare(void* of) {
  work* w = of;
  khtst_model* m = w->model;
  int inputs = m->folder.input_count;
  TVMFFIAny taps = {.type_index = kTVMFFINone}, result = {.type_index = kTVMFFINone};
  for (int i = 0; i < inputs && !w->status; ++i) w->status = give_input(m, i, &w->inputs[i], w->error);
  if (!w->status) w->status = tvm_member(&m->tvm, m->machine, "taps", &taps, w->error);
  if (!w->status)
    w->status = tvm_call(&m->tvm, taps, m->args + 1, inputs + m->arrays.count, &result, KHTST_INTERNAL, "taps", w->error);
  if (!w->status) w->status = compare_all(w, result);
  tvm_drop(&m->tvm, &result);
  tvm_drop(&m->tvm, &taps);
  for (int i = 0; i < inputs; ++i) tvm_drop(&m->tvm, &m->args[1 + i]);
}

khtst_status first_difference(khtst_model* m, const khtst_tensor* inputs, const char** site, khtst_error* error) {
  work w = {.model = m, .inputs = inputs, .error = error};
  w.status = artifact_check(&m->folder, inputs, error);
  if (!w.status) do_work(&w, compare);
  *site = w.site;
  return w.status;
}

/* What a caller passes, against what the artifact says. */
#include <string.h>

#include "artifact.h"

static khtst_status check_shape(const khtst_spec* spec, const khtst_tensor* given, khtst_error* error) {
  char found[256], needed[512];
  bool fits = given->rank == spec->rank;
  for (int i = 0; fits && i < spec->rank; ++i)
    fits = given->shape[i] >= 0 && (spec->axes[i] || given->shape[i] == spec->shape[i]);
  if (fits) return KHTST_OK;
  int rank = given->rank < 0 ? 0 : given->rank > KHTST_MAX_RANK ? KHTST_MAX_RANK : given->rank;
  shape_text(found, sizeof found, rank, given->shape, NULL);
  shape_text(needed, sizeof needed, spec->rank, spec->shape, spec->axes);
  return fail(error, KHTST_USAGE, "input '%s': shape is %s; needed: %s", spec->name, found, needed);
}

/* One axis over all inputs: equal sizes, within the bounds. */
static khtst_status check_axis(const artifact* a, const khtst_axis* axis, const khtst_tensor* inputs, khtst_error* error) {
  const khtst_spec* first = NULL;
  int64_t size = 0;
  for (int i = 0; i < a->input_count; ++i) {
    const khtst_spec* spec = &a->inputs[i];
    for (int k = 0; k < spec->rank; ++k) {
      if (!spec->axes[k] || strcmp(spec->axes[k], axis->name)) continue;
      if (first && inputs[i].shape[k] != size) {
        return fail(error, KHTST_USAGE, "input '%s': axis '%s' is %lld, but input '%s' has %lld; they must be equal", spec->name,
                    axis->name, (long long)inputs[i].shape[k], first->name, (long long)size);
      }
      if (!first) first = spec, size = inputs[i].shape[k];
    }
  }
  if (!first || (size >= axis->least && size <= axis->most)) return KHTST_OK;
  return fail(error, KHTST_USAGE, "input '%s': axis '%s' is %lld; needed: %lld..%lld", first->name, axis->name, (long long)size,
              (long long)axis->least, (long long)axis->most);
}

static int64_t integer_at(const khtst_tensor* t, size_t i) {
  switch (t->dtype) {
    case KHTST_INT8: return ((const int8_t*)t->data)[i];
    case KHTST_INT16: return ((const int16_t*)t->data)[i];
    case KHTST_INT32: return ((const int32_t*)t->data)[i];
    case KHTST_INT64: return ((const int64_t*)t->data)[i];
    default: return ((const uint8_t*)t->data)[i];
  }
}

static khtst_status check_range(const khtst_spec* spec, const value_range* range, const khtst_tensor* given, khtst_error* error) {
  if (!range->there || given->dtype == KHTST_FLOAT32 || given->dtype == KHTST_FLOAT64) return KHTST_OK;
  size_t count = khtst_tensor_size(given) / khtst_dtype_size(given->dtype);
  for (size_t i = 0; i < count; ++i) {
    int64_t found = integer_at(given, i);
    if (found < range->least || found > range->most) {
      return fail(error, KHTST_USAGE, "input '%s': value %lld at place %zu; needed: %lld..%lld", spec->name, (long long)found, i,
                  (long long)range->least, (long long)range->most);
    }
  }
  return KHTST_OK;
}

khtst_status artifact_check(const artifact* a, const khtst_tensor* inputs, khtst_error* error) {
  khtst_status status = KHTST_OK;
  for (int i = 0; i < a->input_count && !status; ++i) {
    const khtst_spec* spec = &a->inputs[i];
    size_t size;
    if (inputs[i].dtype != spec->dtype) {
      bool known = (unsigned)inputs[i].dtype <= KHTST_FLOAT64;
      return fail(error, KHTST_USAGE, "input '%s': dtype is %s; needed: %s", spec->name,
                  known ? khtst_dtype_name(inputs[i].dtype) : "unknown", khtst_dtype_name(spec->dtype));
    }
    if ((status = check_shape(spec, &inputs[i], error))) return status;
    if (!size_of(inputs[i].dtype, inputs[i].rank, inputs[i].shape, &size))
      return fail(error, KHTST_USAGE, "input '%s': its shape is too large", spec->name);
    if (size && !inputs[i].data) return fail(error, KHTST_USAGE, "input '%s': has no data; needed: %zu bytes", spec->name, size);
  }
  for (int i = 0; i < a->axis_count && !status; ++i) status = check_axis(a, &a->axes[i], inputs, error);
  for (int i = 0; i < a->input_count && !status; ++i) status = check_range(&a->inputs[i], &a->ranges[i], &inputs[i], error);
  return status;
}

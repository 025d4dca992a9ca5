#include "parts.h"

#include <string.h>

/* Rows of a part for each thread, and its fewest multiply-adds: as Python's `parts` has them. */
enum { ROWS = 128, MACS = 20000000 };

/* Whether the independent axis leads this input. */
static bool led(const artifact* a, int i, const char* axis) {
  const khtst_spec* spec = &a->inputs[i];
  return spec->rank && spec->axes[0] && !strcmp(spec->axes[0], axis);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows one entry has: positions of its ids, or of its vectors. */
static int64_t rows_of(const khtst_tensor* t) {
  bool vectors = t->dtype == KHTST_FLOAT32 || t->dtype == KHTST_FLOAT64;
  int64_t rows = 1;
  for (int k = 1; k < t->rank - (vectors ? 1 : 0); ++k) rows *= t->shape[k];
  return rows;
}

/* Multiply-adds of linear layers for one row; 0 where that is not known. */
static int64_t row_macs(const artifact* a) {
  const json* program = json_get(a->manifest, "program");
  int64_t all = 0;
  for (const json* call = program ? program->first : NULL; call; call = call->next) {
    const json* macs = json_get(call, "macs");
    if (macs && macs->kind == JSON_INTEGER && (macs->integer < 0 || __builtin_add_overflow(all, macs->integer, &all))) return 0;
  }
  return all;
}

int64_t parts_count(const artifact* a, const khtst_tensor* inputs, int threads, int64_t* entries) {
  const char* axis = text_of(a->manifest, "independent");
  int64_t rows = 0, macs = row_macs(a), fewest = 1;
  *entries = 0;
  if (!axis || !macs) return 1;
  for (int i = 0; i < a->input_count; ++i) {
    if (!led(a, i, axis)) continue;
    *entries = inputs[i].shape[0];
    rows = larger(rows, rows_of(&inputs[i]));
  }
  if (!rows) return 1;
  for (int i = 0; i < a->axis_count; ++i) {
    if (!strcmp(a->axes[i].name, axis)) fewest = larger(1, a->axes[i].least);
  }
  int64_t size = larger(larger(ROWS * (int64_t)threads, (MACS + macs - 1) / macs) / rows, fewest);
  return larger(1, *entries / size);
}

void parts_take(const artifact* a, const khtst_tensor* inputs, int64_t begin, int64_t end, khtst_tensor* part) {
  const char* axis = text_of(a->manifest, "independent");
  for (int i = 0; i < a->input_count; ++i) {
    part[i] = inputs[i];
    if (!led(a, i, axis)) continue;
    size_t one = khtst_tensor_size(&inputs[i]) / (size_t)inputs[i].shape[0];
    part[i].shape[0] = end - begin;
    part[i].data = (char*)inputs[i].data + (size_t)begin * one;
  }
}

khtst_status parts_join(const khtst_tensor* part, int64_t begin, int64_t size, int64_t entries, khtst_tensor* whole,
                        khtst_error* error) {
  size_t bytes, one = size ? khtst_tensor_size(part) / (size_t)size : 0;
  if (!part->rank || part->shape[0] != size) {
    return fail(error, KHTST_INTERNAL, "a result has not one entry for each of a batch; please report it");
  }
  if (!begin) {
    *whole = *part;
    whole->shape[0] = entries;
    whole->data = size_of(whole->dtype, whole->rank, whole->shape, &bytes) ? aligned(bytes) : NULL;
    if (!whole->data) return out_of_memory(error, "results");
  }
  if (one) memcpy((char*)whole->data + (size_t)begin * one, part->data, (size_t)size * one);
  return KHTST_OK;
}

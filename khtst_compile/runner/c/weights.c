#include "weights.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static khtst_status map(const char* path, weights* w, khtst_error* error) {
  struct stat about;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  bool good = file >= 0 && !fstat(file, &about);
  if (good && about.st_size) {
    w->size = (size_t)about.st_size;
    w->mapped = mmap(NULL, w->size, PROT_READ, MAP_PRIVATE, file, 0);
    if (w->mapped == MAP_FAILED) w->mapped = NULL, good = false;
  }
  int reason = errno;
  if (file >= 0) close(file);
  if (good) return KHTST_OK;
  return fail(error, reason == ENOMEM ? KHTST_RESOURCES : KHTST_USAGE, "%s: cannot be mapped (%s); copy the folder again", path,
              strerror(reason));
}

/* Argument `index` of the library: array `from` of the file, in the order of `text` (NULL: as it is stored). */
static khtst_status arrange(weights* w, int index, const stored_array* from, const char* text, const char* folder,
                            khtst_error* error) {
  khtst_tensor* made = &w->arrays[index];
  layout by;
  if (from->offset > w->size || from->size > w->size - from->offset) {
    return fail(error, KHTST_USAGE,
                "%s: weights.bin: a weight lies outside the file (offset %zu, %zu bytes of %zu); make the artifact again", folder,
                from->offset, from->size, w->size);
  }
  *made = (khtst_tensor){.dtype = from->dtype, .rank = from->rank, .data = (char*)w->mapped + from->offset};
  memcpy(made->shape, from->shape, sizeof made->shape);
  if (!text) return KHTST_OK;
  layout_parse(text, &by); /* was checked with the manifest */
  size_t unit = khtst_dtype_size(from->dtype);
  w->owned[index] = aligned(by.count * unit);
  if (!w->owned[index] || !layout_apply(&by, from->shape, unit, made->data, w->owned[index])) return out_of_memory(error, folder);
  made->data = w->owned[index];
  made->rank = 1;
  made->shape[0] = (int64_t)by.count;
  return KHTST_OK;
}

khtst_status weights_open(const artifact* a, const json* variant, weights* w, khtst_error* error) {
  const json *arrays = json_get(variant, "arrays"), *texts = json_get(variant, "layouts");
  *w = (weights){.count = (int)arrays->count};
  w->arrays = calloc(arrays->count + 1, sizeof *w->arrays);
  w->owned = calloc(arrays->count + 1, sizeof *w->owned);
  char* path = joined(a->folder, "weights.bin");
  khtst_status status = w->arrays && w->owned && path ? KHTST_OK : out_of_memory(error, a->folder);
  if (!status && arrays->count) status = map(path, w, error);
  free(path);
  int index = 0;
  for (const json *array = arrays->first, *text = texts->first; array && !status; array = array->next, text = text->next) {
    status = arrange(w, index++, &a->weights[array->integer], text->text, a->folder, error);
  }
  return status;
}

void weights_close(weights* w) {
  for (int i = 0; w->owned && i < w->count; ++i) free(w->owned[i]);
  if (w->mapped) munmap(w->mapped, w->size);
  free(w->owned);
  free(w->arrays);
  *w = (weights){0};
}

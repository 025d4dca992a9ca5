/* run, info, and what verbs share. */
#include "verbs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

khtst_status read_golden(const char* folder, npz* found, khtst_error* error) {
  char* path = joined(folder, "golden.npz");
  *found = (npz){0};
  if (!path) return out_of_memory(error, folder);
  khtst_status status = npz_read(path, found, error);
  free(path);
  return status;
}

khtst_status pick_inputs(const khtst_model* model, const npz* from, const char* prefix, const char* path, khtst_tensor* inputs,
                         khtst_error* error) {
  for (int i = 0; i < khtst_input_count(model); ++i) {
    const char* name = khtst_input(model, i)->name;
    const khtst_tensor* found = npz_get(from, prefix, name);
    if (!found)
      return fail(error, KHTST_USAGE, "%s: has no array '%s%s'; `khtst-run info` lists what is needed", path, prefix, name);
    inputs[i] = *found;
  }
  return KHTST_OK;
}

/* Raises for arrays that are no input. */
static khtst_status check_names(const khtst_model* model, const npz* from, const char* path, khtst_error* error) {
  for (int i = 0; i < from->count; ++i) {
    bool known = false;
    for (int k = 0; k < khtst_input_count(model); ++k)
      known = known || !strcmp(from->arrays[i].name, khtst_input(model, k)->name);
    if (!known)
      return fail(error, KHTST_USAGE, "%s: array '%s' is no input of this model; `khtst-run info` lists what is needed", path,
                  from->arrays[i].name);
  }
  return KHTST_OK;
}

static void print_line(const char* name, khtst_dtype dtype, int rank, const int64_t* shape, const char* const* axes) {
  char text[1024];
  shape_text(text, sizeof text, rank, shape, axes);
  printf("%s: %s %s\n", name, khtst_dtype_name(dtype), text);
}

khtst_status verb_run(const request* asked, khtst_model* model, khtst_error* error) {
  int inputs = khtst_input_count(model), outputs = khtst_output_count(model);
  khtst_tensor *given = calloc((size_t)inputs + 1, sizeof *given), *results = calloc((size_t)outputs + 1, sizeof *results);
  const char** names = calloc((size_t)outputs + 1, sizeof *names);
  npz arrays = {0};
  khtst_status status = given && results && names ? npz_read(asked->input, &arrays, error) : out_of_memory(error, "run");
  if (!status) status = check_names(model, &arrays, asked->input, error);
  if (!status) status = pick_inputs(model, &arrays, "", asked->input, given, error);
  if (!status) status = khtst_run(model, given, results, error);
  if (!status) {
    for (int i = 0; i < outputs; ++i) names[i] = khtst_output(model, i)->name;
    status = npz_write(asked->output, outputs, names, results, error);
  }
  for (int i = 0; i < outputs && !status; ++i) print_line(names[i], results[i].dtype, results[i].rank, results[i].shape, NULL);
  if (!status) printf("written to %s\n", asked->output);
  if (results) khtst_release(results, outputs);
  npz_free(&arrays);
  free(given);
  free(results);
  free(names);
  return status;
}

khtst_status verb_info(const request* asked, khtst_model* model, khtst_error* error) {
  (void)error;
  printf("%s: runs as %s\n", asked->folder, khtst_variant(model));
  for (int i = 0; i < khtst_input_count(model); ++i) {
    const khtst_spec* s = khtst_input(model, i);
    printf("input ");
    print_line(s->name, s->dtype, s->rank, s->shape, s->axes);
  }
  for (int i = 0; i < khtst_output_count(model); ++i) {
    const khtst_spec* s = khtst_output(model, i);
    printf("output ");
    print_line(s->name, s->dtype, s->rank, s->shape, s->axes);
  }
  for (int i = 0; i < khtst_axis_count(model); ++i) {
    const khtst_axis* axis = khtst_axis_at(model, i);
    printf("axis %s: %lld..%lld\n", axis->name, (long long)axis->least, (long long)axis->most);
  }
  return KHTST_OK;
}

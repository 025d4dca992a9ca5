/* A compiled model inside a program of one's own: embed FOLDER [LIBRARIES] runs it on zeros, each dynamic axis at its least size.
 */
#include <khtst.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t least(const khtst_model* model, const char* axis) {
  for (int i = 0; i < khtst_axis_count(model); ++i) {
    if (!strcmp(khtst_axis_at(model, i)->name, axis)) return khtst_axis_at(model, i)->least;
  }
  return 1;
}

static khtst_tensor zeros(const khtst_model* model, const khtst_spec* spec) {
  khtst_tensor made = {.dtype = spec->dtype, .rank = spec->rank};
  for (int i = 0; i < spec->rank; ++i) made.shape[i] = spec->axes[i] ? least(model, spec->axes[i]) : spec->shape[i];
  made.data = calloc(khtst_tensor_size(&made) + 1, 1);
  return made;
}

int main(int argc, char** argv) {
  khtst_model* model;
  khtst_error error;
  khtst_options options = {.threads = 1, .libraries = argc > 2 ? argv[2] : NULL};
  if (argc < 2) return fprintf(stderr, "usage: embed FOLDER [LIBRARIES]\n"), KHTST_USAGE;
  if (khtst_load(argv[1], &options, &model, &error)) return fprintf(stderr, "%s\n", error.message), error.status;
  int input_count = khtst_input_count(model), output_count = khtst_output_count(model);
  khtst_tensor* inputs = calloc((size_t)input_count + 1, sizeof *inputs);
  khtst_tensor* outputs = calloc((size_t)output_count + 1, sizeof *outputs);
  for (int i = 0; i < input_count; ++i) inputs[i] = zeros(model, khtst_input(model, i));
  khtst_status status = khtst_run(model, inputs, outputs, &error);
  if (status) fprintf(stderr, "%s\n", error.message);
  for (int i = 0; i < output_count && !status; ++i)
    printf("%s: %zu bytes\n", khtst_output(model, i)->name, khtst_tensor_size(&outputs[i]));
  khtst_release(outputs, output_count);
  for (int i = 0; i < input_count; ++i) free(inputs[i].data);
  free(inputs);
  free(outputs);
  khtst_free(model);
  return status;
}

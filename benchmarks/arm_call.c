/* Call an artifact, with marks for arm_count.c around each call.
 *
 *   arm_call FOLDER LIBRARIES VARIANT CALLS OUTPUT MAPS INPUT..
 *
 * LIBRARIES: the folder with TVM's runtime. INPUT: SHAPE=FILE of raw data, as 1x128=ids.bin, in the order of the artifact. OUTPUT gets the
 * data of all outputs, MAPS what lies where in memory.
 */
#include <khtst.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MARK() __asm__ volatile("hint #120" ::: "memory")

static void copy(const char* from, const char* to) {
  FILE *in = fopen(from, "r"), *out = fopen(to, "w");
  if (!in || !out) perror(to), exit(KHTST_RESOURCES);
  for (int c; (c = getc(in)) != EOF;) putc(c, out);
  if (fclose(out) || fclose(in)) perror(to), exit(KHTST_RESOURCES);
}

static khtst_tensor read_input(const khtst_spec* spec, const char* text) {
  khtst_tensor made = {.dtype = spec->dtype};
  char* at = (char*)text;
  while (*at && *at != '=' && made.rank < KHTST_MAX_RANK) made.shape[made.rank++] = strtoll(at, &at, 10), at += *at == 'x';
  size_t size = khtst_tensor_size(&made);
  made.data = aligned_alloc(64, (size + 127) / 64 * 64);
  FILE* file = *at ? fopen(at + 1, "rb") : NULL;
  if (!file || !made.data || fread(made.data, 1, size, file) != size) fprintf(stderr, "%s: no such data\n", text), exit(KHTST_USAGE);
  fclose(file);
  return made;
}

int main(int argc, char** argv) {
  khtst_model* model;
  khtst_error error;
  if (argc < 8) return fprintf(stderr, "usage: arm_call FOLDER LIBRARIES VARIANT CALLS OUTPUT MAPS INPUT..\n"), KHTST_USAGE;
  khtst_options options = {.threads = 1, .libraries = argv[2], .variant = argv[3], .trust_files = 1};
  if (khtst_load(argv[1], &options, &model, &error)) return fprintf(stderr, "%s\n", error.message), error.status;
  int given = argc - 7, outputs_made = khtst_output_count(model);
  if (given != khtst_input_count(model)) return fprintf(stderr, "%d inputs; needed %d\n", given, khtst_input_count(model)), KHTST_USAGE;
  khtst_tensor* inputs = calloc((size_t)given, sizeof *inputs);
  khtst_tensor* outputs = calloc((size_t)outputs_made, sizeof *outputs);
  for (int i = 0; i < given; ++i) inputs[i] = read_input(khtst_input(model, i), argv[7 + i]);
  for (int left = atoi(argv[4]); left > 0; --left) {
    MARK();
    khtst_status status = khtst_run(model, inputs, outputs, &error);
    MARK();
    if (status) return fprintf(stderr, "%s\n", error.message), status;
    if (left > 1) khtst_release(outputs, outputs_made);
  }
  FILE* file = fopen(argv[5], "wb");
  for (int i = 0; i < outputs_made && file; ++i) fwrite(outputs[i].data, 1, khtst_tensor_size(&outputs[i]), file);
  if (!file || fclose(file)) return perror(argv[5]), KHTST_RESOURCES;
  copy("/proc/self/maps", argv[6]);
  khtst_release(outputs, outputs_made);
  for (int i = 0; i < given; ++i) free(inputs[i].data);
  free(inputs);
  free(outputs);
  khtst_free(model);
  return 0;
}

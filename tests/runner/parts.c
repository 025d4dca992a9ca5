/* The runner's parts that need no model, one a call, on files:
 *   parts sha256 FILE | json FILE | npz IN OUT | layout TEXT SHAPE UNIT IN OUT | flags NAME...
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "cpu.h"
#include "json.h"
#include "layout.h"
#include "npz.h"
#include "sha256.h"

/* A whole file in memory of exactly its size, so that a read beyond it is seen. */
static char* slurp(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) exit(9);
  *size = (size_t)ftell(file);
  rewind(file);
  char* text = malloc(*size ? *size : 1);
  if (!text || fread(text, 1, *size, file) != *size) exit(9);
  fclose(file);
  return text;
}

static int show_sha256(const char* path) {
  size_t size;
  char *text = slurp(path, &size), hex[65], again[65];
  sha256 whole, pieces;
  sha256_begin(&whole);
  sha256_begin(&pieces);
  sha256_add(&whole, text, size);
  for (size_t at = 0, step = 1; at < size; at += step, step = step % 97 + 1)
    sha256_add(&pieces, text + at, size - at < step ? size - at : step);
  sha256_end(&whole, hex);
  sha256_end(&pieces, again);
  puts(strcmp(hex, again) ? "pieces differ" : hex);
  free(text);
  return 0;
}

/* As Python's json.dumps with sorted keys off and fractions as "fraction" would, texts in hexadecimal. */
static void show(const json* value) {
  static const char* const words[] = {
      [JSON_NULL] = "null", [JSON_FALSE] = "false", [JSON_TRUE] = "true", [JSON_FRACTION] = "fraction"};
  if (value->kind == JSON_INTEGER) {
    printf("%" PRId64, value->integer);
  } else if (value->kind == JSON_STRING) {
    putchar('<');
    for (const char* at = value->text; *at; ++at) printf("%02x", (unsigned char)*at);
    putchar('>');
  } else if (value->kind == JSON_ARRAY || value->kind == JSON_OBJECT) {
    printf("%zu(", value->count);
    for (const json* member = value->first; member; member = member->next) {
      if (member->name) printf("%s=", member->name);
      show(member);
      putchar(';');
    }
    putchar(')');
  } else {
    fputs(words[value->kind], stdout);
  }
}

static int show_json(const char* path) {
  size_t size;
  char *text = slurp(path, &size), why[160];
  json_memory memory = {0};
  bool exhausted;
  const json* root = json_parse(text, size, &memory, why, sizeof why, &exhausted);
  if (root) {
    show(root);
    putchar('\n');
  } else {
    puts(why);
  }
  json_free(&memory);
  free(text);
  return root ? 0 : 2;
}

static int copy_npz(const char* from, const char* to) {
  npz found;
  khtst_error error;
  khtst_status status = npz_read(from, &found, &error);
  const char** names = calloc((size_t)found.count + 1, sizeof *names);
  khtst_tensor* tensors = calloc((size_t)found.count + 1, sizeof *tensors);
  for (int i = 0; i < found.count; ++i) names[i] = found.arrays[i].name, tensors[i] = found.arrays[i].tensor;
  if (!status) status = npz_write(to, found.count, names, tensors, &error);
  if (status) puts(error.message);
  free(names);
  free(tensors);
  npz_free(&found);
  return (int)status;
}

static int lay_out(const char* text, const char* sizes, size_t unit, const char* from, const char* to) {
  layout by;
  int64_t shape[LAYOUT_MOST];
  int rank = 0;
  size_t size;
  for (char* at = (char*)sizes; *at && rank < LAYOUT_MOST; at += *at == 'x') shape[rank++] = strtoll(at, &at, 10);
  if (!layout_parse(text, &by)) return puts("no layout"), 2;
  if (!layout_fits(&by, rank, shape)) return puts("does not fit"), 2;
  char *matrix = slurp(from, &size), *made = malloc(by.count * unit);
  FILE* file = fopen(to, "wb");
  bool good = made && file && layout_apply(&by, shape, unit, matrix, made) && fwrite(made, unit, by.count, file) == by.count;
  if (file) fclose(file);
  free(made);
  free(matrix);
  return good ? 0 : 9;
}

static int show_flags(int count, char** names) {
  cpu_flags* flags = cpu_read();
  for (int i = 0; i < count; ++i) printf("%d", cpu_has(flags, names[i]));
  printf(" %s\n", cpu_processor());
  free(flags);
  return 0;
}

int main(int argc, char** argv) {
  const char* what = argc > 2 ? argv[1] : "";
  if (!strcmp(what, "sha256")) return show_sha256(argv[2]);
  if (!strcmp(what, "json")) return show_json(argv[2]);
  if (!strcmp(what, "npz") && argc == 4) return copy_npz(argv[2], argv[3]);
  if (!strcmp(what, "layout") && argc == 7) return lay_out(argv[2], argv[3], (size_t)atoi(argv[4]), argv[5], argv[6]);
  if (!strcmp(what, "flags")) return show_flags(argc - 2, argv + 2);
  return 9;
}

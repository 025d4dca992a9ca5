/* khtst-run: check, time and use a compiled model on a device. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base.h"
#include "verbs.h"
#include "version.h"

static const char usage[] =
    "usage: khtst-run verify DIR                        compare results with those the artifact carries, byte by byte\n"
    "       khtst-run bench DIR [--seconds S] [--shape 1x128]...\n"
    "                                                   time it; --shape: sizes of the dynamic axes, repeatable\n"
    "       khtst-run run DIR IN.npz OUT.npz            run it on arrays\n"
    "       khtst-run info DIR                          inputs, outputs and the variant that runs here\n"
    "options: --threads N (1)   --variant NAME (the fastest this CPU has the features for)\n"
    "         --libraries DIR (lib/ beside this program)   --trust-files (do not compare hashes)\n"
    "exit codes: 0 ok, 1 results differ, 2 usage or a damaged artifact, 4 environment, 5 resources, 70 a bug\n";

typedef struct {
  const char* name;
  int words; /* after the verb */
  khtst_status (*run)(const request*, khtst_model*, khtst_error*);
} verb;

static const verb verbs[] = {{"verify", 1, verb_verify}, {"bench", 1, verb_bench}, {"run", 3, verb_run}, {"info", 1, verb_info}};

static khtst_status whole_number(const char* option, const char* text, int* value, khtst_error* error) {
  char* end;
  long found = strtol(text, &end, 10);
  if (!*text || *end || found < 1 || found > 4096)
    return fail(error, KHTST_USAGE, "%s is '%s'; needed: a whole number from 1 to 4096", option, text);
  *value = (int)found;
  return KHTST_OK;
}

static khtst_status seconds_of(const char* option, const char* text, double* value, khtst_error* error) {
  char* end;
  *value = strtod(text, &end);
  if (!*text || *end || !(*value >= 0.01 && *value <= 1e6))
    return fail(error, KHTST_USAGE, "%s is '%s'; needed: a number of seconds from 0.01 on", option, text);
  return KHTST_OK;
}

/* The options and words after the verb; `asked->shapes` has room for all of them. */
static khtst_status parse(const verb* chosen, int count, char** words, request* asked, khtst_error* error) {
  const char** places[] = {&asked->folder, &asked->input, &asked->output};
  khtst_status status = KHTST_OK;
  int found = 0;
  for (int i = 0; i < count && !status; ++i) {
    const char* word = words[i];
    if (strncmp(word, "--", 2)) {
      if (found == chosen->words)
        return fail(error, KHTST_USAGE, "'%s' is one word too many for %s\n%s", word, chosen->name, usage);
      *places[found++] = word;
      continue;
    }
    if (!strcmp(word, "--trust-files")) {
      asked->load.trust_files = 1;
      continue;
    }
    bool bench = !strcmp(chosen->name, "bench");
    const char* value = i + 1 < count ? words[++i] : NULL;
    if (!value)
      return fail(error, KHTST_USAGE, "%s is the last word; needed: a value after it, and to be an option\n%s", word, usage);
    if (!strcmp(word, "--threads")) {
      status = whole_number(word, value, &asked->load.threads, error);
    } else if (!strcmp(word, "--variant")) {
      asked->load.variant = value;
    } else if (!strcmp(word, "--libraries")) {
      asked->load.libraries = value;
    } else if (bench && !strcmp(word, "--seconds")) {
      status = seconds_of(word, value, &asked->seconds, error);
    } else if (bench && !strcmp(word, "--shape")) {
      asked->shapes[asked->shape_count++] = value;
    } else {
      return fail(error, KHTST_USAGE, "%s is no option of %s\n%s", word, chosen->name, usage);
    }
  }
  if (!status && found < chosen->words)
    return fail(error, KHTST_USAGE, "%s needs %d words, found %d\n%s", chosen->name, chosen->words, found, usage);
  return status;
}

/* lib/ beside this program, where there is such a folder. */
static bool beside(char* path, size_t room) {
  ssize_t size = readlink("/proc/self/exe", path, room - 8);
  struct stat about;
  if (size <= 0) return false;
  path[size] = 0;
  char* slash = strrchr(path, '/');
  strcpy(slash ? slash : path, "/lib");
  return !stat(path, &about) && S_ISDIR(about.st_mode);
}

static khtst_status serve(const verb* chosen, int count, char** words, khtst_error* error) {
  char libraries[PATH_MAX];
  khtst_model* model;
  request asked = {.seconds = 2, .shapes = calloc((size_t)count + 1, sizeof(char*))};
  if (!asked.shapes) return out_of_memory(error, "khtst-run");
  khtst_status status = parse(chosen, count, words, &asked, error);
  if (!asked.load.libraries && beside(libraries, sizeof libraries)) asked.load.libraries = libraries;
  if (!status) status = khtst_load(asked.folder, &asked.load, &model, error);
  if (!status) {
    status = chosen->run(&asked, model, error);
    khtst_free(model);
  }
  free(asked.shapes);
  return status;
}

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "";
  const verb* chosen = NULL;
  khtst_error error = {0};
  if (!strcmp(name, "-h") || !strcmp(name, "--help")) return fputs(usage, stdout) < 0;
  if (!strcmp(name, "--version")) return printf("khtst-run for tvm %s, tvm-ffi %s\n", KHTST_TVM, KHTST_TVM_FFI) < 0;
  for (size_t i = 0; i < sizeof verbs / sizeof *verbs; ++i) {
    if (!strcmp(name, verbs[i].name)) chosen = &verbs[i];
  }
  khtst_status status = chosen
                            ? serve(chosen, argc - 2, argv + 2, &error)
                            : fail(&error, KHTST_USAGE, "'%s' is no verb; needed: verify, bench, run or info\n%s", name, usage);
  if (!status && (fflush(stdout) || ferror(stdout))) status = fail(&error, KHTST_RESOURCES, "standard output cannot be written");
  if (status) fprintf(stderr, "khtst-run: %s\n", error.message);
  return (int)status;
}

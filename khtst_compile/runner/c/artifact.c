#include "artifact.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "sha256.h"

#define MANIFEST "manifest.json"

const char* text_of(const json* object, const char* name) {
  const json* found = json_get(object, name);
  return found && found->kind == JSON_STRING ? found->text : NULL;
}

static bool is(const json* value, json_kind kind) { return value && value->kind == kind; }

static khtst_status broken(const artifact* a, khtst_error* error, const char* what) {
  return fail(error, KHTST_USAGE, "%s: %s; make or copy the artifact again", a->folder, what);
}

/* The whole file, in new memory. */
static khtst_status read_file(const char* path, char** text, size_t* size, khtst_error* error) {
  FILE* file = fopen(path, "rb");
  struct stat about;
  *text = NULL;
  if (!file || fstat(fileno(file), &about) || !S_ISREG(about.st_mode)) {
    if (file) fclose(file);
    return fail(error, KHTST_USAGE, "%s: no such file; needed: the folder of an artifact, as `khtst-compile lower` writes it",
                path);
  }
  *size = (size_t)about.st_size;
  *text = malloc(*size + 1);
  bool good = *text && fread(*text, 1, *size, file) == *size;
  fclose(file);
  if (!*text) return out_of_memory(error, path);
  return good ? KHTST_OK : fail(error, KHTST_USAGE, "%s: cannot be read; copy the folder again", path);
}

static khtst_status check_version(const artifact* a, khtst_error* error) {
  const json* version = json_get(a->manifest, "version");
  const char *format = text_of(a->manifest, "format"), *kind = text_of(a->manifest, "kind");
  if (!format || strcmp(format, ARTIFACT_FORMAT)) {
    return fail(error, KHTST_USAGE, "%s: %s is not one of a %s; point to a folder written by khtst-compile", a->folder, MANIFEST,
                ARTIFACT_FORMAT);
  }
  if (!kind || strcmp(kind, ARTIFACT_KIND)) {
    return fail(error, KHTST_USAGE, "%s: this artifact is of kind '%s'; needed: '%s' (made by khtst-compile lower)", a->folder,
                kind ? kind : "?", ARTIFACT_KIND);
  }
  if (!is(version, JSON_INTEGER) || version->integer != ARTIFACT_VERSION) {
    return fail(error, KHTST_USAGE, "%s: artifact version %lld, this runner reads version %d; lower it again with --emit-runner",
                a->folder, is(version, JSON_INTEGER) ? (long long)version->integer : -1, ARTIFACT_VERSION);
  }
  return KHTST_OK;
}

/* Room for the members of an array or object; NULL (with an error) where it is no such thing or there is no memory. */
static void* room_for(const artifact* a, const char* name, json_kind kind, size_t unit, int* count, khtst_error* error) {
  const json* list = json_get(a->manifest, name);
  if (!is(list, kind) || list->count > 1 << 20) {
    char what[128];
    snprintf(what, sizeof what, "manifest.%s is missing or of another kind than it should be", name);
    broken(a, error, what);
    return NULL;
  }
  *count = (int)list->count;
  void* made = calloc(list->count ? list->count : 1, unit);
  if (!made) out_of_memory(error, a->folder);
  return made;
}

/* dtype and shape of an entry; sizes may be names of axes where `axes` is given. */
static bool read_shape(const json* entry, khtst_dtype* dtype, int* rank, int64_t* shape, const char** axes) {
  const char* name = text_of(entry, "dtype");
  const json* sizes = json_get(entry, "shape");
  if (!name || !dtype_of(name, dtype) || !is(sizes, JSON_ARRAY) || sizes->count > KHTST_MAX_RANK) return false;
  *rank = 0;
  for (const json* size = sizes->first; size; size = size->next) {
    bool named = axes && size->kind == JSON_STRING;
    if (!named && (size->kind != JSON_INTEGER || size->integer < 0)) return false;
    if (axes) axes[*rank] = named ? size->text : NULL;
    shape[(*rank)++] = named ? KHTST_DYNAMIC : size->integer;
  }
  return true;
}

static khtst_status read_specs(const artifact* a, const char* name, khtst_spec** specs, int* count, khtst_error* error) {
  if (!(*specs = room_for(a, name, JSON_ARRAY, sizeof **specs, count, error))) return error ? error->status : KHTST_USAGE;
  khtst_spec* made = *specs;
  for (const json* entry = json_get(a->manifest, name)->first; entry; entry = entry->next, ++made) {
    made->name = text_of(entry, "name");
    if (!made->name || !read_shape(entry, &made->dtype, &made->rank, made->shape, made->axes)) {
      char what[256];
      snprintf(what, sizeof what, "manifest.%s[%d] has no name, or a dtype or shape this runner does not know", name,
               (int)(made - *specs));
      return broken(a, error, what);
    }
  }
  return KHTST_OK;
}

/* [least, most]; a null stands for the lowest or highest there is. */
static bool read_range(const json* pair, int64_t* least, int64_t* most) {
  if (!is(pair, JSON_ARRAY) || pair->count != 2) return false;
  const json *low = pair->first, *high = low->next;
  *least = low->kind == JSON_INTEGER ? low->integer : 0;
  *most = high->kind == JSON_INTEGER ? high->integer : INT64_MAX;
  return (low->kind == JSON_INTEGER || low->kind == JSON_NULL) && (high->kind == JSON_INTEGER || high->kind == JSON_NULL);
}

static khtst_status read_axes(artifact* a, khtst_error* error) {
  if (!(a->axes = room_for(a, "axes", JSON_OBJECT, sizeof *a->axes, &a->axis_count, error)))
    return error ? error->status : KHTST_USAGE;
  khtst_axis* made = a->axes;
  for (const json* entry = json_get(a->manifest, "axes")->first; entry; entry = entry->next, ++made) {
    made->name = entry->name;
    if (!read_range(entry, &made->least, &made->most))
      return broken(a, error, "manifest.axes has an entry that is no [least, most]");
  }
  if (!(a->ranges = calloc((size_t)a->input_count + 1, sizeof *a->ranges))) return out_of_memory(error, a->folder);
  for (int i = 0; i < a->input_count; ++i) {
    const json* pair = json_get(json_get(a->manifest, "ranges"), a->inputs[i].name);
    a->ranges[i].there = pair;
    if (pair && !read_range(pair, &a->ranges[i].least, &a->ranges[i].most))
      return broken(a, error, "manifest.ranges has an entry that is no [lowest, highest]");
  }
  return KHTST_OK;
}

static khtst_status read_weights(artifact* a, khtst_error* error) {
  a->weights = room_for(a, "weights", JSON_ARRAY, sizeof *a->weights, &a->weight_count, error);
  if (!a->weights) return error ? error->status : KHTST_USAGE;
  stored_array* made = a->weights;
  for (const json* entry = json_get(a->manifest, "weights")->first; entry; entry = entry->next, ++made) {
    const json* offset = json_get(entry, "offset");
    bool good = read_shape(entry, &made->dtype, &made->rank, made->shape, NULL) && is(offset, JSON_INTEGER);
    if (!good || offset->integer < 0 || offset->integer % ALIGN || !size_of(made->dtype, made->rank, made->shape, &made->size)) {
      char what[128];
      snprintf(what, sizeof what, "manifest.weights[%d] has a dtype, shape or offset this runner does not know",
               (int)(made - a->weights));
      return broken(a, error, what);
    }
    made->offset = (size_t)offset->integer;
  }
  return KHTST_OK;
}

static khtst_status check_variant(const artifact* a, const json* variant, khtst_error* error) {
  const json *flags = json_get(variant, "cpu_flags"), *arrays = json_get(variant, "arrays"),
             *layouts = json_get(variant, "layouts");
  const char* library = text_of(variant, "library");
  if (!text_of(variant, "name") || !library || !is(flags, JSON_ARRAY) || !is(arrays, JSON_ARRAY) || !is(layouts, JSON_ARRAY)) {
    return broken(a, error, "manifest.target.variants lacks name, library, cpu_flags, arrays or layouts");
  }
  for (const json* flag = flags->first; flag; flag = flag->next) {
    if (flag->kind != JSON_STRING) return broken(a, error, "manifest.target.variants.cpu_flags holds something that is no text");
  }
  if (!json_get(json_get(a->manifest, "files"), library))
    return broken(a, error, "manifest.target.variants.library is not among the files");
  if (arrays->count != layouts->count || arrays->count > 1 << 20)
    return broken(a, error, "a variant has not as many layouts as arrays");
  for (const json *array = arrays->first, *text = layouts->first; array; array = array->next, text = text->next) {
    layout by;
    if (array->kind != JSON_INTEGER || array->integer < 0 || array->integer >= a->weight_count)
      return broken(a, error, "a variant names an array that is not stored");
    const stored_array* stored = &a->weights[array->integer];
    if (text->kind == JSON_NULL) continue;
    if (text->kind != JSON_STRING || !layout_parse(text->text, &by) || !layout_fits(&by, stored->rank, stored->shape)) {
      char what[256];
      snprintf(what, sizeof what, "layout '%.100s' does not fit array %lld", text->text ? text->text : "?",
               (long long)array->integer);
      return broken(a, error, what);
    }
  }
  return KHTST_OK;
}

/* A name that stays inside the folder. */
static bool harmless(const char* name) {
  for (const char* part = name;; part += strcspn(part, "/") + 1) {
    size_t size = strcspn(part, "/");
    if (!size || (size == 2 && !strncmp(part, "..", 2))) return false;
    if (!part[size]) return true;
  }
}

static khtst_status hash_file(const char* path, char hex[65], khtst_error* error) {
  enum { PIECE = 1 << 18 };
  FILE* file = fopen(path, "rb");
  char* piece = malloc(PIECE);
  sha256 hash;
  sha256_begin(&hash);
  bool good = file && piece;
  for (size_t got; good && (got = fread(piece, 1, PIECE, file));) sha256_add(&hash, piece, got);
  good = good && !ferror(file);
  sha256_end(&hash, hex);
  if (file) fclose(file);
  free(piece);
  if (good) return KHTST_OK;
  return piece ? fail(error, KHTST_USAGE, "%s: cannot be read; copy the folder again", path) : out_of_memory(error, path);
}

static khtst_status check_file(const artifact* a, const json* entry, bool trust, khtst_error* error) {
  const char* wanted = text_of(entry, "sha256");
  const json* size = json_get(entry, "bytes");
  struct stat about;
  if (!harmless(entry->name))
    return fail(error, KHTST_USAGE, "%s: manifest names an impossible file '%s'; do not use this artifact", a->folder,
                entry->name);
  if (!wanted || !is(size, JSON_INTEGER)) return broken(a, error, "manifest.files has an entry without sha256 or bytes");
  char* path = joined(a->folder, entry->name);
  if (!path) return out_of_memory(error, a->folder);
  khtst_status status = KHTST_OK;
  if (stat(path, &about) || !S_ISREG(about.st_mode)) {
    status = fail(error, KHTST_USAGE, "%s: file '%s' is missing; copy the whole folder again", a->folder, entry->name);
  } else if (about.st_size != size->integer) {
    status = fail(error, KHTST_USAGE, "%s: '%s' has %lld bytes, the manifest says %lld; copy the folder again", a->folder,
                  entry->name, (long long)about.st_size, (long long)size->integer);
  } else if (!trust) {
    char hex[65];
    status = hash_file(path, hex, error);
    if (!status && strcmp(hex, wanted)) {
      status =
          fail(error, KHTST_USAGE, "%s: '%s' was altered (its sha256 differs from the manifest); make or copy the artifact again",
               a->folder, entry->name);
    }
  }
  free(path);
  return status;
}

static khtst_status read_manifest(artifact* a, khtst_error* error) {
  char *path = joined(a->folder, MANIFEST), *text, why[160];
  size_t size = 0;
  bool exhausted;
  if (!path) return out_of_memory(error, a->folder);
  khtst_status status = read_file(path, &text, &size, error);
  if (!status && !(a->manifest = json_parse(text, size, &a->memory, why, sizeof why, &exhausted))) {
    status = exhausted ? out_of_memory(error, path)
                       : fail(error, KHTST_USAGE, "%s: cannot be read as JSON (%s); make or copy the artifact again", path, why);
  }
  free(text);
  free(path);
  return status;
}

khtst_status artifact_open(const char* folder, bool trust, artifact* a, khtst_error* error) {
  khtst_error own; /* room_for reports through it */
  if (!error) error = &own;
  *a = (artifact){0};
  if (!(a->folder = strdup(folder))) return out_of_memory(error, folder);
  khtst_status status = read_manifest(a, error);
  if (!status) status = check_version(a, error);
  if (!status) status = read_specs(a, "inputs", &a->inputs, &a->input_count, error);
  if (!status) status = read_specs(a, "outputs", &a->outputs, &a->output_count, error);
  if (!status) status = read_axes(a, error);
  if (!status) status = read_weights(a, error);
  if (status) return status;
  const json *files = json_get(a->manifest, "files"), *variants = json_get(json_get(a->manifest, "target"), "variants");
  if (!is(files, JSON_OBJECT)) return broken(a, error, "manifest.files is missing");
  if (!is(variants, JSON_ARRAY) || !variants->count) return broken(a, error, "manifest.target.variants is empty or missing");
  for (const json* variant = variants->first; variant && !status; variant = variant->next)
    status = check_variant(a, variant, error);
  for (const json* entry = files->first; entry && !status; entry = entry->next) status = check_file(a, entry, trust, error);
  return status;
}

void artifact_close(artifact* a) {
  json_free(&a->memory);
  free(a->folder);
  free(a->inputs);
  free(a->outputs);
  free(a->axes);
  free(a->ranges);
  free(a->weights);
  *a = (artifact){0};
}

/* Whether the variant was built for another processor than this code. */
static bool foreign(const json* variant) {
  const char *triple = text_of(variant, "triple"), *processor = cpu_processor();
  return triple && strncmp(triple, processor, strlen(processor));
}

static bool runs_on(const json* variant, const cpu_flags* cpu) {
  for (const json* flag = json_get(variant, "cpu_flags")->first; flag; flag = flag->next) {
    if (!cpu_has(cpu, flag->text)) return false;
  }
  return !foreign(variant);
}

/* Add words to a list with commas. */
static void add(char* list, size_t room, const char* word) {
  size_t used = strlen(list);
  snprintf(list + used, room - used, "%s%s", used ? ", " : "", word);
}

khtst_status artifact_choose(const artifact* a, const char* name, const cpu_flags* cpu, const json** variant,
                             khtst_error* error) {
  char all[256] = "", wanted[256] = "", needs[256] = "", lacks[256] = "";
  const json* least = NULL;
  for (*variant = json_get(json_get(a->manifest, "target"), "variants")->first; *variant; *variant = (*variant)->next) {
    add(all, sizeof all, text_of(*variant, "name"));
    if (name && strcmp(name, text_of(*variant, "name"))) continue;
    if (runs_on(*variant, cpu)) return KHTST_OK;
    add(wanted, sizeof wanted, text_of(*variant, "name"));
    least = *variant;
  }
  if (!least) return fail(error, KHTST_USAGE, "%s: has no variant '%s'; it holds %s", a->folder, name, all);
  if (foreign(least)) {
    return fail(error, KHTST_ENVIRONMENT, "%s: built for %s (%s); this is %s; lower again with a target for it", a->folder,
                wanted, text_of(least, "triple"), cpu_processor());
  }
  for (const json* flag = json_get(least, "cpu_flags")->first; flag; flag = flag->next) {
    add(needs, sizeof needs, flag->text);
    if (!cpu_has(cpu, flag->text)) add(lacks, sizeof lacks, flag->text);
  }
  return fail(error, KHTST_ENVIRONMENT,
              "%s: built for %s; %s needs the CPU features %s; this CPU lacks %s; lower again with a target from `khtst-compile "
              "targets` that "
              "can run here",
              a->folder, wanted, text_of(least, "name"), needs, lacks);
}

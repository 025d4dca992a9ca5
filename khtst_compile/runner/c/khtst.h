/* Run what `khtst-compile lower` wrote, from C, without Python.
 *
 *   khtst_model* model;
 *   khtst_error error;
 *   if (khtst_load("minilm-arm", NULL, &model, &error)) return fprintf(stderr, "%s\n", error.message), error.status;
 *   khtst_run(model, inputs, outputs, &error);   // arrays of khtst_input_count(model) and khtst_output_count(model) tensors
 *   khtst_release(outputs, khtst_output_count(model));
 *   khtst_free(model);
 *
 * There are no globals. Any number of models may be loaded, and any thread may call any of them: runs of one model wait for each
 * other, runs of different models do not. A function that can fail returns a khtst_status, 0 where all is well, and says in its
 * `error` (which may be NULL) where, what was found, what was needed and what to do. Nothing is printed and the process is never
 * ended.
 */
#ifndef KHTST_H_
#define KHTST_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KHTST_MAX_RANK 8
#define KHTST_DYNAMIC (-1) /* in the shape of a khtst_spec: a size that each run chooses */

/* The exit codes of khtst-compile. */
typedef enum {
  KHTST_OK = 0,
  KHTST_OVER_BUDGET = 1, /* results differ from those the artifact carries */
  KHTST_USAGE = 2,       /* a wrong path, option, shape or value; a damaged or foreign artifact */
  KHTST_ENVIRONMENT = 4, /* this machine lacks CPU features, or a library of the right version */
  KHTST_RESOURCES = 5,   /* memory or disk space ran out */
  KHTST_INTERNAL = 70    /* a bug: please report it */
} khtst_status;

typedef struct {
  khtst_status status;
  char message[1024]; /* one sentence or more, UTF-8, no newline at the end */
} khtst_error;

typedef enum {
  KHTST_BOOL, /* one byte, 0 or 1 */
  KHTST_INT8,
  KHTST_UINT8,
  KHTST_INT16,
  KHTST_INT32,
  KHTST_INT64,
  KHTST_FLOAT32,
  KHTST_FLOAT64
} khtst_dtype;

/* A dense array in C order, in the byte order of this machine. */
typedef struct {
  khtst_dtype dtype;
  int rank;                      /* 0 to KHTST_MAX_RANK; 0 is a single number */
  int64_t shape[KHTST_MAX_RANK]; /* the first `rank` count */
  void* data;                    /* may be NULL where some size is 0 */
} khtst_tensor;

/* An input or output as the artifact describes it. */
typedef struct {
  const char* name;
  khtst_dtype dtype;
  int rank;
  int64_t shape[KHTST_MAX_RANK];    /* KHTST_DYNAMIC where the size is free */
  const char* axes[KHTST_MAX_RANK]; /* the name of that axis (equal names have equal sizes), NULL for a fixed one */
} khtst_spec;

/* A dynamic axis: sizes from `least` to `most`, both inclusive. */
typedef struct {
  const char* name;
  int64_t least, most;
} khtst_axis;

typedef struct {
  int threads;           /* kernel threads, at least 1; 0 is 1. At most one for each core the caller may use is started */
  const char* variant;   /* which of the artifact's variants to run; NULL: the first this CPU has the features for */
  const char* libraries; /* folder of libtvm_ffi.so and libtvm_runtime.so; NULL: where the system looks for libraries */
  int trust_files;       /* not 0: do not compare the sha256 of every file (sizes are compared all the same) */
} khtst_options;

typedef struct khtst_model khtst_model;

/* Load the artifact in `folder`. options: NULL for all defaults. On success *model is to be freed with khtst_free; on failure it
 * is NULL. Structure, version, sizes and hashes of the files, CPU features and versions of the libraries are checked, in this
 * order, before any native code of the artifact is loaded. KHTST_USAGE: damaged, foreign, of another version, or without that
 * variant; KHTST_ENVIRONMENT: this machine cannot run it; KHTST_RESOURCES: out of memory. */
khtst_status khtst_load(const char* folder, const khtst_options* options, khtst_model** model, khtst_error* error);

/* Compute outputs from inputs, both in the order of the artifact.
 *
 * inputs: khtst_input_count tensors of the dtypes and shapes of khtst_input. They stay the caller's and are read only; data that
 * begins at a multiple of 64 bytes is read in place, other data is copied. outputs: khtst_output_count tensors, overwritten;
 * their data, aligned to 64 bytes, becomes the caller's, to be given to khtst_release. After a failure they hold nothing.
 * KHTST_USAGE names the input at fault; KHTST_RESOURCES: intermediate values do not fit in memory. */
khtst_status khtst_run(khtst_model* model, const khtst_tensor* inputs, khtst_tensor* outputs, khtst_error* error);

/* Free the data of `count` tensors that khtst_run filled, and set it to NULL. */
void khtst_release(khtst_tensor* outputs, int count);

/* Unload. No run of it may be going on. NULL is allowed. With several threads it takes a moment: TVM's workers look for work
 * before they end. */
void khtst_free(khtst_model* model);

/* What a model takes and gives. All of it belongs to the model; an index outside [0, count) gives NULL. */
int khtst_input_count(const khtst_model* model);
int khtst_output_count(const khtst_model* model);
int khtst_axis_count(const khtst_model* model);
const khtst_spec* khtst_input(const khtst_model* model, int index);
const khtst_spec* khtst_output(const khtst_model* model, int index);
const khtst_axis* khtst_axis_at(const khtst_model* model, int index);

/* The variant that runs, such as "arm-dotprod". */
const char* khtst_variant(const khtst_model* model);

/* "float32" and so on, and bytes of one element. */
const char* khtst_dtype_name(khtst_dtype dtype);
size_t khtst_dtype_size(khtst_dtype dtype);

/* Bytes of a tensor's data. */
size_t khtst_tensor_size(const khtst_tensor* tensor);

#ifdef __cplusplus
}
#endif

#endif /* KHTST_H_ */

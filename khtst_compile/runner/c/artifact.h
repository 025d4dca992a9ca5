/* The folder `khtst-compile lower` writes: its manifest, and the check of its files. */
#ifndef KHTST_ARTIFACT_H_
#define KHTST_ARTIFACT_H_

#include "base.h"
#include "cpu.h"
#include "json.h"
#include "layout.h"

/* The form of the folder that is understood here. */
#define ARTIFACT_FORMAT "khtst-artifact"
#define ARTIFACT_KIND "library"
#define ARTIFACT_VERSION 2

/* One array in weights.bin. */
typedef struct {
  khtst_dtype dtype;
  int rank;
  int64_t shape[KHTST_MAX_RANK];
  size_t offset, size; /* bytes; offset is a multiple of ALIGN */
} stored_array;

/* The values an integer input may have. */
typedef struct {
  bool there;
  int64_t least, most;
} value_range;

typedef struct {
  char* folder;
  json_memory memory; /* names below live in it */
  const json* manifest;
  int input_count, output_count, axis_count, weight_count;
  khtst_spec *inputs, *outputs;
  value_range* ranges; /* of inputs */
  khtst_axis* axes;
  stored_array* weights;
} artifact;

/* Read and check the manifest, then all files (their sha256 unless `trust`). `made` is to be given to artifact_close, also after
 * a failure. */
khtst_status artifact_open(const char* folder, bool trust, artifact* made, khtst_error* error);

void artifact_close(artifact* made);

/* The entry of the variant of that name, or (NULL) of the first that `cpu` has all features for. */
khtst_status artifact_choose(const artifact* from, const char* name, const cpu_flags* cpu, const json** variant,
                             khtst_error* error);

/* The inputs in the order of the artifact against dtypes, shapes, axes and ranges. KHTST_USAGE names the input at fault. */
khtst_status artifact_check(const artifact* from, const khtst_tensor* inputs, khtst_error* error);

/* Text of a member that was checked to be there. */
const char* text_of(const json* object, const char* name);

#endif /* KHTST_ARTIFACT_H_ */

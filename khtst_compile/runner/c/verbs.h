/* What the program does, a verb each. A verb prints its result to standard output and returns an exit code with its error. */
#ifndef KHTST_VERBS_H_
#define KHTST_VERBS_H_

#include "khtst.h"
#include "npz.h"

typedef struct {
  const char* folder;
  const char *input, *output; /* of run */
  double seconds;             /* of bench, for each shape */
  const char** shapes;        /* of bench: texts such as 1x128 */
  int shape_count;
  khtst_options load;
} request;

khtst_status verb_verify(const request* asked, khtst_model* model, khtst_error* error);
khtst_status verb_bench(const request* asked, khtst_model* model, khtst_error* error);
khtst_status verb_run(const request* asked, khtst_model* model, khtst_error* error);
khtst_status verb_info(const request* asked, khtst_model* model, khtst_error* error);

/* golden.npz of the artifact; `found` is to be given to npz_free. */
khtst_status read_golden(const char* folder, npz* found, khtst_error* error);

/* The inputs of a model from arrays whose names begin with `prefix`, in its order; their data stays that of `from`. */
khtst_status pick_inputs(const khtst_model* model, const npz* from, const char* prefix, const char* path, khtst_tensor* inputs,
                         khtst_error* error);

#endif /* KHTST_VERBS_H_ */

/* A loaded model, inside. */
#ifndef KHTST_MODEL_H_
#define KHTST_MODEL_H_

#include <pthread.h>

#include "artifact.h"
#include "tvm.h"
#include "weights.h"
#include "worker.h"

/* What an input is copied to where kernels cannot read it in place. */
typedef struct {
  void* data;
  size_t room;
} staging;

struct khtst_model {
  artifact folder;
  const json* variant;
  weights arrays;
  tvm_runtime tvm;
  TVMFFIAny library, machine, main, sizes, reserve; /* the functions are those of the program */
  TVMFFIAny* args;                                  /* of main: buffers, inputs, weights */
  staging* staged;                                  /* of inputs */
  int64_t* shape; /* sizes of all inputs' axes in the last run, one after the other; the first is -1 before it */
  int64_t* held;  /* bytes of each buffer */
  size_t held_count;
  int threads;
  pthread_mutex_t lock;   /* held while it runs: the program keeps state */
  pthread_key_t prepared; /* not NULL in threads whose calls use one thread */
  bool has_lock, has_key;
  worker caller; /* the thread that calls TVM, where there are several kernel threads */
};

/* One call: what goes in, what comes out, and how it went. */
typedef struct {
  khtst_model* model;
  const khtst_tensor* inputs;
  khtst_tensor* outputs; /* of a run */
  const char* site;      /* of a comparison */
  khtst_error* error;
  khtst_status status;
} work;

/* Do the job, whose inputs were checked, while no other is done on this model, in a thread that calls TVM. job: of the work, sets
 * its status. */
khtst_status do_work(work* w, void (*job)(void* of));

/* Input `i` as an argument: in place where kernels can read it there, else a copy. */
khtst_status give_input(khtst_model* m, int i, const khtst_tensor* given, khtst_error* error);

#endif /* KHTST_MODEL_H_ */

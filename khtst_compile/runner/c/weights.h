/* The arrays a variant's library is called with: mapped from weights.bin, or put into the order it reads. */
#ifndef KHTST_WEIGHTS_H_
#define KHTST_WEIGHTS_H_

#include "artifact.h"

typedef struct {
  void* mapped;
  size_t size;
  int count;
  khtst_tensor* arrays; /* at multiples of ALIGN; read in place by kernels */
  void** owned;         /* memory of those that were laid out anew, else NULL */
} weights;

/* `made` is to be given to weights_close, also after a failure. */
khtst_status weights_open(const artifact* from, const json* variant, weights* made, khtst_error* error);

void weights_close(weights* made);

#endif /* KHTST_WEIGHTS_H_ */

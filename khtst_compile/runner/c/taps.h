/* What every kernel wrote, by its hash: which is the first that went wrong? */
#ifndef KHTST_TAPS_H_
#define KHTST_TAPS_H_

#include "khtst.h"

/* Run every kernel on these inputs, which are the golden ones, and compare the hash of what it writes with that of the manifest.
 * *site: the first that differs, in the order of execution; NULL where none does. */
khtst_status first_difference(khtst_model* model, const khtst_tensor* inputs, const char** site, khtst_error* error);

#endif /* KHTST_TAPS_H_ */

/* TVM's runtime through the stable C ABI of tvm_ffi, loaded when a model is. */
#ifndef KHTST_TVM_H_
#define KHTST_TVM_H_

#include <tvm/ffi/c_api.h>

#include "base.h"

/* The part of an object after its header, as the C++ getters of c_api.h have it. */
#define CELL(type, object) ((type*)((char*)(object) + sizeof(TVMFFIObject)))

typedef struct {
  void *ffi_library, *runtime_library;
  int (*call)(TVMFFIObjectHandle function, TVMFFIAny* args, int32_t count, TVMFFIAny* result);
  int (*get_global)(const TVMFFIByteArray* name, TVMFFIObjectHandle* found);
  int (*let_go)(TVMFFIObjectHandle object);
  void (*take_error)(TVMFFIObjectHandle* error);
  int (*parse_dtype)(const TVMFFIByteArray* text, DLDataType* dtype);
  int (*from_dlpack)(DLManagedTensor* from, int32_t alignment, int32_t contiguous, TVMFFIObjectHandle* tensor);
  DLDataType dtypes[KHTST_FLOAT64 + 1];
} tvm_runtime;

/* libraries: their folder; NULL: where the system looks. `made` is to be given to tvm_close, also after a failure.
 * KHTST_ENVIRONMENT where they are missing, cannot be loaded or are of another version. */
khtst_status tvm_open(const char* libraries, tvm_runtime* made, khtst_error* error);

void tvm_close(tvm_runtime* tvm);

TVMFFIAny tvm_integer(int64_t value);
TVMFFIAny tvm_text(const char* text);

/* Call a function; *result is to be given to tvm_drop. A failure is `status`, with TVM's words after `what`. */
khtst_status tvm_call(const tvm_runtime* tvm, TVMFFIAny function, TVMFFIAny* args, int count, TVMFFIAny* result,
                      khtst_status status, const char* what, khtst_error* error);

/* Call the global function of that name; failures are KHTST_ENVIRONMENT. */
khtst_status tvm_global(const tvm_runtime* tvm, const char* name, TVMFFIAny* args, int count, TVMFFIAny* result,
                        khtst_error* error);

/* A function of a module. */
khtst_status tvm_member(const tvm_runtime* tvm, TVMFFIAny module, const char* name, TVMFFIAny* function, khtst_error* error);

/* A tensor on the memory of `of`, which has to outlive it. */
khtst_status tvm_tensor(const tvm_runtime* tvm, const khtst_tensor* of, TVMFFIAny* made, khtst_error* error);

/* A copy of what a tensor holds; its data is new memory. */
khtst_status tvm_copy(const tvm_runtime* tvm, TVMFFIAny tensor, khtst_tensor* made, khtst_error* error);

/* Let go of a value, which becomes none. */
void tvm_drop(const tvm_runtime* tvm, TVMFFIAny* value);

/* Fix how many threads the kernels use that the calling thread calls, at most one for each of its cores. Where that is one a
 * core, each is tied to its own, the caller too; else all may run on any of them. */
khtst_status tvm_use_threads(const tvm_runtime* tvm, int threads, khtst_error* error);

/* Cores the calling thread may run on. */
int usable_cores(void);

#endif /* KHTST_TVM_H_ */

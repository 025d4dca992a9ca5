#include "tvm.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static khtst_status open_library(const char* folder, const char* name, void** library, khtst_error* error) {
  char* path = folder ? joined(folder, name) : strdup(name);
  if (!path) return out_of_memory(error, name);
  /* Global, for a model's library takes functions of tvm_ffi from whoever has them; for good, for threads of TVM outlive a model.
   */
  *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
  free(path);
  if (*library) return KHTST_OK;
  return fail(error, KHTST_ENVIRONMENT,
              "%s cannot be loaded (%s); needed: the runtime libraries that came with this program, and libstdc++.so.6", name,
              dlerror());
}

typedef struct {
  const char* name;
  void* place; /* of a pointer to a function */
} wanted;

khtst_status tvm_open(const char* libraries, tvm_runtime* tvm, khtst_error* error) {
  *tvm = (tvm_runtime){0};
  khtst_status status = open_library(libraries, "libtvm_ffi.so", &tvm->ffi_library, error);
  if (!status) status = open_library(libraries, "libtvm_runtime.so", &tvm->runtime_library, error);
  if (status) return status;
  void (*get_version)(TVMFFIVersion*) = NULL;
  const wanted all[] = {
      {"TVMFFIGetVersion", &get_version},
      {"TVMFFIFunctionCall", &tvm->call},
      {"TVMFFIFunctionGetGlobal", &tvm->get_global},
      {"TVMFFIObjectDecRef", &tvm->let_go},
      {"TVMFFIErrorMoveFromRaised", &tvm->take_error},
      {"TVMFFIDataTypeFromString", &tvm->parse_dtype},
      {"TVMFFITensorFromDLPack", &tvm->from_dlpack},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
    void* found = dlsym(tvm->ffi_library, all[i].name);
    if (!found)
      return fail(error, KHTST_ENVIRONMENT, "libtvm_ffi.so has no %s; needed: the one that came with this program", all[i].name);
    memcpy(all[i].place, &found, sizeof found);
  }
  TVMFFIVersion version;
  get_version(&version);
  if (version.major != TVM_FFI_VERSION_MAJOR || version.minor != TVM_FFI_VERSION_MINOR) {
    return fail(error, KHTST_ENVIRONMENT,
                "libtvm_ffi.so is of version %u.%u, this program was built for %d.%d; use the one that came with it",
                version.major, version.minor, TVM_FFI_VERSION_MAJOR, TVM_FFI_VERSION_MINOR);
  }
  for (int i = 0; i <= KHTST_FLOAT64; ++i) {
    const char* name = khtst_dtype_name((khtst_dtype)i);
    if (tvm->parse_dtype(&(TVMFFIByteArray){name, strlen(name)}, &tvm->dtypes[i])) {
      return fail(error, KHTST_ENVIRONMENT, "libtvm_ffi.so knows no dtype %s; needed: the one that came with this program", name);
    }
  }
  return KHTST_OK;
}

void tvm_close(tvm_runtime* tvm) {
  if (tvm->runtime_library) dlclose(tvm->runtime_library);
  if (tvm->ffi_library) dlclose(tvm->ffi_library);
  *tvm = (tvm_runtime){0};
}

TVMFFIAny tvm_integer(int64_t value) { return (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value}; }

TVMFFIAny tvm_text(const char* text) { return (TVMFFIAny){.type_index = kTVMFFIRawStr, .v_c_str = text}; }

void tvm_drop(const tvm_runtime* tvm, TVMFFIAny* value) {
  if (value->type_index >= kTVMFFIStaticObjectBegin) tvm->let_go(value->v_obj);
  *value = (TVMFFIAny){.type_index = kTVMFFINone};
}

/* What TVM says went wrong. */
static khtst_status raised(const tvm_runtime* tvm, khtst_status status, const char* what, khtst_error* error) {
  TVMFFIObjectHandle found = NULL;
  tvm->take_error(&found);
  if (!found) return fail(error, status, "%s: TVM failed and does not say why; please report it", what);
  const TVMFFIErrorCell* cell = CELL(TVMFFIErrorCell, found);
  int size = (int)(cell->message.size < 700 ? cell->message.size : 700);
  if (memmem(cell->message.data, cell->message.size, "bad_alloc", 9)) status = KHTST_RESOURCES;
  fail(error, status, "%s: %.*s", what, size, cell->message.data);
  tvm->let_go(found);
  return status;
}

khtst_status tvm_call(const tvm_runtime* tvm, TVMFFIAny function, TVMFFIAny* args, int count, TVMFFIAny* result,
                      khtst_status status, const char* what, khtst_error* error) {
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  return tvm->call(function.v_obj, args, count, result) ? raised(tvm, status, what, error) : KHTST_OK;
}

khtst_status tvm_global(const tvm_runtime* tvm, const char* name, TVMFFIAny* args, int count, TVMFFIAny* result,
                        khtst_error* error) {
  TVMFFIAny function = {.type_index = kTVMFFIFunction};
  *result = (TVMFFIAny){.type_index = kTVMFFINone};
  TVMFFIObjectHandle found = NULL;
  if (tvm->get_global(&(TVMFFIByteArray){name, strlen(name)}, &found)) return raised(tvm, KHTST_ENVIRONMENT, name, error);
  if (!found)
    return fail(error, KHTST_ENVIRONMENT, "TVM's runtime has no function %s; needed: the libraries that came with this program",
                name);
  function.v_obj = found;
  khtst_status status = tvm_call(tvm, function, args, count, result, KHTST_ENVIRONMENT, name, error);
  tvm->let_go(found);
  return status;
}

khtst_status tvm_member(const tvm_runtime* tvm, TVMFFIAny module, const char* name, TVMFFIAny* function, khtst_error* error) {
  TVMFFIAny args[] = {module, tvm_text(name), {.type_index = kTVMFFIBool, .v_int64 = 1}};
  khtst_status status = tvm_global(tvm, "ffi.ModuleGetFunction", args, 3, function, error);
  if (status || function->type_index == kTVMFFIFunction) return status;
  tvm_drop(tvm, function);
  return fail(error, KHTST_USAGE, "the artifact's library has no function %s; lower again with this version of khtst-compile",
              name);
}

typedef struct {
  DLManagedTensor tensor;
  int64_t shape[KHTST_MAX_RANK];
} view;

static void free_view(DLManagedTensor* tensor) { free(tensor->manager_ctx); }

khtst_status tvm_tensor(const tvm_runtime* tvm, const khtst_tensor* of, TVMFFIAny* made, khtst_error* error) {
  view* v = calloc(1, sizeof *v);
  if (!v) return out_of_memory(error, "a tensor");
  memcpy(v->shape, of->shape, sizeof v->shape);
  v->tensor.dl_tensor =
      (DLTensor){.data = of->data, .device = {kDLCPU, 0}, .ndim = of->rank, .dtype = tvm->dtypes[of->dtype], .shape = v->shape};
  v->tensor.manager_ctx = v;
  v->tensor.deleter = free_view;
  TVMFFIObjectHandle handle = NULL;
  if (tvm->from_dlpack(&v->tensor, ALIGN, 1, &handle)) {
    free(v);
    return raised(tvm, KHTST_INTERNAL, "a tensor", error);
  }
  *made = (TVMFFIAny){.type_index = kTVMFFITensor, .v_obj = handle};
  return KHTST_OK;
}

/* Whether it lies in memory without gaps. */
static bool dense(const DLTensor* t) {
  int64_t step = 1;
  for (int i = t->ndim - 1; t->strides && i >= 0; --i) {
    if (t->shape[i] != 1 && t->strides[i] != step) return false;
    step *= t->shape[i];
  }
  return true;
}

khtst_status tvm_copy(const tvm_runtime* tvm, TVMFFIAny tensor, khtst_tensor* made, khtst_error* error) {
  *made = (khtst_tensor){0};
  if (tensor.type_index != kTVMFFITensor)
    return fail(error, KHTST_INTERNAL, "the program returned something that is no tensor; please report it");
  const DLTensor* t = CELL(DLTensor, tensor.v_obj);
  int dtype = 0;
  while (dtype <= KHTST_FLOAT64 && memcmp(&tvm->dtypes[dtype], &t->dtype, sizeof t->dtype)) ++dtype;
  if (dtype > KHTST_FLOAT64 || t->ndim > KHTST_MAX_RANK) {
    return fail(error, KHTST_INTERNAL, "the program returned a tensor of a dtype or rank that is unknown here; please report it");
  }
  made->dtype = (khtst_dtype)dtype;
  made->rank = t->ndim;
  for (int i = 0; i < t->ndim; ++i) made->shape[i] = t->shape[i];
  size_t size = khtst_tensor_size(made);
  if (size && !dense(t)) return fail(error, KHTST_INTERNAL, "the program returned a tensor with gaps; please report it");
  if (!(made->data = aligned(size))) return out_of_memory(error, "results");
  if (size) memcpy(made->data, (const char*)t->data + t->byte_offset, size);
  return KHTST_OK;
}

int usable_cores(void) {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
}

/* TVM's pool of the calling thread: mode -2 ties one thread to each of `count` cores, -3 lets all run on any of them. */
static khtst_status configure(const tvm_runtime* tvm, int mode, int threads, const cpu_set_t* cores, int count,
                              khtst_error* error) {
  char names[CPU_SETSIZE][12];
  TVMFFIAny words[CPU_SETSIZE], list, result;
  int found = 0;
  for (int core = 0; core < CPU_SETSIZE && found < count; ++core) {
    if (!CPU_ISSET(core, cores)) continue;
    snprintf(names[found], sizeof names[found], "%d", core);
    words[found] = tvm_text(names[found]);
    ++found;
  }
  khtst_status status = tvm_global(tvm, "ffi.Array", words, found, &list, error);
  if (status) return status;
  TVMFFIAny args[] = {tvm_integer(mode), tvm_integer(threads), list};
  status = tvm_global(tvm, "runtime.config_threadpool", args, 3, &result, error);
  tvm_drop(tvm, &list);
  tvm_drop(tvm, &result);
  return status;
}

khtst_status tvm_use_threads(const tvm_runtime* tvm, int threads, khtst_error* error) {
  enum { ONE_PER_CORE = -2, SHARED = -3 };
  cpu_set_t cores, first;
  CPU_ZERO(&first);
  if (sched_getaffinity(0, sizeof cores, &cores))
    return fail(error, KHTST_ENVIRONMENT, "the system does not say which cores may be used");
  int count = CPU_COUNT(&cores);
  for (int core = 0; core < CPU_SETSIZE && !CPU_COUNT(&first); ++core) {
    if (CPU_ISSET(core, &cores)) CPU_SET(core, &first);
  }
  khtst_status status =
      configure(tvm, ONE_PER_CORE, threads, &cores, threads, error); /* at first this also says how many to start */
  if (!status && threads > 1 && threads < count) status = configure(tvm, SHARED, threads, &cores, count, error);
  bool alone = threads == 1,
       crowded = threads == count; /* TVM has tied the caller to a core, where it stays if each thread has its own */
  const cpu_set_t* stay = crowded && !alone ? &first : &cores;
  sched_setaffinity(0, sizeof *stay, stay);
  return status;
}

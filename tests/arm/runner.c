/* Runs a job of kernels or of a whole program on files of raw tensors: runner JOB, a text of one command a line.
 *
 *   lib PATH                    load a library; later commands are about it
 *   tensor ID DTYPE SHAPE PATH  a tensor read from a file (SHAPE: 2x3, or . for none); PATH - fills it with bytes 77
 *   call NAME ID...             call a kernel
 *   save ID PATH                write a tensor
 *   vm NAME PREFIX ID...        call a function of the program; its results go to PREFIX0, PREFIX1, ..
 *   main PREFIX INPUTS ID...    call `main` in buffers of the sizes that `sizes` says; the first INPUTS tensors are inputs
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#define MOST 4096
/* An object's header comes first, then its cell (as the C++ getters of c_api.h have it). */
#define CELL(type, object) ((type*)((char*)(object) + sizeof(TVMFFIObject)))

static TVMFFIAny tensors[MOST];

static TVMFFIByteArray bytes(const char* text) { return (TVMFFIByteArray){text, strlen(text)}; }

static void fail(const char* what) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error) {
    TVMFFIErrorCell* cell = CELL(TVMFFIErrorCell, error);
    fprintf(stderr, "%s: %.*s\n", what, (int)cell->message.size, cell->message.data);
  } else {
    fprintf(stderr, "%s failed\n", what);
  }
  exit(1);
}

static TVMFFIAny integer(int64_t value) { return (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value}; }
static TVMFFIAny truth(int value) { return (TVMFFIAny){.type_index = kTVMFFIBool, .v_int64 = value}; }
static TVMFFIAny text(const char* value) { return (TVMFFIAny){.type_index = kTVMFFIRawStr, .v_c_str = value}; }

static TVMFFIAny call(const char* name, TVMFFIObjectHandle function, TVMFFIAny* args, int count) {
  TVMFFIAny result = {.type_index = kTVMFFINone};
  if (TVMFFIFunctionCall(function, args, count, &result)) fail(name);
  return result;
}

static TVMFFIAny global(const char* name, TVMFFIAny* args, int count) {
  TVMFFIObjectHandle function;
  TVMFFIByteArray wanted = bytes(name);
  if (TVMFFIFunctionGetGlobal(&wanted, &function)) fail(name);
  return call(name, function, args, count);
}

static TVMFFIObjectHandle member(TVMFFIAny module, const char* name) {
  TVMFFIAny args[3] = {module, text(name), truth(1)};
  TVMFFIAny found = global("ffi.ModuleGetFunction", args, 3);
  if (found.type_index != kTVMFFIFunction) {
    fprintf(stderr, "the library has no function %s\n", name);
    exit(1);
  }
  return found.v_obj;
}

static size_t size_of(const DLTensor* t) {
  size_t size = t->dtype.bits * t->dtype.lanes / 8;
  for (int i = 0; i < t->ndim; ++i) size *= t->shape[i];
  return size;
}

static void keep(DLManagedTensor* tensor) { (void)tensor; }

static TVMFFIAny tensor(const char* dtype, const char* shape, const char* path) {
  DLManagedTensor* made = calloc(1, sizeof *made);
  made->dl_tensor.shape = calloc(16, sizeof(int64_t));
  made->dl_tensor.device.device_type = kDLCPU;
  made->deleter = keep;
  TVMFFIByteArray kind = bytes(dtype);
  if (TVMFFIDataTypeFromString(&kind, &made->dl_tensor.dtype)) fail(dtype);
  for (char* at = (char*)shape; *at && *at != '.'; at += *at == 'x') made->dl_tensor.shape[made->dl_tensor.ndim++] = strtoll(at, &at, 10);
  size_t size = size_of(&made->dl_tensor);
  made->dl_tensor.data = aligned_alloc(64, (size + 128) / 64 * 64);
  memset(made->dl_tensor.data, 77, size);
  if (strcmp(path, "-")) {
    FILE* file = fopen(path, "rb");
    if (!file || fread(made->dl_tensor.data, 1, size, file) != size) fail(path);
    fclose(file);
  }
  TVMFFIAny value = {.type_index = kTVMFFITensor};
  if (TVMFFITensorFromDLPack(made, 0, 1, (TVMFFIObjectHandle*)&value.v_obj)) fail("tensor");
  return value;
}

static void save(TVMFFIAny value, const char* path) {
  DLTensor* t = CELL(DLTensor, value.v_obj);
  FILE* file = fopen(path, "wb");
  size_t size = size_of(t);
  if (!file || fwrite((char*)t->data + t->byte_offset, 1, size, file) != size || fclose(file)) fail(path);
}

static void save_all(TVMFFIAny value, const char* prefix, int* number) {
  if (value.type_index == kTVMFFITensor) {
    char path[4096];
    snprintf(path, sizeof path, "%s%d", prefix, (*number)++);
    save(value, path);
    return;
  }
  int64_t count = global("ffi.ArraySize", &value, 1).v_int64;
  for (int64_t i = 0; i < count; ++i) {
    TVMFFIAny args[2] = {value, integer(i)};
    save_all(global("ffi.ArrayGetItem", args, 2), prefix, number);
  }
}

/* One buffer of each size that `sizes` returns for these inputs. */
static TVMFFIAny buffers(TVMFFIAny machine, TVMFFIAny* inputs, int count) {
  TVMFFIShapeCell* sizes = CELL(TVMFFIShapeCell, call("sizes", member(machine, "sizes"), inputs, count).v_obj);
  TVMFFIAny* made = calloc(sizes->size + 1, sizeof *made);
  for (size_t i = 0; i < sizes->size; ++i) {
    TVMFFIAny size = integer(sizes->data[i]), shape = global("ffi.Shape", &size, 1);
    made[i] = call("reserve", member(machine, "reserve"), &shape, 1);
  }
  return global("ffi.Array", made, (int)sizes->size);
}

int main(int argc, char** argv) {
  FILE* job = argc == 2 ? fopen(argv[1], "r") : NULL;
  static char line[1 << 20];
  TVMFFIAny module = {0}, machine = {0};
  if (!job) return fprintf(stderr, "usage: runner JOB\n"), 2;
  while (fgets(line, sizeof line, job)) {
    char* words[MOST];
    int count = 0;
    for (char* word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) words[count++] = word;
    if (!count) continue;
    const char* verb = words[0];
    if (!strcmp(verb, "lib")) {
      TVMFFIAny path = text(words[1]);
      module = global("ffi.ModuleLoadFromFile", &path, 1);
      machine.v_obj = NULL;
    } else if (!strcmp(verb, "tensor")) {
      tensors[atoi(words[1])] = tensor(words[2], words[3], words[4]);
    } else if (!strcmp(verb, "save")) {
      save(tensors[atoi(words[1])], words[2]);
    } else {
      int whole = strcmp(verb, "call"), main_too = !strcmp(verb, "main"), first = whole ? 3 : 2, number = 0, given = 0;
      TVMFFIAny args[MOST];
      if (whole && !machine.v_obj) {
        TVMFFIAny cpu[3] = {integer(kDLCPU), integer(0), integer(1)}; /* device 0, allocator "naive" */
        machine = call("vm_load_executable", member(module, "vm_load_executable"), NULL, 0);
        call("vm_initialization", member(machine, "vm_initialization"), cpu, 3);
      }
      given += main_too;
      for (int i = first; i < count; ++i) args[given++] = tensors[atoi(words[i])];
      if (main_too) args[0] = buffers(machine, args + 1, atoi(words[2]));
      const char* name = main_too ? "main" : words[1];
      TVMFFIAny result = call(name, member(whole ? machine : module, name), args, given);
      if (whole) save_all(result, main_too ? words[1] : words[2], &number);
    }
  }
  return 0;
}

/* Load, run, free. */
#include <stdlib.h>
#include <string.h>

#include "model.h"
#include "parts.h"
#include "version.h"

static khtst_status check_versions(const artifact* folder, khtst_error* error) {
  const json* made = json_get(folder->manifest, "made_by");
  const char *tvm = text_of(made, "tvm"), *ffi = text_of(made, "tvm_ffi");
  if (tvm && ffi && !strcmp(tvm, KHTST_TVM) && !strcmp(ffi, KHTST_TVM_FFI)) return KHTST_OK;
  return fail(error, KHTST_ENVIRONMENT,
              "%s: built with tvm %s and tvm-ffi %s, this runner is made for %s and %s; use the runner that `lower "
              "--emit-runner` writes with it",
              folder->folder, tvm ? tvm : "?", ffi ? ffi : "?", KHTST_TVM, KHTST_TVM_FFI);
}

static khtst_status load_library(khtst_model* m, khtst_error* error) {
  const tvm_runtime* tvm = &m->tvm;
  TVMFFIAny load, start, nothing, cpu[] = {tvm_integer(kDLCPU), tvm_integer(0), tvm_integer(1)}; /* device 0, plain allocation */
  char* path = joined(m->folder.folder, text_of(m->variant, "library"));
  if (!path) return out_of_memory(error, m->folder.folder);
  TVMFFIAny name = tvm_text(path);
  khtst_status status = tvm_global(tvm, "ffi.ModuleLoadFromFile", &name, 1, &m->library, error);
  free(path);
  if (status) return status;
  if ((status = tvm_member(tvm, m->library, "vm_load_executable", &load, error))) return status;
  status = tvm_call(tvm, load, NULL, 0, &m->machine, KHTST_ENVIRONMENT, m->folder.folder, error);
  tvm_drop(tvm, &load);
  if (status || (status = tvm_member(tvm, m->machine, "vm_initialization", &start, error))) return status;
  status = tvm_call(tvm, start, cpu, 3, &nothing, KHTST_ENVIRONMENT, m->folder.folder, error);
  tvm_drop(tvm, &start);
  tvm_drop(tvm, &nothing);
  if (!status) status = tvm_member(tvm, m->machine, "main", &m->main, error);
  if (!status) status = tvm_member(tvm, m->machine, "sizes", &m->sizes, error);
  if (!status) status = tvm_member(tvm, m->machine, "reserve", &m->reserve, error);
  return status;
}

/* Room for what a run needs, and the weights as arguments. */
static khtst_status prepare(khtst_model* m, khtst_error* error) {
  int inputs = m->folder.input_count, count = m->arrays.count;
  m->args = calloc((size_t)inputs + (size_t)count + 1, sizeof *m->args);
  m->staged = calloc((size_t)inputs + 1, sizeof *m->staged);
  m->shape = malloc(((size_t)inputs * KHTST_MAX_RANK + 1) * sizeof *m->shape);
  if (!m->args || !m->staged || !m->shape) return out_of_memory(error, m->folder.folder);
  m->shape[0] = -1;
  khtst_status status = KHTST_OK;
  for (int i = 0; i < count && !status; ++i) status = tvm_tensor(&m->tvm, &m->arrays.arrays[i], &m->args[1 + inputs + i], error);
  return status;
}

static void start_threads(void* of) {
  work* w = of;
  w->status = tvm_use_threads(&w->model->tvm, w->model->threads, w->error);
}

static khtst_status set_up(khtst_model* m, const khtst_options* given, khtst_error* error) {
  cpu_flags* cpu = cpu_read();
  if (!cpu) return out_of_memory(error, m->folder.folder);
  khtst_status status = artifact_choose(&m->folder, given->variant, cpu, &m->variant, error);
  free(cpu);
  if (!status) status = check_versions(&m->folder, error);
  if (!status) status = tvm_open(given->libraries, &m->tvm, error);
  if (!status) status = weights_open(&m->folder, m->variant, &m->arrays, error);
  if (!status) status = load_library(m, error);
  if (!status) status = prepare(m, error);
  if (status) return status;
  m->has_lock = !pthread_mutex_init(&m->lock, NULL);
  m->has_key = !pthread_key_create(&m->prepared, NULL);
  int cores = usable_cores();
  m->threads = given->threads < cores ? given->threads : cores;
  if (m->threads < 1) m->threads = 1;
  if (!m->has_lock || !m->has_key || (m->threads > 1 && !worker_start(&m->caller))) {
    return fail(error, KHTST_RESOURCES, "%s: the system gives no thread, lock or thread-specific key; free some",
                m->folder.folder);
  }
  work start = {.model = m, .error = error};
  if (m->threads > 1) worker_run(&m->caller, start_threads, &start);
  return start.status;
}

khtst_status khtst_load(const char* folder, const khtst_options* options, khtst_model** model, khtst_error* error) {
  khtst_error own;
  khtst_options given = options ? *options : (khtst_options){0};
  *model = NULL;
  if (!error) error = &own;
  if (!folder || !*folder) return fail(error, KHTST_USAGE, "no folder is named; needed: one that `khtst-compile lower` wrote");
  if (given.threads < 0) return fail(error, KHTST_USAGE, "threads is %d; needed: at least 1", given.threads);
  khtst_model* m = calloc(1, sizeof *m);
  if (!m) return out_of_memory(error, folder);
  khtst_status status = artifact_open(folder, given.trust_files, &m->folder, error);
  if (!status) status = set_up(m, &given, error);
  if (status) {
    khtst_free(m);
  } else {
    *model = m;
  }
  return status;
}

void khtst_free(khtst_model* m) {
  if (!m) return;
  worker_stop(&m->caller);
  for (int i = 0; m->args && i < 1 + m->folder.input_count + m->arrays.count; ++i) tvm_drop(&m->tvm, &m->args[i]);
  TVMFFIAny* values[] = {&m->main, &m->sizes, &m->reserve, &m->machine, &m->library};
  for (size_t i = 0; i < sizeof values / sizeof *values; ++i) tvm_drop(&m->tvm, values[i]);
  for (int i = 0; m->staged && i < m->folder.input_count; ++i) free(m->staged[i].data);
  free(m->args);
  free(m->staged);
  free(m->shape);
  free(m->held);
  if (m->has_lock) pthread_mutex_destroy(&m->lock);
  if (m->has_key) pthread_key_delete(m->prepared);
  weights_close(&m->arrays);
  tvm_close(&m->tvm);
  artifact_close(&m->folder);
  free(m);
}

khtst_status give_input(khtst_model* m, int i, const khtst_tensor* given, khtst_error* error) {
  khtst_tensor used = *given;
  size_t size = khtst_tensor_size(given);
  staging* at = &m->staged[i];
  if (!used.data || (uintptr_t)used.data % ALIGN) {
    if (!at->data || at->room < size) {
      free(at->data);
      at->data = aligned(at->room = size);
      if (!at->data) return at->room = 0, out_of_memory(error, m->folder.inputs[i].name);
    }
    if (size) memcpy(at->data, given->data, size);
    used.data = at->data;
  }
  tvm_drop(&m->tvm, &m->args[1 + i]);
  return tvm_tensor(&m->tvm, &used, &m->args[1 + i], error);
}

/* Buffers of these sizes, in place of those that are held. */
static khtst_status replace_buffers(khtst_model* m, const int64_t* needed, size_t count, khtst_error* error) {
  const tvm_runtime* tvm = &m->tvm;
  TVMFFIAny* made = calloc(count + 1, sizeof *made);
  int64_t* held = malloc((count + 1) * sizeof *held);
  double all = 0;
  khtst_status status = made && held ? KHTST_OK : out_of_memory(error, "a run");
  free(m->held);
  m->held = held;
  m->held_count = 0;
  tvm_drop(tvm, &m->args[0]); /* what was held goes before anything is added */
  for (size_t i = 0; i < count; ++i) all += (double)needed[i];
  for (size_t i = 0; i < count && !status; ++i) {
    TVMFFIAny size = tvm_integer(held[i] = needed[i]), shape;
    status = tvm_global(tvm, "ffi.Shape", &size, 1, &shape, error);
    if (!status && tvm_call(tvm, m->reserve, &shape, 1, &made[i], KHTST_RESOURCES, "reserve", NULL)) {
      status = fail(error, KHTST_RESOURCES, "intermediate values need %.0f MiB, more than there is; run a smaller batch",
                    all / (1 << 20));
    }
    tvm_drop(tvm, &shape);
  }
  if (!status) status = tvm_global(tvm, "ffi.Array", made, (int)count, &m->args[0], error);
  if (!status) m->held_count = count;
  for (size_t i = 0; made && i < count; ++i) tvm_drop(tvm, &made[i]);
  free(made);
  return status;
}

/* Make room for what `main` computes from the inputs, which are among the arguments. Buffers are replaced when a run needs more,
 * or less than half of what is held. */
static khtst_status fit_buffers(khtst_model* m, khtst_error* error) {
  TVMFFIAny result;
  khtst_status status = tvm_call(&m->tvm, m->sizes, m->args + 1, m->folder.input_count, &result, KHTST_INTERNAL, "sizes", error);
  if (status) return status;
  if (result.type_index != kTVMFFIShape) {
    tvm_drop(&m->tvm, &result);
    return fail(error, KHTST_INTERNAL, "the program does not say what room it needs; please report it");
  }
  const TVMFFIShapeCell* needed = CELL(TVMFFIShapeCell, result.v_obj);
  bool fits = m->args[0].type_index != kTVMFFINone && needed->size == m->held_count;
  double wanted = 0, held = 0;
  for (size_t i = 0; fits && i < needed->size; ++i) {
    fits = needed->data[i] <= m->held[i];
    wanted += (double)needed->data[i];
    held += (double)m->held[i];
  }
  if (!fits || 2 * wanted < held) status = replace_buffers(m, needed->data, needed->size, error);
  tvm_drop(&m->tvm, &result);
  return status;
}

/* Whether the inputs have other shapes than those of the last run; remembers them. */
static bool reshaped(khtst_model* m, const khtst_tensor* inputs) {
  bool differs = false;
  int64_t* at = m->shape;
  for (int i = 0; i < m->folder.input_count; ++i) {
    for (int k = 0; k < inputs[i].rank; ++k, ++at) {
      differs = differs || *at != inputs[i].shape[k];
      *at = inputs[i].shape[k];
    }
  }
  return differs || at == m->shape;
}

static khtst_status take_outputs(khtst_model* m, TVMFFIAny result, khtst_tensor* outputs, khtst_error* error) {
  int count = m->folder.output_count;
  if (result.type_index == kTVMFFITensor && count == 1) return tvm_copy(&m->tvm, result, outputs, error);
  const TVMFFISeqCell* list = CELL(TVMFFISeqCell, result.v_obj);
  if (result.type_index != kTVMFFIArray || list->size != count) {
    return fail(error, KHTST_INTERNAL, "the program returned other results than its manifest says; please report it");
  }
  khtst_status status = KHTST_OK;
  for (int i = 0; i < count && !status; ++i) status = tvm_copy(&m->tvm, ((const TVMFFIAny*)list->data)[i], &outputs[i], error);
  return status;
}

static void compute(void* of) {
  work* w = of;
  khtst_model* m = w->model;
  TVMFFIAny result = {.type_index = kTVMFFINone};
  int inputs = m->folder.input_count;
  for (int i = 0; i < inputs && !w->status; ++i) w->status = give_input(m, i, &w->inputs[i], w->error);
  if (!w->status && reshaped(m, w->inputs)) {
    w->status = fit_buffers(m, w->error);
  }
  if (!w->status)
    w->status = tvm_call(&m->tvm, m->main, m->args, 1 + inputs + m->arrays.count, &result, KHTST_INTERNAL, "main", w->error);
  if (!w->status) w->status = take_outputs(m, result, w->outputs, w->error);
  if (w->status) m->shape[0] = -1;
  tvm_drop(&m->tvm, &result);
  for (int i = 0; i < inputs; ++i) tvm_drop(&m->tvm, &m->args[1 + i]); /* the caller's memory may go */
}

khtst_status do_work(work* w, void (*job)(void* of)) {
  khtst_model* m = w->model;
  pthread_mutex_lock(&m->lock);
  if (m->threads > 1) {
    worker_run(&m->caller, job, w);
  } else {
    if (!pthread_getspecific(m->prepared)) {
      start_threads(w);
      if (!w->status) pthread_setspecific(m->prepared, m);
    }
    if (!w->status) job(w);
  }
  pthread_mutex_unlock(&m->lock);
  return w->status;
}

/* The entries from `begin` to `end`; their inputs and results pass through `part`, which has room for both. */
static khtst_status run_part(work* whole, int64_t begin, int64_t end, int64_t entries, khtst_tensor* part) {
  khtst_model* m = whole->model;
  int count = m->folder.output_count;
  work w = {.model = m, .inputs = part, .outputs = part + m->folder.input_count, .error = whole->error};
  parts_take(&m->folder, whole->inputs, begin, end, part);
  memset(w.outputs, 0, (size_t)count * sizeof *w.outputs);
  do_work(&w, compute);
  for (int i = 0; i < count && !w.status; ++i) {
    w.status = parts_join(&w.outputs[i], begin, end - begin, entries, &whole->outputs[i], whole->error);
  }
  khtst_release(w.outputs, count);
  return w.status;
}

khtst_status khtst_run(khtst_model* m, const khtst_tensor* inputs, khtst_tensor* outputs, khtst_error* error) {
  int count = m->folder.output_count;
  int64_t entries, parts;
  memset(outputs, 0, (size_t)count * sizeof *outputs);
  work w = {.model = m, .inputs = inputs, .outputs = outputs, .error = error};
  if ((w.status = artifact_check(&m->folder, inputs, error))) return w.status;
  if ((parts = parts_count(&m->folder, inputs, m->threads, &entries)) == 1) {
    do_work(&w, compute);
  } else {
    khtst_tensor* part = calloc((size_t)m->folder.input_count + (size_t)count, sizeof *part);
    if (!part) w.status = out_of_memory(error, "a run");
    for (int64_t i = 0; i < parts && !w.status; ++i) {
      w.status = run_part(&w, entries * i / parts, entries * (i + 1) / parts, entries, part);
    }
    free(part);
  }
  if (w.status) khtst_release(outputs, count);
  return w.status;
}

int khtst_input_count(const khtst_model* m) { return m->folder.input_count; }
int khtst_output_count(const khtst_model* m) { return m->folder.output_count; }
int khtst_axis_count(const khtst_model* m) { return m->folder.axis_count; }

const khtst_spec* khtst_input(const khtst_model* m, int index) {
  return index >= 0 && index < m->folder.input_count ? &m->folder.inputs[index] : NULL;
}

const khtst_spec* khtst_output(const khtst_model* m, int index) {
  return index >= 0 && index < m->folder.output_count ? &m->folder.outputs[index] : NULL;
}

const khtst_axis* khtst_axis_at(const khtst_model* m, int index) {
  return index >= 0 && index < m->folder.axis_count ? &m->folder.axes[index] : NULL;
}

const char* khtst_variant(const khtst_model* m) { return text_of(m->variant, "name"); }

/* Many threads on one or two models at the same time: threads LIBRARIES KERNEL_THREADS FOLDER.. ; each result has to be that of a
 * lone call. Then each thread loads, runs and frees a model of its own, again and again. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "khtst.h"

enum { THREADS = 8, ROUNDS = 1000, LOADS = 25, MODELS = 2, WIDTH = 32, MOST = 40 };

typedef struct {
  khtst_model** models;
  char** folders;
  khtst_options options;
  int count, seed, wrong;
} job;

static khtst_tensor input(int rows, int seed) {
  khtst_tensor made = {.dtype = KHTST_FLOAT32, .rank = 2, .shape = {rows, WIDTH}};
  float* values = made.data = malloc(sizeof(float) * WIDTH * (size_t)rows);
  for (int i = 0; i < rows * WIDTH; ++i) values[i] = (float)((i * 37 + seed * 101) % 199) / 50.0f - 2.0f;
  return made;
}

/* The result for `rows` rows; its data is new memory. */
static khtst_tensor run(khtst_model* model, int rows, int seed) {
  khtst_tensor given = input(rows, seed), result;
  khtst_error error;
  if (khtst_run(model, &given, &result, &error)) fprintf(stderr, "%s\n", error.message), exit(1);
  free(given.data);
  return result;
}

static khtst_tensor expected[MODELS][THREADS];

static int rows_of(int seed) { return 1 + seed * 17 % MOST; }

static void check(job* j, khtst_model* model, int which) {
  khtst_tensor got = run(model, rows_of(j->seed), j->seed), want = expected[which][j->seed];
  if (got.shape[0] != want.shape[0] || memcmp(got.data, want.data, khtst_tensor_size(&want))) ++j->wrong;
  khtst_release(&got, 1);
}

static void* work(void* of) {
  job* j = of;
  khtst_model* own;
  khtst_error error;
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  for (int round = 0; round < ROUNDS; ++round) {
    int which = (round + j->seed) % j->count;
    check(j, j->models[which], which);
  }
  for (int round = 0; round < (j->options.threads > 1 ? 1 : LOADS);
       ++round) { /* TVM's workers look for work for half a second before they end */
    int which = (round + j->seed) % j->count;
    if (khtst_load(j->folders[which], &j->options, &own, &error)) fprintf(stderr, "%s\n", error.message), exit(1);
    check(j, own, which);
    khtst_free(own);
  }
  sched_getaffinity(0, sizeof after, &after);
  if (!CPU_EQUAL(&before, &after)) ++j->wrong; /* no thread of the caller's is tied to a core */
  return NULL;
}

int main(int argc, char** argv) {
  khtst_model* models[MODELS];
  khtst_options options = {.libraries = argv[1], .threads = atoi(argv[2])};
  khtst_error error;
  pthread_t threads[THREADS];
  job jobs[THREADS];
  int count = argc - 3, wrong = 0;
  for (int m = 0; m < count; ++m) {
    if (khtst_load(argv[3 + m], &options, &models[m], &error)) return fprintf(stderr, "%s\n", error.message), error.status;
    for (int t = 0; t < THREADS; ++t) expected[m][t] = run(models[m], rows_of(t), t);
  }
  for (int t = 0; t < THREADS; ++t) {
    jobs[t] = (job){.models = models, .folders = argv + 3, .options = options, .count = count, .seed = t};
    jobs[t].options.trust_files = 1;
    pthread_create(&threads[t], NULL, work, &jobs[t]);
  }
  for (int t = 0; t < THREADS; ++t) {
    pthread_join(threads[t], NULL);
    wrong += jobs[t].wrong;
  }
  for (int m = 0; m < count; ++m) {
    khtst_release(expected[m], THREADS);
    khtst_free(models[m]);
  }
  printf("%d wrong\n", wrong);
  return wrong != 0;
}

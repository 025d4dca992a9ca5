/* A thread that runs one job after another: TVM keeps a pool for each thread that calls it, and ties that thread to a core. */
#ifndef KHTST_WORKER_H_
#define KHTST_WORKER_H_

#include <pthread.h>
#include <stdbool.h>

typedef struct {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t given, done;
  void (*job)(void* of); /* NULL while there is none */
  void* of;
  bool busy, ends, runs;
} worker;

bool worker_start(worker* w);

/* job(of) in that thread; returns when it is done. One caller at a time. */
void worker_run(worker* w, void (*job)(void* of), void* of);

/* Nothing where it was not started. */
void worker_stop(worker* w);

#endif /* KHTST_WORKER_H_ */

#include "worker.h"

static void* serve(void* of) {
  worker* w = of;
  pthread_mutex_lock(&w->lock);
  for (;;) {
    while (!w->job && !w->ends) pthread_cond_wait(&w->given, &w->lock);
    if (!w->job) break;
    void (*job)(void*) = w->job;
    w->job = NULL;
    pthread_mutex_unlock(&w->lock);
    job(w->of);
    pthread_mutex_lock(&w->lock);
    w->busy = false;
    pthread_cond_signal(&w->done);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

bool worker_start(worker* w) {
  *w = (worker){0};
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->given, NULL);
  pthread_cond_init(&w->done, NULL);
  w->runs = !pthread_create(&w->thread, NULL, serve, w);
  return w->runs;
}

void worker_run(worker* w, void (*job)(void* of), void* of) {
  pthread_mutex_lock(&w->lock);
  w->of = of;
  w->job = job;
  w->busy = true;
  pthread_cond_signal(&w->given);
  while (w->busy) pthread_cond_wait(&w->done, &w->lock);
  pthread_mutex_unlock(&w->lock);
}

void worker_stop(worker* w) {
  if (!w->runs) return;
  pthread_mutex_lock(&w->lock);
  w->ends = true;
  pthread_cond_signal(&w->given);
  pthread_mutex_unlock(&w->lock);
  pthread_join(w->thread, NULL);
  pthread_cond_destroy(&w->done);
  pthread_cond_destroy(&w->given);
  pthread_mutex_destroy(&w->lock);
  w->runs = false;
}

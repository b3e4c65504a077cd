#include "devices/jobs.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "core/failure.h"
#include "execute/body.h"

/* SPIN and LONGEST are in seconds. Once the thread has waited for SPIN it pauses, each time for a PARTth of the time
 * that it has waited, and for LONGEST at most. So it sees the next call with a short delay, and leaves the core to
 * others. */
static const double SPIN = 50e-6, PART = 32, LONGEST = 200e-6;

uint32_t flags_last = INT32_MAX;

struct job {
  struct job *next;
  struct call call;
  struct flags *flags; /* NULL: left to a callback */
  uint32_t number;
};

/* The queue of our thread, in the order in which calls were enqueued. Each member is used under the lock. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t posted;
  struct job *spare; /* jobs without a call, for the next calls */
  struct job *first, **end;
  const struct flags *with_mpi; /* flags of the job that the thread is executing; NULL: none */
  bool running;
} jobs = {.lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER, .end = &jobs.first};

/* --- flags --- */

static int make_one(const struct memory *memory, _Atomic uint32_t **flag) {
  void *word = NULL;
  int code = memory->flag_make(&word);
  if (code != 0) return code;
  *flag = word;
  atomic_store_explicit(*flag, 0, memory_order_release);
  return 0;
}

int flags_make(struct flags *flags, const struct memory *memory, void *stream) {
  if (flags->done != NULL || flags->refused) return 0;
  flags->memory = memory;
  bool served = false;
  int code = make_one(memory, &flags->asked);
  if (code == 0) code = make_one(memory, &flags->done);
  if (code == 0) code = memory->flags_serve(stream, (void *)flags->done, &served);
  if (code != 0 || !served) flags_free(flags);
  flags->refused = code == 0 && !served;
  return code;
}

void flags_free(struct flags *flags) {
  if (flags->asked != NULL) flags->memory->flag_free((void *)flags->asked);
  if (flags->done != NULL) flags->memory->flag_free((void *)flags->done);
  flags->asked = flags->done = NULL;
}

/* Take the next number. When the count has reached the limit, wait for the stream and begin again at 1. */
static int next_number(struct flags *flags, void *stream, uint32_t *number) {
  if (flags->given >= flags_last) {
    int code = flags->memory->stream_synchronize(stream);
    if (code != 0) return code;
    atomic_store_explicit(flags->asked, 0, memory_order_release);
    atomic_store_explicit(flags->done, 0, memory_order_release);
    flags->given = 0;
  }
  *number = ++flags->given;
  return 0;
}

/* Write a number to the second word, unless it has a larger one. Under the lock of the queue. */
static void raise_done(struct flags *flags, uint32_t number) {
  if (atomic_load_explicit(flags->done, memory_order_relaxed) < number)
    atomic_store_explicit(flags->done, number, memory_order_release);
}

/* --- jobs --- */

static struct job *job_new(const struct call *call, struct flags *flags) {
  pthread_mutex_lock(&jobs.lock);
  struct job *job = jobs.spare;
  if (job != NULL) jobs.spare = job->next;
  pthread_mutex_unlock(&jobs.lock);
  if (job == NULL) job = malloc(sizeof *job);
  if (job == NULL) return NULL;
  call_copy(&job->call, call);
  job->call.frame = NULL;
  job->flags = flags;
  return job;
}

/* Put a job at the end of the queue. Under the lock of the queue. */
static void append_job(struct job *job) {
  job->next = NULL;
  *jobs.end = job;
  jobs.end = &job->next;
}

/* Keep a job for a later call. Under the lock of the queue. */
static void put_away(struct job *job) {
  job->next = jobs.spare;
  jobs.spare = job;
}

static void job_free(struct job *job) {
  pthread_mutex_lock(&jobs.lock);
  put_away(job);
  pthread_mutex_unlock(&jobs.lock);
}

static void job_run(struct job *job) {
  struct call *call = &job->call;
  ffi_error *error = call_check(call); /* the communicator may have been freed since the call */
  if (error == NULL) error = call_body(call);
  for (int i = 0; i < call->buffer_count && error != NULL; i++) {
    const struct buffer *buffer = &call->buffers[i];
    if (role_is_written(buffer->role) && buffer->count > 0) memset(buffer->data, 0xff, buffer_bytes(buffer));
  }
}

/* Host function: the driver's callback thread calls MPI. */
static void run_in_callback(void *data) {
  job_run(data);
  job_free(data);
}

/* --- our thread --- */

/* Pause, or yield, so that another rank on this core can go on. `waited`: the seconds so far. */
static void pause_after(double waited) {
  double pause = waited / PART;
  if (waited < SPIN)
    sched_yield();
  else
    nanosleep(&(struct timespec){0, (long)(1e9 * (pause < LONGEST ? pause : LONGEST))}, NULL);
}

static bool turn_has_come(const struct job *job) {
  return job != NULL && atomic_load_explicit(job->flags->asked, memory_order_acquire) >= job->number;
}

/* Wait until the turn of the first job has come, and take the job. Under the lock, which is free during each pause. */
static struct job *next_job(void) {
  double begun = seconds_now(), waited = 0;
  while (!turn_has_come(jobs.first)) {
    if (jobs.first == NULL && waited >= SPIN) {
      pthread_cond_wait(&jobs.posted, &jobs.lock);
      begun = seconds_now(), waited = 0;
    }
    pthread_mutex_unlock(&jobs.lock);
    pause_after(waited);
    pthread_mutex_lock(&jobs.lock);
    waited = seconds_now() - begun;
  }
  struct job *job = jobs.first;
  if ((jobs.first = job->next) == NULL) jobs.end = &jobs.first;
  return job;
}

static void *run_jobs(void *unused) {
  thread_pauses_exactly();
  pthread_mutex_lock(&jobs.lock);
  for (;;) {
    struct job *job = next_job();
    jobs.with_mpi = job->flags;
    pthread_mutex_unlock(&jobs.lock);
    job_run(job);
    pthread_mutex_lock(&jobs.lock);
    jobs.with_mpi = NULL;
    raise_done(job->flags, job->number);
    put_away(job);
  }
  return unused;
}

static bool start_thread(void) {
  pthread_mutex_lock(&jobs.lock);
  pthread_t thread;
  if (!jobs.running) jobs.running = thread_start(&thread, run_jobs) == 0 && pthread_detach(thread) == 0;
  bool running = jobs.running;
  pthread_mutex_unlock(&jobs.lock);
  return running;
}

static void post(struct job *job) {
  pthread_mutex_lock(&jobs.lock);
  append_job(job);
  pthread_cond_signal(&jobs.posted);
  pthread_mutex_unlock(&jobs.lock);
}

/* Enqueue both steps of the stream, and only then post the job: after an error our thread has no job to wait for. */
static int give_by_flags(struct job *job, void *stream) {
  struct flags *flags = job->flags;
  int code = next_number(flags, stream, &job->number);
  if (code == 0) code = flags->memory->flag_write(stream, (void *)flags->asked, job->number);
  if (code == 0) code = flags->memory->flag_wait(stream, (void *)flags->done, job->number);
  if (code == 0) post(job);
  return code;
}

ffi_error *job_give(const struct call *call, const struct call *part, struct flags *flags, void *stream) {
  struct job *job = flags == NULL || start_thread() ? job_new(part, flags) : NULL;
  if (job == NULL) return call_fail(call, FFI_INTERNAL, "no memory or no thread for a call of MPI");
  int code = flags != NULL ? give_by_flags(job, stream) : call->memory->call(stream, run_in_callback, job);
  if (code == 0) return NULL;
  job_free(job);
  return call_fail_driver(call, call->memory, code);
}

bool jobs_drop(struct flags *flags, int code) {
  if (flags->done == NULL) return false;
  bool reported = false;
  pthread_mutex_lock(&jobs.lock);
  struct job *left = jobs.first, *next;
  jobs.first = NULL, jobs.end = &jobs.first;
  for (struct job *job = left; job != NULL; job = next) {
    next = job->next;
    if (job->flags != flags) {
      append_job(job);
      continue;
    }
    if (!reported) call_fail_driver(&job->call, flags->memory, code);
    reported = true;
    put_away(job);
  }
  raise_done(flags, flags->given);
  bool with_mpi = jobs.with_mpi == flags;
  pthread_mutex_unlock(&jobs.lock);
  return with_mpi;
}

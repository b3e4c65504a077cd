#include "devices/nccl.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/symbols.h"
#include "base/threads.h"
#include "core/abi.h"
#include "core/failure.h"
#include "core/plan.h"
#include "devices/transport.h"
#include "execute/body.h"
#include "observe/log.h"
#include "observe/watchdog.h"

/* The types of NCCL's nccl.h, with which tests/c/check_nccl.c compares them. Bytes are sent as INT8. */
typedef int ncclResult_t;
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef void *cudaStream_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
enum { OLDEST = 21800, MAGIC = (int)0xcafebeef, INT8 = 0, IN_PROGRESS = 7 };
typedef struct { /* as in 2.18; later versions accept this shorter structure and set the members behind it */
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, least_ctas, most_ctas;
  const char *network;
  int split_share;
} ncclConfig_t;

static struct functions {
#define FUNCTION(name, parameters) ncclResult_t(*name) parameters;
#include "devices/nccl.def"
#undef FUNCTION
  const char *(*GetErrorString)(int);
  const char *(*GetLastError)(ncclComm_t);
} nccl;

static const struct memory *space; /* NCCL serves the devices of this memory space */
static int first_device;           /* the number of JAX's first device among them */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The communicator of NCCL that belongs to a communicator of MPI. */
struct nccl {
  ncclComm_t handle;
  void *context; /* of the device */
};

/* --- errors --- */

/* NCCL's description of the last error; empty if NCCL has none. */
static const char *last_error(ncclComm_t handle) {
  const char *text = nccl.GetLastError(handle);
  return text != NULL ? text : "";
}

static ffi_error *fail_nccl(const struct call *call, const char *function, int code, ncclComm_t handle) {
  const char *more = last_error(handle);
  return call_fail(call, FFI_INTERNAL, "nccl%s failed: %s (code %d)%s%s", function, nccl.GetErrorString(code), code,
                   *more != '\0' ? ": " : "", more);
}

/* --- the calls that have been enqueued, oldest first --- */

/* The host waits if FOLLOWED calls have not ended, so that the follower can report each call. */
enum { FOLLOWED = 64, LEAST_PAUSE = 20000, MOST_PAUSE = 1000000 /* nanoseconds */, PAUSES_TO_ASK = 1000 };
static struct {
  pthread_mutex_t lock;
  pthread_cond_t wake, ended; /* there is something to follow; a call has ended */
  pthread_t thread;
  pid_t process; /* the process that has started the thread; 0: no process has */
  bool ending, enqueuing;
  unsigned first, next; /* numbers of the oldest call that has not ended, and of the next one; place: % FOLLOWED */
  struct followed {
    void *event, *context; /* the event, made when the place is first used, belongs to the context */
    struct communicator *comm;
    int64_t summary[SUMMARY_WORDS];
    int words;
  } calls[FOLLOWED];
} follower = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};

/* Pause, and let MPI progress. Return whether the follower must go on. */
static bool pause_awhile(long nanoseconds) {
  nanosleep(&(struct timespec){0, nanoseconds}, NULL);
  pthread_mutex_lock(&follower.lock);
  bool ending = follower.ending;
  pthread_mutex_unlock(&follower.lock);
  if (!ending) runtime.abi->progress();
  return !ending;
}

/* End the job if NCCL has met an error while a call is under way, because the call would never end. */
static void ask_for_error(const struct followed *call) {
  ncclResult_t code = 0;
  if (pthread_mutex_trylock(&lock) != 0) return; /* a call is being enqueued */
  if (call->comm->nccl != NULL && nccl.CommGetAsyncError(call->comm->nccl->handle, &code) != 0) code = 0;
  pthread_mutex_unlock(&lock);
  if (code == 0 || code == IN_PROGRESS) return;
  char text[256];
  snprintf(text, sizeof text, "NCCL reports an error on rank %d while a call is under way: %s (code %d)",
           call->comm->rank, nccl.GetErrorString(code), code);
  fprintf(stderr, "jaxmpi: %s. The job ends, because the call would not\n", text);
  runtime.abort(text);
}

/* Wait until a call has ended, or the device has failed. */
static void follow(const struct followed *call) {
  void *previous;
  bool done = false;
  if (space->enter(call->context, &previous) != 0) return;
  struct watched *record = watchdog_begin_summary(call->summary, call->words);
  long pause = LEAST_PAUSE;
  for (int pauses = 1; space->event_done(call->event, &done) == 0 && !done && pause_awhile(pause); pauses++) {
    if (pause < MOST_PAUSE) pause *= 2;
    if (pauses % PAUSES_TO_ASK == 0) ask_for_error(call);
  }
  watchdog_end(record);
  space->leave(previous);
}

static void *run_follower(void *unused) {
  pthread_mutex_lock(&follower.lock);
  while (!follower.ending) {
    bool none = follower.first == follower.next;
    const struct followed *call = &follower.calls[follower.first % FOLLOWED];
    if (none && !follower.enqueuing) {
      pthread_cond_wait(&follower.wake, &follower.lock);
      continue;
    }
    pthread_mutex_unlock(&follower.lock);
    if (none)
      pause_awhile(LEAST_PAUSE);
    else
      follow(call);
    pthread_mutex_lock(&follower.lock);
    if (none) continue;
    follower.first++;
    pthread_cond_broadcast(&follower.ended);
  }
  pthread_mutex_unlock(&follower.lock);
  return unused;
}

/* Tell the follower that a call is about to be enqueued, in which this thread may wait for other ranks, or that this is
 * over. Start the follower at the first call. */
static void note_enqueuing(bool begins) {
  pthread_mutex_lock(&follower.lock);
  follower.enqueuing = begins;
  if (begins && follower.process == 0 && thread_start(&follower.thread, run_follower) == 0) follower.process = getpid();
  if (begins) pthread_cond_signal(&follower.wake);
  pthread_mutex_unlock(&follower.lock);
}

/* Wait until the follower has a place for one more call. */
static void await_place(void) {
  pthread_mutex_lock(&follower.lock);
  while (follower.next - follower.first == FOLLOWED && follower.process == getpid() && !follower.ending)
    pthread_cond_wait(&follower.ended, &follower.lock);
  pthread_mutex_unlock(&follower.lock);
}

/* Make the event of a place in this context, unless the place has one. The earlier call at this place has ended. The
 * thread has entered the context. */
static int make_event(struct followed *place, void *context) {
  void *previous;
  if (place->event != NULL && place->context == context) return 0;
  if (place->event != NULL && space->enter(place->context, &previous) == 0) {
    space->event_free(place->event);
    space->leave(previous);
  }
  place->event = NULL;
  place->context = context;
  return space->event_make(&place->event);
}

/* Hand a call that has been enqueued on its stream to the follower. Return 0 or the driver's code. */
static int follow_later(const struct call *call) {
  int code = 0;
  pthread_mutex_lock(&follower.lock);
  struct followed *next = &follower.calls[follower.next % FOLLOWED];
  if (follower.next - follower.first < FOLLOWED && !follower.ending) {
    code = make_event(next, call->context);
    if (code == 0) code = space->event_record(next->event, call->stream);
    if (code == 0) {
      next->comm = call->comm;
      next->words = summarize(call, next->summary);
      follower.next++;
      pthread_cond_signal(&follower.wake);
    }
  }
  pthread_mutex_unlock(&follower.lock);
  return code;
}

/* --- communicators --- */

/* The message of rank 0 to the other ranks. `code`: NCCL's, if rank 0 could not make the id. */
struct invitation {
  ncclUniqueId id;
  int code;
};

static ffi_error *fail_made(const struct call *call, const char *function, int worst, int rank) {
  const char *more = call->comm->rank == rank ? last_error(NULL) : "";
  return call_fail(call, FFI_INTERNAL,
                   "nccl%s failed on rank %d: %s (code %d)%s%s. Nothing was sent. JAXMPI_DEVICE_TRANSPORT=auto leaves "
                   "NCCL out",
                   function, rank, nccl.GetErrorString(worst), worst, *more != '\0' ? ": " : "", more);
}

/* Make the communicator of NCCL, together with all ranks. First wait for the earlier work of all streams, for two
 * reasons: NCCL allocates memory, and a driver may then wait for all streams; and this thread calls MPI, which an
 * operation that is left to a stream may call, too. */
static ffi_error *make_comm(struct call *call, struct nccl *own) {
  struct communicator *comm = call->comm;
  struct invitation invitation = {.code = 0};
  ncclConfig_t config = {.size = sizeof config,
                         .magic = (unsigned)MAGIC,
                         .version = OLDEST,
                         .blocking = 1,
                         .cga_cluster_size = INT_MIN,
                         .least_ctas = INT_MIN,
                         .most_ctas = INT_MIN,
                         .split_share = INT_MIN};
  int worst, rank;
  TRY_DRIVER(call, space->stream_synchronize(call->stream));
  transport_drain();
  if (comm->rank == 0) invitation.code = nccl.GetUniqueId(&invitation.id);
  call->function = "MPI_Bcast";
  int code = runtime.abi->share(comm, &invitation, sizeof invitation);
  if (code != 0) return call_fail_mpi(call, code);
  if (invitation.code != 0) return fail_made(call, "GetUniqueId", invitation.code, 0);
  call->function = "MPI_Allgather";
  if ((code = runtime.abi->worst(comm, 0, &worst, &rank)) != 0) return call_fail_mpi(call, code);
  int mine = nccl.CommInitRankConfig(&own->handle, comm->size, invitation.id, comm->rank, &config);
  if ((code = runtime.abi->worst(comm, mine, &worst, &rank)) == 0 && worst == 0) return NULL;
  if (mine == 0) nccl.CommAbort(own->handle);
  if (code != 0) return call_fail_mpi(call, code);
  return fail_made(call, "CommInitRankConfig", worst, rank);
}

/* Find or make the communicator of NCCL for a call. */
static ffi_error *find_comm(struct call *call, ncclComm_t *handle) {
  struct nccl *own = call->comm->nccl;
  if (own == NULL) {
    if ((own = malloc(sizeof *own)) == NULL) return call_fail(call, FFI_INTERNAL, "no memory");
    ffi_error *error = make_comm(call, own);
    if (error != NULL) return free(own), error;
    own->context = call->context;
    call->comm->nccl = own;
  }
  *handle = own->handle;
  if (own->context == call->context) return NULL;
  return call_fail(
      call, FFI_FAILED_PRECONDITION,
      "NCCL serves one device of a process on each communicator: that of the first call, or the first device "
      "that this process may use if that call had arrays in CPU memory. These arrays are on another one. "
      "Nothing was sent. Use another communicator for this device: comm.Dup()");
}

void nccl_free(struct communicator *comm) {
  pthread_mutex_lock(&lock);
  struct nccl *own = comm->nccl;
  comm->nccl = NULL;
  if (own != NULL && !runtime_has_ended())
    nccl.CommDestroy(own->handle); /* at the end of the process it would wait, or find no device */
  free(own);
  pthread_mutex_unlock(&lock);
}

/* --- calls --- */

/* The stream of the last call and the context of the stream. `event`, in the context `event_context`, orders calls on
 * several streams. It is made when a call first follows a call on another stream of the same device, and orders the
 * calls on this device alone. */
static struct {
  void *stream, *context;
  void *event, *event_context;
} last;

/* Make the stream wait for the last call, if the last call is on another stream of the device. */
static int order_after_last(const struct call *call) {
  int code = 0;
  if (last.stream != NULL && last.stream != call->stream && last.context == call->context) {
    if (last.event == NULL) last.event_context = call->context, code = space->event_make(&last.event);
    if (code == 0 && last.event_context == call->context) {
      code = space->event_record(last.event, last.stream);
      if (code == 0) code = space->stream_wait(call->stream, last.event);
    }
    if (code != 0) return code;
  }
  last.stream = call->stream, last.context = call->context;
  return code;
}

/* Return the type by which NCCL reduces a type. `parts`: how many elements of NCCL's type are in one element. */
static int type_of(const struct datatype *type, size_t *parts) {
  static const struct {
    int code, type;
    size_t parts;
  } types[] = {{FFI_DTYPE_S8, INT8, 1}, {FFI_DTYPE_U8, 1, 1},   {FFI_DTYPE_S32, 2, 1}, {FFI_DTYPE_U32, 3, 1},
               {FFI_DTYPE_S64, 4, 1},   {FFI_DTYPE_U64, 5, 1},  {FFI_DTYPE_F16, 6, 1}, {FFI_DTYPE_F32, 7, 1},
               {FFI_DTYPE_F64, 8, 1},   {FFI_DTYPE_BF16, 9, 1}, {FFI_DTYPE_C64, 7, 2}, {FFI_DTYPE_C128, 8, 2}};
  size_t i = 0;
  while (types[i].code != type->code) i++; /* call_is_by_nccl lets no other type pass */
  *parts = types[i].parts;
  return types[i].type;
}

/* A call that is being enqueued, one array after the other. */
struct enqueued {
  const struct call *call;
  ncclComm_t comm;
  const struct buffer *in, *out; /* of the array; NULL: this rank does not pass it */
  const char *function;          /* the function of NCCL that was called last */
};
#define CALL(name, ...) (e->function = #name, nccl.name(__VA_ARGS__, e->comm, e->call->stream))

/* The part of a buffer that goes to a rank, or comes from it. */
static void *part_for(const struct buffer *buffer, int rank, size_t bytes) {
  return (char *)buffer->data + (size_t)rank * bytes;
}

static int reduce(struct enqueued *e, int root) {
  const struct call *call = e->call;
  size_t parts;
  int type = type_of(e->in->type, &parts);
  const struct reduction *reduction = object_of(call->attributes[attribute_of(call->operation, KIND_REDUCTION)]);
  const void *in = e->in->data;
  size_t count = (size_t)e->in->count * parts;
  switch (call->operation->row) {
    case ROW_allreduce:
      return CALL(AllReduce, in, e->out->data, count, type, reduction->basic);
    case ROW_reduce:
      return CALL(Reduce, in, call->comm->rank == root ? e->out->data : NULL, count, type, reduction->basic, root);
    default:
      return CALL(ReduceScatter, in, e->out->data, count / (size_t)call->comm->size, type, reduction->basic);
  }
}

/* Send a part of `from` to each rank, and receive a part of `to` from each rank. Either may be NULL. */
static int parts(struct enqueued *e, const struct buffer *from, const struct buffer *to, size_t bytes) {
  int code = 0;
  for (int r = 0; r < e->call->comm->size && code == 0; r++) {
    if (from != NULL) code = CALL(Send, part_for(from, r, bytes), bytes, INT8, r);
    if (to != NULL && code == 0) code = CALL(Recv, part_for(to, r, bytes), bytes, INT8, r);
  }
  return code;
}

static int move(struct enqueued *e, int root) {
  const struct call *call = e->call;
  bool is_root = call->comm->rank == root;
  size_t bytes = buffer_bytes(e->in != NULL ? e->in : e->out), size = (size_t)call->comm->size;
  const struct buffer *in = e->in, *out = e->out;
  int code = 0;
  switch (call->operation->row) {
    case ROW_allgather:
      return CALL(AllGather, in->data, out->data, bytes, INT8);
    case ROW_alltoall:
      return parts(e, in, out, bytes / size);
    case ROW_bcast:
      if (!is_root || out == NULL) in = out = out != NULL ? out : in; /* this rank has one array: in place */
      return CALL(Broadcast, in->data, out->data, bytes, INT8, root);
    case ROW_gather:
      code = CALL(Send, in->data, bytes, INT8, root);
      return code == 0 && is_root ? parts(e, NULL, out, bytes) : code;
    default: /* scatter */
      bytes = buffer_bytes(out);
      code = is_root ? parts(e, in, NULL, bytes) : 0;
      return code == 0 ? CALL(Recv, out->data, bytes, INT8, root) : code;
  }
}

/* Send and receive the messages of a plan: see BEGINS_AS_MESSAGES. The labels are sent, but no rank reads them. */
static int exchange(struct enqueued *e, const struct plan *plan) {
  int code = 0;
  for (int i = 0; i < plan->send_count && code == 0; i++) {
    const struct peer *peer = &plan->sends[i];
    code = CALL(Send, (char *)plan_operand(e->call, 0)->data + peer->stage, (size_t)peer->bytes, INT8, peer->rank);
  }
  for (int i = 0; i < plan->receive_count && code == 0; i++) {
    const struct peer *peer = &plan->receives[i];
    char *to = (char *)plan_result(e->call, 0)->data + (peer->stage - plan->sent);
    code = CALL(Recv, to, (size_t)peer->bytes, INT8, peer->rank);
  }
  return code;
}

/* Enqueue each array of a call. */
static int enqueue_arrays(struct enqueued *e) {
  const struct call *call = e->call->leaves != NULL ? e->call->leaves : e->call;
  const struct operation *operation = call->operation;
  int at = attribute_of(operation, KIND_RANK), root = at >= 0 ? (int)call->attributes[at] : -1, code = 0;
  bool reduces = attribute_of(operation, KIND_REDUCTION) >= 0;
  if (plan_of(call) != NULL) return exchange(e, plan_of(call));
  int reads = call->first[1] - call->first[0], writes = call->first[2] - call->first[1];
  for (int i = 0; (i < reads || i < writes) && code == 0; i++) {
    e->in = i < reads ? &call->buffers[call->first[0] + i] : NULL;
    e->out = i < writes ? &call->buffers[call->first[1] + i] : NULL;
    if (e->in != NULL && e->in->type == NULL) e->in = NULL;
    if (e->out != NULL && e->out->type == NULL) e->out = NULL;
    const struct buffer *any = e->in != NULL ? e->in : e->out;
    if (any == NULL || any->count == 0) continue;
    code = reduces ? reduce(e, root) : move(e, root);
  }
  return code;
}

/* Calls of arrays in CPU memory share this, one call at a time: a stream of ours, and pinned memory, which the device
 * reads and writes like memory of the device. */
static struct {
  pthread_mutex_t lock;
  void *_Atomic stream;
  void *context;
  char *pinned;
  size_t capacity;
} host = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Return whether this thread may use NCCL for arrays of a device: the first thread that asks may, and no other. */
static bool is_first_thread(void) {
  static _Thread_local char own; /* the address identifies the thread */
  static char *_Atomic first;
  char *none = NULL;
  return atomic_compare_exchange_strong(&first, &none, &own) || none == &own;
}

/* Enqueue a call on its stream. Under the lock of NCCL. */
static ffi_error *enqueue_locked(struct call *call) {
  struct enqueued e = {.call = call, .function = "GroupStart"};
  ffi_error *error = find_comm(call, &e.comm);
  call->function = "NCCL"; /* for the log */
  if (error != NULL) return error;
  TRY_DRIVER(call, order_after_last(call));
  int code = nccl.GroupStart();
  if (code != 0) return fail_nccl(call, "GroupStart", code, e.comm);
  code = enqueue_arrays(&e);
  int end = nccl.GroupEnd();
  if (code != 0) return fail_nccl(call, e.function, code, e.comm);
  if (end != 0) return fail_nccl(call, "GroupEnd", end, e.comm);
  code = follow_later(call);
  if (code == 0) return NULL;
  error = call_fail_driver(call, space, code);
  space->stream_synchronize(call->stream); /* after the return XLA may reuse the buffers */
  return error;
}

static ffi_error *nccl_enqueue(struct call *call) {
  if (call->stream != host.stream && !is_first_thread())
    return call_fail(
        call, FFI_FAILED_PRECONDITION,
        "NCCL carries this operation, and another thread of this process has used NCCL before: two threads "
        "could enqueue in another order than those of another rank. Nothing was sent. Call it in that "
        "thread, or set JAXMPI_DEVICE_TRANSPORT=auto, which leaves NCCL out");
  call->function = "NCCL";
  if (call->log.on) log_begin(call, "in the stream's order, %s, with", call->operation->id);
  await_place();
  pthread_mutex_lock(&lock);
  note_enqueuing(true);
  ffi_error *error = enqueue_locked(call);
  note_enqueuing(false);
  pthread_mutex_unlock(&lock);
  return error;
}

/* --- arrays in CPU memory --- */

/* Make the stream, and pinned memory of at least `bytes`. Return 0 or the driver's code. */
static int host_reserve(size_t bytes) {
  void *stream = NULL, *pinned = NULL;
  int code = 0;
  if (host.stream == NULL && (code = space->stream_make(&stream)) == 0) host.stream = stream;
  if (code != 0 || (host.pinned != NULL && bytes <= host.capacity)) return code;
  size_t capacity = memory_doubled(host.capacity, bytes);
  if ((code = space->pin(&pinned, capacity)) != 0) return code;
  if (host.pinned != NULL) space->unpin(host.pinned); /* no call uses it, because each call waits for its end */
  host.pinned = pinned, host.capacity = capacity;
  return 0;
}

/* Copy the arrays that the call reads to pinned memory, or, with `back`, the arrays that it writes from there. `there`:
 * the same call with the arrays in pinned memory. */
static void copy_arrays(const struct call *here, const struct call *there, bool back) {
  for (int i = 0; i < here->buffer_count; i++) {
    const struct buffer *a = &here->buffers[i], *b = &there->buffers[i];
    if (a->count == 0 || role_is_written(a->role) != back) continue;
    if (back)
      memcpy(a->data, b->data, buffer_bytes(a));
    else
      memcpy(b->data, a->data, buffer_bytes(a));
  }
}

/* The bytes of all arrays of a call in pinned memory. */
static size_t bytes_in_all(const struct call *call) {
  size_t bytes = 0;
  for (int i = 0; i < call->buffer_count; i++) bytes += memory_aligned(buffer_bytes(&call->buffers[i]));
  return bytes;
}

/* Give each array of a call a place in pinned memory. */
static void give_places(struct call *call) {
  char *next = host.pinned;
  for (int i = 0; i < call->buffer_count; i++) {
    call->buffers[i].data = next;
    next += memory_aligned(buffer_bytes(&call->buffers[i]));
  }
}

/* Enqueue a call of arrays in pinned memory, and wait for its end. */
static ffi_error *pass(struct call *there) {
  there->memory = space, there->stream = host.stream, there->context = host.context;
  ffi_error *error = call_body(there);
  if (error != NULL) return error;
  int code = space->stream_synchronize(host.stream);
  if (code == 0) return NULL;
  error = call_fail_driver(there, space, code);
  space->stream_synchronize(host.stream); /* the wait may have failed, while the device still uses the memory */
  return error;
}

static ffi_error *pass_arrays(struct call *call) {
  const struct call *here = call->leaves != NULL ? call->leaves : call;
  struct call arrays, joined;
  call_copy(&arrays, here);
  arrays.memory = space;
  TRY_DRIVER(&arrays, host_reserve(bytes_in_all(&arrays)));
  give_places(&arrays);
  copy_arrays(here, &arrays, false);
  struct call *there = &arrays;
  if (call->leaves != NULL) {
    call_copy(&joined, call);
    joined.leaves = &arrays;
    there = &joined;
  }
  ffi_error *error = pass(there);
  if (error == NULL) copy_arrays(here, &arrays, true);
  return error; /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

/* Compose the messages of a plan in pinned memory, pass them like messages of a device, and unpack what comes. */
static ffi_error *pass_messages(struct call *call, const struct plan *plan) {
  struct call there;
  ffi_error *error = plan_check(call, plan, true, true);
  if (error != NULL) return error;
  call_copy(&there, call);
  there.memory = space;
  TRY_DRIVER(&there, host_reserve((size_t)(plan->sent + plan->received)));
  char *stage = host.pinned;
  int next = 0;
  for (int i = 0; i < plan->send_count; i++) {
    label_put(stage + plan->sends[i].stage, 0);
    next = plan_compose_message(call, plan, stage, i, next);
  }
  plan_compose_rest(call, plan, stage, next, false);
  plan_fill(call, plan);
  plan_copy_pairs(call, plan);
  const struct datatype *bytes = datatype_find(FFI_DTYPE_U8);
  there.first[0] = 0, there.first[1] = 1, there.first[2] = there.buffer_count = 2;
  there.buffers[0] = (struct buffer){stage, plan->sent, bytes, ROLE_READ};
  there.buffers[1] = (struct buffer){stage + plan->sent, plan->received, bytes, ROLE_WRITE};
  error = pass(&there);
  if (error != NULL)
    plan_spoil(call, plan);
  else if (is_unpacked_at_once(plan))
    plan_unpack_until(call, plan, stage, 0, INT64_MAX);
  else
    plan_unpack(call, plan, stage);
  return error; /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

/* Execute a call of arrays in CPU memory on the device of the communicator. Before the first call, this is the first
 * device that JAX uses. Under the lock of `host`. */
static ffi_error *run_entered(struct call *call) {
  struct call of_device;
  void *previous, *context = host.context;
  call_copy(&of_device, call);
  of_device.memory = space;
  if (host.stream == NULL && call->comm->nccl == NULL)
    TRY_DRIVER(&of_device, space->device_context(first_device, &context));
  if (call->comm->nccl != NULL) context = call->comm->nccl->context;
  if (host.stream != NULL && host.context != context)
    return call_fail(call, FFI_FAILED_PRECONDITION,
                     "NCCL takes arrays in CPU memory to one device of a process, and this communicator is on another "
                     "one. Nothing was sent. Put the arrays on the device");
  TRY_DRIVER(&of_device, space->enter(context, &previous));
  host.context = context;
  const struct plan *plan = plan_of(call);
  ffi_error *error = plan != NULL ? pass_messages(call, plan) : pass_arrays(call);
  int code = space->leave(previous);
  if (error == NULL && code != 0) error = call_fail_driver(&of_device, space, code);
  return error; /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

ffi_error *nccl_run_host(struct call *call) {
  pthread_mutex_lock(&host.lock);
  ffi_error *error = run_entered(call);
  pthread_mutex_unlock(&host.lock);
  return error;
}

void nccl_finish(void) {
  void *previous;
  if (follower.process != 0 && follower.process != getpid()) return; /* a child of fork has no follower and no device */
  pthread_mutex_lock(&follower.lock);
  follower.ending = true;
  pthread_cond_signal(&follower.wake);
  pthread_cond_broadcast(&follower.ended);
  pthread_mutex_unlock(&follower.lock);
  if (follower.process != 0) pthread_join(follower.thread, NULL);
  follower.process = 0;
  for (int i = 0; i < FOLLOWED; i++) {
    struct followed *call = &follower.calls[i];
    if (call->event == NULL || space->enter(call->context, &previous) != 0) continue;
    space->event_free(call->event);
    call->event = NULL;
    space->leave(previous);
  }
  follower.ending = false;
  follower.first = follower.next = 0;
  if (last.event != NULL && space->enter(last.event_context, &previous) == 0) {
    space->event_free(last.event);
    space->leave(previous);
  }
  last.event = last.stream = NULL;
  if (host.stream != NULL && space->enter(host.context, &previous) == 0) {
    space->stream_synchronize(host.stream);
    space->stream_free(host.stream);
    if (host.pinned != NULL) space->unpin(host.pinned);
    space->leave(previous);
  }
  host.stream = host.context = NULL;
  host.pinned = NULL, host.capacity = 0;
}

int nccl_open(const struct memory *memory, int device, const char *path, char *why, size_t size) {
  static const struct symbol symbols[] = {
#define FUNCTION(name, parameters) {"nccl" #name, offsetof(struct functions, name), true},
#include "devices/nccl.def"
#undef FUNCTION
      {"ncclGetErrorString", offsetof(struct functions, GetErrorString), true},
      {"ncclGetLastError", offsetof(struct functions, GetLastError), true},
      {NULL, 0, false}};
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  int version = 0;
  if (library == NULL) return snprintf(why, size, "%s cannot be loaded: %s", path, dlerror()), 0;
  const char *missing = symbols_load(library, symbols, &nccl);
  if (missing != NULL) return snprintf(why, size, "%s has no %s: install NCCL 2.18 or later", path, missing), 0;
  int code = nccl.GetVersion(&version);
  if (code != 0) return snprintf(why, size, "ncclGetVersion of %s fails: %s", path, nccl.GetErrorString(code)), 0;
  if (version < OLDEST)
    return snprintf(why, size, "%s is NCCL %d.%d.%d: install 2.18 or later", path, version / 10000, version / 100 % 100,
                    version % 100),
           0;
  space = memory;
  first_device = device;
  runtime.enqueue = nccl_enqueue;
  return version;
}

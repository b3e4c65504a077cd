/* MPItrampoline's side of MPI (its ABI, version 2.9), which jaxlib's "mpi" collectives call.
 *
 * When jaxlib is loaded, it looks up all names in the library that MPITRAMPOLINE_LIB names, and ends the process if one
 * is missing. It copies the constants. MPI itself comes later, with mpi4py. So the handles here are our own numbers,
 * and addresses of our objects. XLA uses the names below; names.def has the others.
 *
 * Each collective becomes a call of an operation of ops.def. So it is watched, recorded, logged, compared and divided
 * like jaxmpi's own functions. An error is kept as a text for XLA, which asks for it in the same thread.
 *
 * Threads: those that execute XLA's programs, without the GIL, and Python's when it makes a client. */
#include "sharded/sharded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/abi.h"
#include "core/failure.h"
#include "devices/spaces.h"
#include "execute/body.h"

#define EXPORT __attribute__((visibility("default")))

typedef uintptr_t handle;

/* Predefined handles: datatypes by XLA's codes, of which MPItrampoline has a few, then reductions. */
enum { NO_COMM = 1, WORLD = 2, TYPES = 100, REDUCTIONS = 200 };
enum { SUM, PROD, MAX, MIN };

static _Noreturn void unexpected(const char *name) {
  fprintf(stderr,
          "jaxmpi: this version of jaxlib calls %s, which jaxmpi does not have for it: use --collectives gloo\n", name);
  fflush(stderr);
  _exit(1);
}
#define UNEXPECTED(name) \
  EXPORT int name(void) { unexpected(#name); }
#define F(name) UNEXPECTED(MPIABI_##name)
#define C(name) EXPORT const handle MPIABI_##name[2] = {0xdead, 0xdead}; /* an int is as good */
#include "sharded/names.def"
UNEXPECTED(MPIXABI_Query_cuda_support)
UNEXPECTED(MPIXABI_Query_hip_support)
UNEXPECTED(MPIXABI_Query_ze_support)

EXPORT const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 9, mpiwrapper_version_patch = 0;
EXPORT const int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
EXPORT void mpiwrapper_export_fortran_constants_(void) {}

EXPORT const handle MPIABI_COMM_WORLD = WORLD, MPIABI_STATUS_IGNORE = 0;
EXPORT const int MPIABI_SUCCESS = 0, MPIABI_UNDEFINED = -32766, MPIABI_THREAD_FUNNELED = 1;
EXPORT const handle MPIABI_INT8_T = TYPES + 2, MPIABI_INT16_T = TYPES + 3, MPIABI_INT32_T = TYPES + 4,
                    MPIABI_INT64_T = TYPES + 5, MPIABI_UINT8_T = TYPES + 6, MPIABI_UINT16_T = TYPES + 7,
                    MPIABI_UINT32_T = TYPES + 8, MPIABI_UINT64_T = TYPES + 9, MPIABI_FLOAT = TYPES + 11,
                    MPIABI_DOUBLE = TYPES + 12, MPIABI_C_COMPLEX = TYPES + 15, MPIABI_C_DOUBLE_COMPLEX = TYPES + 18;
EXPORT const handle MPIABI_BYTE = TYPES + 20; /* any code of one byte except UINT8_T's, which must differ */
EXPORT const handle MPIABI_SUM = REDUCTIONS + SUM, MPIABI_PROD = REDUCTIONS + PROD, MPIABI_MAX = REDUCTIONS + MAX,
                    MPIABI_MIN = REDUCTIONS + MIN;

/* --- errors: functions of MPI return 0, or a number that stands for this thread's last error ---------------------- */

static _Thread_local char error_kept[480]; /* XLA has room for 512 characters */

const char *sharded_error(void) { return error_kept; }

static int keep_text(const char *text) {
  snprintf(error_kept, sizeof error_kept, "%s", text);
  return 1;
}

static ffi_error *create_error(ffi_error_create_args *args) {
  static char failed;
  keep_text(args->message);
  return (ffi_error *)&failed;
}

static const ffi_api api = {.struct_size = sizeof api, .error_create = create_error};
static const ffi_frame frame = {.struct_size = sizeof frame, .api = &api};

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* Return a communicator. XLA does not check whether it got one, so the first use fails. */
static struct communicator *comm_of(handle comm) {
  if (comm == NO_COMM)
    keep_text(
        "jaxmpi has no communicator for this program, because it does not know the processes: see "
        "docs/sharded.md");
  return comm == NO_COMM ? NULL : comm == WORLD ? runtime.world : (struct communicator *)comm;
}

/* Begin a call. Callers set the other attributes, and pass the buffers in the order of ops.def. False: there is no
 * communicator. */
static bool begin_on(struct call *call, int row, handle comm) {
  memset(call, 0, offsetof(struct call, buffers));
  call->frame = &frame;
  call->operation = &operation_table[row];
  call->comm = comm_of(comm);
  call->memory = memory_spaces[0];
  call->reducer = REDUCER_MPI;
  call->attributes[call->operation->comm] = (int64_t)(intptr_t)call->comm;
  return call->comm != NULL;
}

static void pass_buffer(struct call *call, const void *data, int64_t count, handle type) {
  int i = call->buffer_count++;
  call->buffers[i] = (struct buffer){(void *)(uintptr_t)data, count, datatype_find((int)(type - TYPES)),
                                     call->operation->buffers[i].role};
  call->first[i] = (short)i;
  call->first[i + 1] = call->buffer_count;
}

static void set_attribute(struct call *call, const char *name, int64_t value) {
  int i = 0;
  while (strcmp(call->operation->attributes[i].name, name) != 0) i++;
  call->attributes[i] = value;
}

/* False: XLA passes none of those that jaxmpi has for it. */
static bool set_reduction(struct call *call, handle op, handle type) {
  handle i = op - REDUCTIONS, code = type - TYPES;
  struct reduction *reduction = i < 4 && code < DTYPE_CODES ? runtime.reductions[code][i] : NULL;
  if (reduction == NULL) keep_text("XLA passes a reduction, or a datatype, that jaxmpi does not have for it");
  set_attribute(call, "op", (int64_t)(intptr_t)reduction);
  return reduction != NULL;
}

/* Check the buffers of a call. XLA has converted its 64-bit numbers, which may have exceeded an int. */
static ffi_error *check_count(const struct call *call) {
  for (int i = 0; i < call->buffer_count; i++)
    if (call->buffers[i].type == NULL)
      return call_fail(call, FFI_UNIMPLEMENTED, "XLA passes a datatype that jaxmpi does not have for it");
    else if (call->buffers[i].count < 0)
      return call_fail(
          call, FFI_UNIMPLEMENTED,
          "too many elements for one of JAX's collectives, which count by an int: divide the array, or use "
          "jaxmpi's own functions");
  return call_check(call);
}

static int run_call(struct call *call) {
  if (check_count(call) != NULL) return 1;
  call_settle(call);
  call->by_nccl = false; /* the arrays are in CPU memory on all ranks */
  return call_body(call) != NULL;
}

EXPORT int MPIABI_Allreduce(const void *in, void *out, int count, handle type, handle op, handle comm) {
  struct call call;
  if (!begin_on(&call, ROW_allreduce, comm) || !set_reduction(&call, op, type)) return 1;
  pass_buffer(&call, in, count, type);
  pass_buffer(&call, out, count, type);
  return run_call(&call);
}

EXPORT int MPIABI_Allgather(const void *in, int count, handle type, void *out, int outcount, handle outtype,
                            handle comm) {
  struct call call;
  (void)outcount, (void)outtype; /* XLA passes the same */
  if (!begin_on(&call, ROW_allgather, comm)) return 1;
  pass_buffer(&call, in, count, type);
  pass_buffer(&call, out, (int64_t)count * call.comm->size, type);
  return run_call(&call);
}

EXPORT int MPIABI_Reduce_scatter(const void *in, void *out, const int *counts, handle type, handle op, handle comm) {
  struct call call;
  int count = counts[0]; /* all are equal */
  if (!begin_on(&call, ROW_reduce_scatter, comm) || !set_reduction(&call, op, type)) return 1;
  pass_buffer(&call, in, (int64_t)count * call.comm->size, type);
  pass_buffer(&call, out, count, type);
  return run_call(&call);
}

EXPORT int MPIABI_Sendrecv(const void *in, int bytes, handle type, int to, int tag, void *out, int outbytes,
                           handle outtype, int from, int outtag, handle comm, void *status) {
  struct call call;
  (void)type, (void)tag, (void)outbytes, (void)outtype, (void)outtag, (void)status; /* MPI_BYTE and 0 */
  if (!begin_on(&call, ROW_sendrecv, comm)) return 1;
  pass_buffer(&call, in, bytes, MPIABI_UINT8_T);
  pass_buffer(&call, out, bytes, MPIABI_UINT8_T);
  set_attribute(&call, "dest", to);
  set_attribute(&call, "source", from);
  return run_call(&call);
}

/* --- messages ---------------------------------------------------------------------------------------------------- */

struct message {
  struct call call;
  bool sent;
  intptr_t request; /* the MPI_Request, if sent */
};

/* Begin a message, which MPIABI_Wait frees. NULL: an error is kept. */
static struct message *begin_message(int row, const void *data, int bytes, const char *peer, int rank, handle comm) {
  struct call call;
  if (!begin_on(&call, row, comm)) return NULL;
  pass_buffer(&call, data, bytes, MPIABI_UINT8_T);
  set_attribute(&call, peer, rank);
  if (check_count(&call) != NULL) return NULL;
  struct message *message = malloc(sizeof *message);
  if (message == NULL) return call_fail(&call, FFI_INTERNAL, "no memory for a message"), NULL;
  call_copy(&message->call, &call);
  message->sent = false;
  return message;
}

EXPORT int MPIABI_Isend(const void *in, int bytes, handle type, int to, int tag, handle comm, handle *request) {
  (void)type, (void)tag; /* MPI_BYTE and 0 */
  struct message *message = begin_message(ROW_send, in, bytes, "dest", to, comm);
  *request = (handle)message;
  if (message == NULL) return 1;
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  int code = runtime.abi->start_send(&message->call, &message->request);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  message->sent = true;
  if (code == 0) return 0;
  message->call.function = "MPI_Isend";
  call_fail_mpi(&message->call, code);
  free(message);
  *request = 0;
  return 1;
}

/* Prepare a receive. XLA's program sends all messages before it waits for those that it receives. So the wait receives
 * the message, as a call like any other. */
EXPORT int MPIABI_Irecv(void *out, int bytes, handle type, int source, int tag, handle comm, handle *request) {
  (void)type, (void)tag;
  *request = (handle)begin_message(ROW_recv, out, bytes, "source", source, comm);
  return *request == 0;
}

EXPORT int MPIABI_Wait(handle *request, void *status) {
  struct message *message = (struct message *)*request;
  struct call wait;
  (void)status;
  *request = 0;
  if (message == NULL) return 0;
  bool sent = message->sent;
  if (sent) {
    begin_on(&wait, ROW_complete, (handle)message->call.comm);
    set_attribute(&wait, "dest", message->call.attributes[1]);
    set_attribute(&wait, "request", (int64_t)(intptr_t)&message->request);
  }
  int code = run_call(sent ? &wait : &message->call);
  free(message);
  return code;
}

/* --- communicators ----------------------------------------------------------------------------------------------- */

static struct communicator *_Atomic expected, *_Atomic alone;

bool sharded_connect(struct group *group) {
  struct call call;
  begin_on(&call, ROW_connect, WORLD);
  set_attribute(&call, "group", (int64_t)(intptr_t)group);
  return run_call(&call) == 0;
}

void sharded_expect(struct communicator *comm) {
  bool single = comm != NULL && comm->size == 1;
  atomic_store(single ? &alone : &expected, comm);
}

EXPORT int MPIABI_Comm_split(handle comm, int color, int key, handle *result) {
  (void)comm, (void)color;
  struct communicator *target = atomic_exchange(&expected, NULL);
  if (target == NULL) target = atomic_exchange(&alone, NULL);
  *result = target != NULL && target->rank == key ? (handle)target : NO_COMM;
  return 0;
}

EXPORT int MPIABI_Comm_rank(handle comm, int *rank) {
  const struct communicator *target = comm_of(comm);
  *rank = target != NULL ? target->rank : 0;
  return target == NULL;
}

EXPORT int MPIABI_Comm_size(handle comm, int *size) {
  const struct communicator *target = comm_of(comm);
  *size = target != NULL ? target->size : 1;
  return target == NULL;
}

/* Called when the process ends, maybe after MPI. */
EXPORT int MPIABI_Comm_free(handle *comm) {
  *comm = NO_COMM;
  return 0;
}

/* --- the process ------------------------------------------------------------------------------------------------- */

EXPORT int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  (void)argc, (void)argv;
  *provided = required;
  return runtime.world != NULL ? 0 : keep_text("import jaxmpi before JAX makes its devices");
}

EXPORT int MPIABI_Finalize(void) { return 0; } /* mpi4py's to do */

EXPORT int MPIABI_Error_string(int number, char *text, int *length) {
  (void)number;
  strcpy(text, sharded_error());
  *length = (int)strlen(text);
  return 0;
}

/* XLA lets only one thread make communicators: MPI's first. Here any thread may: see sharded_expect. */
EXPORT int MPIABI_Is_thread_main(int *flag) {
  *flag = 1;
  return 0;
}

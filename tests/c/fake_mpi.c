/* The functions of the fake library that communicate. Its rules are in fake_mpi.h. */
#include "fake_mpi.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_objects.h"

/* What rank `comm->rank + distance` passes where this rank passes `in`. */
static void contribution(void *out, const void *in, int64_t bytes, int distance) {
  for (int64_t i = 0; !fake_control.hollow && i < bytes; i++)
    ((unsigned char *)out)[i] = (unsigned char)(((const unsigned char *)in)[i] + distance);
}

static void from_root(void *out, int64_t bytes, int root) {
  for (int64_t i = 0; !fake_control.hollow && i < bytes; i++) ((unsigned char *)out)[i] = fake_byte(root, i);
}

static int check_root(const struct comm *comm, struct fake_call *call, int root) {
  call->peer = root;
  return root >= 0 && root < comm->size ? MPI_SUCCESS : FAKE_ERR_ROOT;
}

static int check_apart(const struct fake_call *call) {
  return call->in == call->out && call->in_bytes > 0 ? FAKE_ERR_BUFFER : MPI_SUCCESS;
}

/* --- collectives --- */

int MPI_Allgather(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm handle) {
  BEGIN(Allgather);
  TRY(fake_reads(call, in, n, t));
  TRY(fake_writes(call, out, m, u));
  TRY(check_apart(call));
  if (call->in_bytes != call->out_bytes) return FAKE_ERR_COUNT;
  for (int r = 0; r < comm->size; r++) {
    char *block = (char *)out + r * call->out_bytes;
    contribution(block, in, call->in_bytes, fake_control.alike ? 0 : r - comm->rank);
  }
  return MPI_SUCCESS;
}

int MPI_Barrier(MPI_Comm handle) {
  BEGIN(Barrier);
  return MPI_SUCCESS;
}

int MPI_Bcast(void *data, int n, MPI_Datatype t, int root, MPI_Comm handle) {
  BEGIN(Bcast);
  TRY(check_root(comm, call, root));
  TRY(fake_reads(call, data, n, t));
  if (root != comm->rank) from_root(data, call->in_bytes, root);
  return MPI_SUCCESS;
}

int MPI_Gather(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, int root, MPI_Comm handle) {
  BEGIN(Gather);
  TRY(check_root(comm, call, root));
  TRY(fake_reads(call, in, n, t));
  call->out = out;
  if (root != comm->rank) return MPI_SUCCESS;
  TRY(fake_writes(call, out, m, u));
  TRY(check_apart(call));
  if (call->in_bytes != call->out_bytes) return FAKE_ERR_COUNT;
  for (int r = 0; r < comm->size; r++)
    contribution((char *)out + r * call->out_bytes, in, call->in_bytes, r - comm->rank);
  return MPI_SUCCESS;
}

int MPI_Scatter(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, int root, MPI_Comm handle) {
  BEGIN(Scatter);
  TRY(check_root(comm, call, root));
  TRY(fake_writes(call, out, m, u));
  call->in = in;
  if (root != comm->rank) {
    from_root(out, call->out_bytes, root);
    return MPI_SUCCESS;
  }
  TRY(fake_reads(call, in, n, t));
  TRY(check_apart(call));
  if (call->in_bytes != call->out_bytes) return FAKE_ERR_COUNT;
  contribution(out, (const char *)in + comm->rank * call->in_bytes, call->out_bytes, 0);
  return MPI_SUCCESS;
}

/* The common part of the reductions, on a rank that gets the result. */
static int reduction(struct fake_call *call, const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, int times) {
  call->op = (intptr_t)op;
  TRY(fake_writes(call, out, n, t));
  TRY(fake_reads(call, in, n, t));
  TRY(check_apart(call));
  return fake_reduce(op, in, out, n, t, times);
}

int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm handle) {
  BEGIN(Allreduce);
  return reduction(call, in, out, n, t, op, comm->size);
}

int MPI_Scan(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm handle) {
  BEGIN(Scan);
  return reduction(call, in, out, n, t, op, comm->rank + 1);
}

int MPI_Reduce(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm handle) {
  BEGIN(Reduce);
  TRY(check_root(comm, call, root));
  if (root == comm->rank) return reduction(call, in, out, n, t, op, comm->size);
  call->op = (intptr_t)op;
  call->out = out;
  if (in == ABI_IN_PLACE) return FAKE_ERR_BUFFER;
  return fake_reads(call, in, n, t);
}

int MPI_Reduce_scatter_block(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm handle) {
  BEGIN(Reduce_scatter_block);
  TRY(fake_writes(call, out, n, t));
  const char *mine = (const char *)in + comm->rank * call->out_bytes;
  return reduction(call, mine, out, n, t, op, comm->size);
}

int MPI_Exscan(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm handle) {
  BEGIN(Exscan);
  return reduction(call, in, out, n, t, op, comm->rank);
}

/* --- collectives with counts, of parts that follow each other --- */

static int sum_of(const struct comm *comm, const int counts[], const int offsets[], int *sum) {
  *sum = 0;
  for (int r = 0; r < comm->size; *sum += counts[r], r++)
    if (counts[r] < 0 || (offsets != NULL && offsets[r] != *sum)) return FAKE_ERR_COUNT;
  return MPI_SUCCESS;
}

/* The parts of all ranks: this rank's is `mine`, of `bytes`. */
static int receive_parts(struct fake_call *call, const struct comm *comm, void *out, const int counts[],
                         const int offsets[], MPI_Datatype u, const void *mine, int64_t bytes) {
  int sum;
  TRY(sum_of(comm, counts, offsets, &sum));
  TRY(fake_writes(call, out, sum, u));
  int64_t unit = fake_type(u)->bytes;
  if (bytes != counts[comm->rank] * unit) return FAKE_ERR_COUNT;
  for (int r = 0; r < comm->size; r++) {
    char *part = (char *)out + offsets[r] * unit;
    if (counts[r] == 0) continue;
    if (r == comm->rank)
      contribution(part, mine, bytes, 0);
    else
      from_root(part, counts[r] * unit, r);
  }
  return MPI_SUCCESS;
}

int MPI_Allgatherv(const void *in, int n, MPI_Datatype t, void *out, const int counts[], const int offsets[],
                   MPI_Datatype u, MPI_Comm handle) {
  BEGIN(Allgatherv);
  TRY(fake_reads(call, in, n, t));
  return receive_parts(call, comm, out, counts, offsets, u, in, call->in_bytes);
}

int MPI_Gatherv(const void *in, int n, MPI_Datatype t, void *out, const int counts[], const int offsets[],
                MPI_Datatype u, int root, MPI_Comm handle) {
  BEGIN(Gatherv);
  TRY(check_root(comm, call, root));
  TRY(fake_reads(call, in, n, t));
  call->out = out;
  return root != comm->rank ? MPI_SUCCESS : receive_parts(call, comm, out, counts, offsets, u, in, call->in_bytes);
}

int MPI_Alltoallv(const void *in, const int sent[], const int from[], MPI_Datatype t, void *out, const int received[],
                  const int to[], MPI_Datatype u, MPI_Comm handle) {
  BEGIN(Alltoallv);
  int sum;
  TRY(sum_of(comm, sent, from, &sum));
  TRY(fake_reads(call, in, sum, t));
  int64_t unit = fake_type(t)->bytes;
  const char *mine = sent[comm->rank] == 0 ? in : (const char *)in + from[comm->rank] * unit;
  return receive_parts(call, comm, out, received, to, u, mine, sent[comm->rank] * unit);
}

int MPI_Scatterv(const void *in, const int counts[], const int offsets[], MPI_Datatype t, void *out, int m,
                 MPI_Datatype u, int root, MPI_Comm handle) {
  BEGIN(Scatterv);
  int sum;
  TRY(check_root(comm, call, root));
  TRY(fake_writes(call, out, m, u));
  call->in = in;
  if (root != comm->rank) {
    from_root(out, call->out_bytes, root);
    return MPI_SUCCESS;
  }
  TRY(sum_of(comm, counts, offsets, &sum));
  TRY(fake_reads(call, in, sum, t));
  int64_t unit = fake_type(t)->bytes;
  if (call->out_bytes != counts[root] * unit) return FAKE_ERR_COUNT;
  if (call->out_bytes > 0) contribution(out, (const char *)in + offsets[root] * unit, call->out_bytes, 0);
  return MPI_SUCCESS;
}

int MPI_Reduce_scatter(const void *in, void *out, const int counts[], MPI_Datatype t, MPI_Op op, MPI_Comm handle) {
  BEGIN(Reduce_scatter);
  int sum;
  TRY(sum_of(comm, counts, NULL, &sum));
  TRY(fake_reads(call, in, sum, t));
  int64_t before = 0;
  for (int r = 0; r < comm->rank; r++) before += counts[r] * fake_type(t)->bytes;
  const char *mine = counts[comm->rank] == 0 ? in : (const char *)in + before;
  return reduction(call, mine, out, counts[comm->rank], t, op, comm->size);
}

/* --- messages --- */

static int start_send(struct fake_call *call, const struct comm *comm, const void *in, int n, MPI_Datatype t, int dest,
                      int tag) {
  call->peer = dest, call->tag = tag;
  TRY(fake_reads(call, in, n, t));
  if (dest == ABI_PROC_NULL) return MPI_SUCCESS;
  if (dest < 0 || dest >= comm->size) return FAKE_ERR_RANK;
  if (tag < 0) return FAKE_ERR_TAG;
  return dest == comm->rank ? fake_enqueue(call->comm, dest, tag, in, call->in_bytes) : MPI_SUCCESS;
}

int MPI_Send(const void *in, int n, MPI_Datatype t, int dest, int tag, MPI_Comm handle) {
  BEGIN(Send);
  return start_send(call, comm, in, n, t, dest, tag);
}

/* What starts: done at once, and seen at the end. */
static int started(int code, const struct fake_call *call, void *before, MPI_Request *request) {
  if (code == MPI_SUCCESS) return fake_request(call, before, request);
  free(before);
  return code;
}

static void *before_of(const void *out, int n, MPI_Datatype t, int parts) {
  return fake_copy(out, fake_type(t) != NULL ? n * parts * fake_type(t)->bytes : 0);
}

int MPI_Isend(const void *in, int n, MPI_Datatype t, int dest, int tag, MPI_Comm handle, MPI_Request *request) {
  BEGIN(Isend);
  return started(start_send(call, comm, in, n, t, dest, tag), call, NULL, request);
}

static int check_envelope(struct fake_call *call, const struct comm *comm, int source, int tag) {
  call->peer = source, call->tag = tag;
  if (source != fake_control.any_source && (source < 0 || source >= comm->size)) return FAKE_ERR_RANK;
  return tag != fake_control.any_tag && tag < 0 ? FAKE_ERR_TAG : MPI_SUCCESS;
}

int MPI_Irecv(void *out, int n, MPI_Datatype t, int source, int tag, MPI_Comm handle, MPI_Request *request) {
  BEGIN(Irecv);
  TRY(check_envelope(call, comm, source, tag));
  TRY(fake_writes(call, out, n, t));
  return fake_expect(call, request);
}

int MPI_Cancel(MPI_Request *request) {
  CALL(Cancel);
  return fake_cancel(request);
}

int MPI_Iallreduce(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm handle, MPI_Request *request) {
  BEGIN(Iallreduce);
  void *before = before_of(out, n, t, 1);
  return started(reduction(call, in, out, n, t, op, comm->size), call, before, request);
}

int MPI_Ireduce(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm handle,
                MPI_Request *request) {
  BEGIN(Ireduce);
  TRY(check_root(comm, call, root));
  void *before = root == comm->rank ? before_of(out, n, t, 1) : NULL;
  if (root == comm->rank) return started(reduction(call, in, out, n, t, op, comm->size), call, before, request);
  call->op = (intptr_t)op;
  call->out = out;
  if (in == ABI_IN_PLACE) return FAKE_ERR_BUFFER;
  return started(fake_reads(call, in, n, t), call, NULL, request);
}

static int exchange_blocks(struct fake_call *call, const struct comm *comm, const void *in, int n, MPI_Datatype t,
                           void *out, int m, MPI_Datatype u) {
  TRY(fake_reads(call, in, n, t));
  TRY(fake_writes(call, out, m, u));
  TRY(check_apart(call));
  if (call->in_bytes != call->out_bytes) return FAKE_ERR_COUNT;
  for (int r = 0; r < comm->size; r++)
    contribution((char *)out + r * call->out_bytes, (const char *)in + r * call->in_bytes, call->in_bytes,
                 r - comm->rank);
  return MPI_SUCCESS;
}

int MPI_Alltoall(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm handle) {
  BEGIN(Alltoall);
  return exchange_blocks(call, comm, in, n, t, out, m, u);
}

int MPI_Ialltoall(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm handle,
                  MPI_Request *request) {
  BEGIN(Ialltoall);
  void *before = before_of(out, m, u, comm->size);
  int code = exchange_blocks(call, comm, in, n, t, out, m, u);
  call->in_bytes *= comm->size, call->out_bytes *= comm->size; /* of all blocks, while it is under way */
  code = started(code, call, before, request);
  call->in_bytes /= comm->size, call->out_bytes /= comm->size;
  return code;
}

int MPI_Ibarrier(MPI_Comm handle, MPI_Request *request) {
  BEGIN(Ibarrier);
  (void)comm;
  return started(MPI_SUCCESS, call, NULL, request);
}

int MPI_Ibcast(void *data, int n, MPI_Datatype t, int root, MPI_Comm handle, MPI_Request *request) {
  BEGIN(Ibcast);
  TRY(check_root(comm, call, root));
  TRY(fake_reads(call, data, n, t));
  if (root == comm->rank) return started(MPI_SUCCESS, call, NULL, request);
  void *before = before_of(data, n, t, 1);
  call->out = data, call->out_bytes = call->in_bytes;
  from_root(data, call->in_bytes, root);
  return started(MPI_SUCCESS, call, before, request);
}

/* An error that is injected into a test leaves the request as it is, one into a wait ends it. */
int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
  CALL(Test);
  return fake_end(request, true, done, status);
}

int MPI_Wait(MPI_Request *request, MPI_Status *status) {
  struct fake_call *call;
  int done, code = fake_begin("MPI_Wait", &call);
  int end = fake_end(request, false, &done, status);
  return code != MPI_SUCCESS ? code : end;
}

enum { NO_MESSAGE = 255 }; /* the place of the message that PROC_NULL sends */

int MPI_Mprobe(int source, int tag, MPI_Comm handle, MPI_Message *message, MPI_Status *status) {
  BEGIN(Mprobe);
  int place = NO_MESSAGE;
  if (source == ABI_PROC_NULL) {
    call->peer = source, call->tag = tag;
    fake_set_status(status, ABI_PROC_NULL, fake_control.any_tag, 0);
  } else {
    TRY(check_envelope(call, comm, source, tag));
    if (!fake_match(handle, source, tag, false, &place, status)) return FAKE_WOULD_WAIT;
  }
  *message = (MPI_Message)FAKE_HANDLE(KIND_MESSAGE, place);
  return MPI_SUCCESS;
}

static bool is_unheard(void) {
  if (fake_control.unheard == 0) return false;
  fake_control.unheard--;
  return true;
}

int MPI_Improbe(int source, int tag, MPI_Comm handle, int *found, MPI_Message *message, MPI_Status *status) {
  BEGIN(Improbe);
  int place = 0;
  TRY(check_envelope(call, comm, source, tag));
  *found = !is_unheard() && fake_match(handle, source, tag, false, &place, status);
  if (*found) *message = (MPI_Message)FAKE_HANDLE(KIND_MESSAGE, place);
  return MPI_SUCCESS;
}

int MPI_Iprobe(int source, int tag, MPI_Comm handle, int *found, MPI_Status *status) {
  BEGIN(Iprobe);
  int place;
  TRY(check_envelope(call, comm, source, tag));
  *found = !is_unheard() && fake_match(handle, source, tag, true, &place, status);
  return MPI_SUCCESS;
}

/* `code`: an error that is injected. The message is gone all the same. */
static int receive(struct fake_call *call, int code, void *out, int n, MPI_Datatype t, MPI_Message *message,
                   MPI_Status *status) {
  int place = (int)FAKE_PLACE(KIND_MESSAGE, *message);
  struct message *found = fake_message(place);
  if (found == NULL && place != NO_MESSAGE) return FAKE_ERR_ARG;
  TRY(fake_writes(call, out, n, t));
  *message = (MPI_Message)(intptr_t)0;
  fake_set_status(status, ABI_PROC_NULL, fake_control.any_tag, 0);
  if (found == NULL) return code;
  fake_set_status(status, found->source, found->tag, found->bytes);
  if (code == MPI_SUCCESS && found->data != NULL && found->bytes > 0) memcpy(out, found->data, (size_t)found->bytes);
  if (code == MPI_SUCCESS && found->bytes > call->out_bytes) code = FAKE_ERR_TRUNCATE;
  fake_drop(found);
  return code;
}

int MPI_Mrecv(void *out, int n, MPI_Datatype t, MPI_Message *message, MPI_Status *status) {
  struct fake_call *call;
  int code = fake_begin("MPI_Mrecv", &call);
  return receive(call, code, out, n, t, message, status);
}

int MPI_Imrecv(void *out, int n, MPI_Datatype t, MPI_Message *message, MPI_Request *request) {
  struct fake_call *call;
  MPI_Status ignored;
  int code = fake_begin("MPI_Imrecv", &call);
  void *before = before_of(out, n, t, 1);
  return started(receive(call, code, out, n, t, message, &ignored), call, before, request);
}

/* Bytes of the message in units of `unit`; ABI_UNDEFINED where they are no whole number. */
static int64_t units(const MPI_Status *status, int64_t unit) {
  int64_t bytes = fake_status_bytes(status);
  if (bytes == 0) return 0;
  return unit > 0 && bytes % unit == 0 ? bytes / unit : ABI_UNDEFINED;
}

int MPI_Status_set_elements(MPI_Status *status, MPI_Datatype handle, int count) {
  const struct type *type = fake_type(handle);
  if (type == NULL) return FAKE_ERR_TYPE;
  fake_set_status(status, status->MPI_SOURCE, status->MPI_TAG, count * type->bytes);
  return MPI_SUCCESS;
}

#define COUNTING(name, count_type, answer)                                           \
  int MPI_##name(const MPI_Status *status, MPI_Datatype handle, count_type *count) { \
    CALL(name);                                                                      \
    const struct type *type = fake_type(handle);                                     \
    if (type == NULL) return FAKE_ERR_TYPE;                                          \
    *count = (answer);                                                               \
    return MPI_SUCCESS;                                                              \
  }
static int of_int(int64_t count) { return count > INT_MAX ? ABI_UNDEFINED : (int)count; }
COUNTING(Get_count, int, of_int(units(status, type->bytes)))
#if FAKE_MPI_VERSION >= 4
COUNTING(Get_count_c, MPI_Count, units(status, type->bytes))
#endif
#if FAKE_MPI_VERSION >= 3 && FAKE_MPI_VERSION <= 5
COUNTING(Get_elements_x, MPI_Count, units(status, type->element))
#endif

/* --- the rest --- */

#define QUESTION(name, answer)                         \
  int MPI_Comm_##name(MPI_Comm comm, int *result) {    \
    CALL(Comm_##name);                                 \
    if (fake_comm(comm) == NULL) return FAKE_ERR_COMM; \
    *result = (answer);                                \
    return MPI_SUCCESS;                                \
  }
QUESTION(rank, fake_comm(comm)->rank)
QUESTION(size, fake_comm(comm)->size)
QUESTION(test_inter, 0)

int MPI_Abort(MPI_Comm comm, int status) {
  CALL(Abort);
  call->comm = (intptr_t)comm;
  call->tag = status;
  return MPI_SUCCESS;
}

int MPI_Error_class(int error, int *class) {
  CALL(Error_class);
  *class = error;
  return MPI_SUCCESS;
}

int MPI_Error_string(int error, char *text, int *length) {
  CALL(Error_string);
  *length = snprintf(text, 256, "the fake's text for %d", error);
  return MPI_SUCCESS;
}

/* Functions that are looked up by name and not in mpi.def. */
#pragma GCC visibility push(default)
int MPI_Init(int *argc, char ***argv);
int MPI_Get_library_version(char *text, int *length);
int MPI_Abi_get_version(int *major, int *minor);
#pragma GCC visibility pop

int MPI_Init(int *argc, char ***argv) {
  (void)argc, (void)argv;
  return MPI_SUCCESS;
}

int MPI_Get_library_version(char *text, int *length) {
  *length = snprintf(text, 8192, "%s", fake_control.version);
  return fake_control.version_code;
}

#if FAKE_MPI_VERSION >= 5
int MPI_Abi_get_version(int *major, int *minor) {
  *major = fake_control.abi_major;
  *minor = fake_control.abi_major < 0 ? -1 : 0;
  return MPI_SUCCESS;
}
#endif

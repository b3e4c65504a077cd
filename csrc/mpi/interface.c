/* What the core sees of an ABI: struct abi. Compiled once per ABI. */
#include <stdio.h>
#include <stdlib.h>

#include "base/symbols.h"
#include "core/abi.h"
#include "devices/nccl.h"
#include "devices/transport.h"
#include "execute/agreement.h"
#include "mpi/match.h"
#include "mpi/messages.h"
#include "mpi/own.h"

struct mpi_table mpi;

static int keyval; /* attribute of a communicator: the struct communicator */

/* Extensions for jobs that survive the death of a process. NULL: the library does not have the function. */
static struct {
  int (*revoke)(MPI_Comm);
  int (*is_revoked)(MPI_Comm, int *);
  int (*get_failed)(MPI_Comm, MPI_Group *);
  int (*group_size)(MPI_Group, int *);
} extensions;

/* A duplicate is another communicator and gets another struct. */
static int do_not_copy(MPI_Comm comm, int key, void *extra, void *value, void *copy, int *flag) {
  (void)comm, (void)key, (void)extra, (void)value, (void)copy;
  *flag = 0;
  return MPI_SUCCESS;
}

/* Remove a communicator: no call can use it any more. Done once, because a communicator that was given up may be freed
 * later. */
static void forget_communicator(struct communicator *comm) {
  if (atomic_exchange(&comm->freed, true)) return;
  if (runtime.self != NULL && !atomic_load(&runtime.self->freed)) agreement_end(comm);
  requests_forget(comm);
  comm->next_freed = atomic_load(&runtime.freed);
  while (!atomic_compare_exchange_weak(&runtime.freed, &comm->next_freed, comm)) continue;
}

/* MPI calls this when it frees a communicator. Operations that streams still have may use it, so they finish first. */
static int mark_freed(MPI_Comm comm, int key, void *value, void *extra) {
  (void)comm, (void)key, (void)extra;
  transport_drain();
  nccl_free(value);
  if (value == runtime.self) agreement_finish();
  forget_communicator(value);
  return MPI_SUCCESS;
}

static int64_t give_up(struct communicator *comm) {
  transport_drain();
  atomic_store(&comm->given_up, true);
  forget_communicator(comm);
  return requests_give_up_on(comm);
}

static const char *load_table(void *library) {
  static const struct symbol symbols[] = {
#define REQUIRED(name, parameters) {"MPI_" #name, offsetof(struct mpi_table, name), true},
#define OPTIONAL(name, parameters) {"MPI_" #name, offsetof(struct mpi_table, name), false},
#include "mpi/mpi.def"
#undef REQUIRED
#undef OPTIONAL
      {NULL, 0, false}};
  const char *missing = symbols_load(library, symbols, &mpi);
  if (missing != NULL) return missing;
  symbol_find(library, "MPIX_Comm_revoke", &extensions.revoke);
  symbol_find(library, "MPIX_Comm_is_revoked", &extensions.is_revoked);
  symbol_find(library, "MPIX_Comm_get_failed", &extensions.get_failed);
  symbol_find(library, "MPI_Group_size", &extensions.group_size);
  if (mpi.Comm_create_keyval(do_not_copy, mark_freed, &keyval, NULL) != MPI_SUCCESS) return "MPI_Comm_create_keyval";
  return NULL;
}

static int communicator(intptr_t handle, const char *stable_key, struct communicator **result) {
  MPI_Comm comm = (MPI_Comm)handle;
  int code, is_set = 0, inter = 0;
  *result = NULL;
  if ((code = mpi.Comm_get_attr(comm, keyval, result, &is_set)) != MPI_SUCCESS || is_set) return code;
  if ((code = mpi.Comm_test_inter(comm, &inter)) != MPI_SUCCESS || inter) return code;
  struct communicator *record = calloc(1, sizeof *record);
  if (record == NULL) return CODE_NO_MEMORY;
  record->handle = handle;
  if ((code = mpi.Comm_rank(comm, &record->rank)) != MPI_SUCCESS ||
      (code = mpi.Comm_size(comm, &record->size)) != MPI_SUCCESS ||
      (code = (record->number = registry_add(record, stable_key)) != 0 ? MPI_SUCCESS : CODE_NO_MEMORY) != MPI_SUCCESS ||
      (code = mpi.Comm_set_attr(comm, keyval, record)) != MPI_SUCCESS) {
    if (record->number == 0) free(record); /* the registry never drops an object */
    return code;
  }
  *result = record;
  return MPI_SUCCESS;
}

static int own_operations(const char *dtype, intptr_t handles[4]) {
  MPI_Op ops[4];
  const struct own_reductions *own = own_reductions;
  memset(handles, 0, 4 * sizeof *handles);
  while (own->dtype != NULL && strcmp(own->dtype, dtype) != 0) own++;
  for (int i = 0; i < 4 && own->dtype != NULL; i++) {
    int code = own->functions[i] != NULL ? mpi.Op_create(own->functions[i], 1, &ops[i]) : MPI_SUCCESS;
    if (code != MPI_SUCCESS) {
      while (i-- > 0)
        if (own->functions[i] != NULL) mpi.Op_free(&ops[i]);
      return code;
    }
    if (own->functions[i] != NULL) handles[i] = (intptr_t)ops[i];
  }
  return MPI_SUCCESS;
}

/* --- see agreement.h --- */

static int post_message(void *data, size_t bytes, bool sends, int rank, int tag, intptr_t *request) {
  MPI_Datatype type = bytes_type();
  MPI_Comm comm = (MPI_Comm)runtime.channel;
  MPI_Request handle;
  int code = sends ? mpi.Isend(data, (int)bytes, type, rank, tag, comm, &handle)
                   : mpi.Irecv(data, (int)bytes, type, rank, tag, comm, &handle);
  *request = (intptr_t)handle;
  return code;
}

static int test_message(intptr_t *request, bool *done) {
  MPI_Request tested = (MPI_Request)*request;
  MPI_Status ignored;
  int flag = 0, code = mpi.Test(&tested, &flag, &ignored);
  *request = (intptr_t)tested;
  *done = flag != 0;
  return code;
}

static int cancel_message(intptr_t *request) {
  MPI_Request cancelled = (MPI_Request)*request;
  MPI_Status ignored;
  int code = mpi.Cancel(&cancelled);
  return code != MPI_SUCCESS ? code : mpi.Wait(&cancelled, &ignored);
}

/* --- see devices/nccl.h --- */

static int share(const struct communicator *comm, void *data, size_t bytes) {
  return mpi.Bcast(data, (int)bytes, bytes_type(), 0, handle_of_comm(comm));
}

static int worst_of(const struct communicator *comm, int32_t mine, int *worst, int *rank) {
  MPI_Datatype type = (MPI_Datatype)runtime.datatypes[FFI_DTYPE_S32];
  int32_t *all = malloc((size_t)comm->size * sizeof *all);
  if (all == NULL) return CODE_NO_MEMORY;
  int code = mpi.Allgather(&mine, 1, type, all, 1, type, handle_of_comm(comm));
  *worst = *rank = 0;
  for (int r = 0; r < comm->size && code == MPI_SUCCESS; r++)
    if (all[r] > *worst) *worst = all[r], *rank = r;
  free(all);
  return code;
}

static void let_progress(void) {
  MPI_Status ignored;
  int found;
  if (!runtime_has_ended()) mpi.Iprobe(ABI_ANY_SOURCE, ABI_ANY_TAG, handle_of_comm(runtime.self), &found, &ignored);
}

static void abort_job(int status) { mpi.Abort(handle_of_comm(runtime.world), status); }

static int error_class(int code) {
  int class = 0;
  return mpi.Error_class(code, &class) == MPI_SUCCESS ? class : 0;
}

static void revoke(const struct communicator *comm) {
  if (extensions.revoke != NULL) extensions.revoke(handle_of_comm(comm));
}

static bool is_revoked(const struct communicator *comm) {
  int flag = 0;
  return extensions.is_revoked != NULL && extensions.is_revoked(handle_of_comm(comm), &flag) == MPI_SUCCESS && flag;
}

static bool is_broken(const struct communicator *comm) {
  MPI_Group failed;
  int size = 0;
  if (is_revoked(comm)) return true;
  if (extensions.get_failed == NULL || extensions.group_size == NULL ||
      extensions.get_failed(handle_of_comm(comm), &failed) != MPI_SUCCESS)
    return false;
  if (extensions.group_size(failed, &size) != MPI_SUCCESS) size = 0;
  mpi.Group_free(&failed);
  return size > 0;
}

static void error_text(int code, char *text) {
  int length = 0;
  if (code == CODE_NO_MEMORY)
    snprintf(text, 64, "no memory");
  else if (mpi.Error_string(code, text, &length) != MPI_SUCCESS)
    snprintf(text, 64, "MPI error code %d", code);
}

/* In the order of ops.def. */
static ffi_error *(*const bodies[])(struct call *) = {
#define OPERATION(name, engine, divisibility, buffers, attributes) BODY(name),
#include "core/ops.def"
#undef OPERATION
};

#define ABI_STRING2(name) #name
#define ABI_STRING(name)  ABI_STRING2(name)

const struct abi ABI_LOCAL(abi) = {
    .name = ABI_STRING(ABI_NAME),
    .bodies = bodies,
    .load = load_table,
    .communicator = communicator,
    .own_operations = own_operations,
    .post = post_message,
    .test = test_message,
    .cancel = cancel_message,
    .start_send = post_send,
    .probe = probe_message,
    .match = match_message,
    .receive = receive_message,
    .test_request = test_begun,
    .share = share,
    .worst = worst_of,
    .progress = let_progress,
    .error_class = error_class,
    .revoke = revoke,
    .give_up = give_up,
    .is_revoked = is_revoked,
    .is_broken = is_broken,
    .abort = abort_job,
    .any_source = ABI_ANY_SOURCE,
    .any_tag = ABI_ANY_TAG,
    .proc_null = ABI_PROC_NULL,
    .error_text = error_text,
};

/* The functions for an MPI library that are compiled once for each ABI.
 *
 * Threads: abi_find is called under the GIL; each member of struct abi says who calls it. With runtime.serialize the
 * caller of a member that calls MPI needs runtime.lock, as stated there. */
#ifndef JAXMPI_ABI_H
#define JAXMPI_ABI_H

#include "core/call.h"
#include "core/runtime.h"

struct request;
struct receive;
struct message_info;

/* Beside MPI's error codes: out of memory. */
enum { CODE_NO_MEMORY = -1 };

/* The functions compiled once for each ABI. With runtime.serialize the caller of a body, of `communicator` and of the
 * functions for agreement.h holds runtime.lock. */
struct abi {
  const char *name;

  /* The bodies of the operations, in the order of ops.def, which call MPI: NULL or the error. Called by the thread that
   * the transport chooses for MPI calls, without the GIL. */
  ffi_error *(*const *bodies)(struct call *call);

  /* Fill the function table from `library` (from dlopen). NULL, or the name of a missing function. Called once, at
   * import. */
  const char *(*load)(void *library);

  /* Find or make the struct for a communicator: NULL for an inter-communicator. A new struct gets a number with this
   * stable key, which may be NULL. Return an MPI error code. Called under the GIL. */
  int (*communicator)(intptr_t handle, const char *stable_key, struct communicator **result);

  /* Make the reductions of a dtype that are ours: `handles` in the order SUM, PROD, MAX, MIN, 0 where MPI's is used.
   * Return an MPI error code. Called at import, under the GIL. */
  int (*own_operations)(const char *dtype, intptr_t handles[4]);

  /* For agreement.h. All of these return an MPI error code and do not wait. They post a message to, or from, a rank of
   * COMM_WORLD on runtime.channel; test whether it is complete; cancel a receive. */
  int (*post)(void *data, size_t bytes, bool sends, int rank, int tag, intptr_t *request);
  int (*test)(intptr_t *request, bool *done);
  int (*cancel)(intptr_t *request);

  /* Begin to send the message of a call of `send`. The buffer must stay until the body of `wait` is done with the
   * request. Return an MPI error code. */
  int (*start_send)(const struct call *call, intptr_t *request);

  /* For requests/queue.h, under the queue's lock. `probe` polls for a message, and `match` matches it; both return an
   * MPI error code and do not wait. `receive` begins to receive a message that has been matched, unless a thread waits
   * for it or must look at it first. */
  int (*probe)(const struct communicator *comm, int source, int tag, bool *there, struct message_info *info);
  int (*match)(const struct communicator *comm, int source, int tag, bool *there, struct message_info *info);
  void (*receive)(struct receive *receive);

  /* Return whether the work of a request is still under way. It does not wait. Under the lock of requests/table.h. */
  bool (*test_request)(struct request *request);

  /* For devices/nccl.h. All ranks of a communicator call `share`, which passes bytes of rank 0 to all of them, and
   * `worst`, which finds the greatest number of any rank, and a rank that has it. Both return an MPI error code.
   * `progress` lets the library work on what is under way, and does not wait. Any thread. */
  int (*share)(const struct communicator *comm, void *data, size_t bytes);
  int (*worst)(const struct communicator *comm, int32_t mine, int *worst, int *rank);
  void (*progress)(void);

  /* The class of an error code. Any thread. */
  int (*error_class)(int code);

  /* `revoke` makes all operations on a communicator fail, on all ranks, from now on. `is_revoked`: whether any rank has
   * done this. Both do nothing where MPI has no call for it. `revoke` is called under runtime.lock, as a body. */
  void (*revoke)(const struct communicator *comm);
  bool (*is_revoked)(const struct communicator *comm);

  /* Return whether a communicator is revoked, or a process of it is known to have died. Under runtime.lock, as a body.
   */
  bool (*is_broken)(const struct communicator *comm);

  /* End all work on a revoked communicator, as if it were freed, and give up the requests in flight on it. Return
   * how many they were. Without the GIL. */
  int64_t (*give_up)(struct communicator *comm);

  /* End the job. Any thread. */
  void (*abort)(int status);

  /* The numbers for any rank, any tag and no rank. */
  int any_source, any_tag, proc_null;

  /* The text for an error code, the library's own except for CODE_NO_MEMORY; `text` has room for 1024 bytes. Any
   * thread. */
  void (*error_text)(int code, char *text);
};
extern const struct abi abi_openmpi, abi_mpich, abi_mpiabi;

/* The ABI of the MPI library behind `library`, by the ABI version and the description that the library returns; NULL if
 * unknown. `version` receives the description, cut to `size`. */
const struct abi *abi_find(void *library, char *version, size_t size);

#endif

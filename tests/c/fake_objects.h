/* The objects of the fake library and its record of calls. Compiled once per ABI. */
#ifndef JAXMPI_FAKE_OBJECTS_H
#define JAXMPI_FAKE_OBJECTS_H

#include "fake_mpi.h"
#include "mpi/mpi_table.h"

/* A definition that differs from the list does not compile. */
#pragma GCC visibility push(default)
#define REQUIRED(name, parameters) int MPI_##name parameters;
#define OPTIONAL(name, parameters) int MPI_##name parameters;
#include "mpi/mpi.def"
#undef REQUIRED
#undef OPTIONAL
extern struct fake_control fake_control;
#pragma GCC visibility pop

enum {
  FAKE_ERR_BUFFER = 1,
  FAKE_ERR_COUNT = 2,
  FAKE_ERR_TYPE = 3,
  FAKE_ERR_TAG = 4,
  FAKE_ERR_COMM = 5,
  FAKE_ERR_RANK = 6,
  FAKE_ERR_ROOT = 8,
  FAKE_ERR_OP = 10,
  FAKE_ERR_ARG = 13,
  FAKE_ERR_TRUNCATE = 15,
  FAKE_ERR_FULL = 16
};

/* A communicator. The next one reuses the place, and so the handle, of a freed one. */
struct comm {
  bool live;
  int rank, size;
};

/* A datatype without holes. */
struct type {
  bool live, committed, derived;
  int64_t bytes;
  int64_t element; /* bytes of the predefined type that it is made of */
};

/* A message: queued, then matched, then gone. */
struct message {
  enum { GONE, QUEUED, MATCHED } state;
  intptr_t comm;
  int source, tag;
  int64_t bytes;
  unsigned char *data; /* owned; NULL: hollow */
  uint64_t order;      /* of sending */
};

/* Records a call. Returns the error code that a test has injected, or MPI_SUCCESS. `call` is not NULL afterwards. */
int fake_begin(const char *name, struct fake_call **call);

/* The same for a function that communicates; also finds the communicator. */
int fake_begin_on(const char *name, MPI_Comm handle, struct fake_call **call, struct comm **comm);

#define TRY(expression)                     \
  do {                                      \
    int code_ = (expression);               \
    if (code_ != MPI_SUCCESS) return code_; \
  } while (0)

/* Open a function, with `call` as its record; and one that communicates, on `comm` of `handle`. */
#define CALL(name)        \
  struct fake_call *call; \
  TRY(fake_begin("MPI_" #name, &call))
#define BEGIN(name)       \
  struct fake_call *call; \
  struct comm *comm;      \
  TRY(fake_begin_on("MPI_" #name, handle, &call, &comm))

/* NULL: the handle is not live. */
struct comm *fake_comm(MPI_Comm handle);
struct type *fake_type(MPI_Datatype handle);

/* Record count, type and bytes; return an error code. An empty buffer may be NULL. */
int fake_reads(struct fake_call *call, const void *data, int count, MPI_Datatype type);
int fake_writes(struct fake_call *call, void *data, int count, MPI_Datatype type);

/* out = the reduction of `times` equal contributions. */
int fake_reduce(MPI_Op handle, const void *in, void *out, int count, MPI_Datatype type, int times);

/* Messages by place. fake_match takes the first that fits, or with `look` only tells of it: false where there is none.
 */
int fake_enqueue(intptr_t comm, int source, int tag, const void *data, int64_t bytes);
bool fake_match(MPI_Comm comm, int source, int tag, bool look, int *place, MPI_Status *status);
struct message *fake_message(int place);
void fake_drop(struct message *matched);

/* A request, which reads what the call reads until it ends, and whose result, which `call` has written already, is only
 * seen then: until then there is `before`, which is freed. NULL: it has no result. */
int fake_request(const struct fake_call *call, void *before, MPI_Request *request);

/* A copy of what is at `data`; NULL where it is not to be touched. */
void *fake_copy(const void *data, int64_t bytes);

/* A request that receives what `call` describes: a message that is there as it ends. fake_cancel: also without one. */
int fake_expect(const struct fake_call *call, MPI_Request *request);
int fake_cancel(const MPI_Request *request);

/* Ends a request; with `test` not if it is to stay under way. Returns an error code. */
int fake_end(MPI_Request *request, bool test, int *done, MPI_Status *status);

void fake_set_status(MPI_Status *status, int source, int tag, int64_t bytes);
int64_t fake_status_bytes(const MPI_Status *status);

/* Handles: the top bit set where they are integers, beyond 32 bits where they are pointers. */
enum fake_kind { KIND_COMM = 1, KIND_TYPE, KIND_OP, KIND_REQUEST, KIND_MESSAGE, KIND_GROUP };
#define FAKE_BASE                (sizeof(MPI_Comm) == sizeof(int) ? (intptr_t)INT32_MIN : (intptr_t)0x5a5a00000000)
#define FAKE_HANDLE(kind, place) (FAKE_BASE + ((intptr_t)(kind) << 24) + (intptr_t)(place))
#define FAKE_PLACE(kind, handle) ((intptr_t)(handle) - FAKE_HANDLE(kind, 0))

#endif
